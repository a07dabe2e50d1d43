"""The options of optimizing: which rewrites run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizeOptions:
    """Rewrites that are on by default, less `disabled`, and those that must be asked for: `enabled`. Both hold names of
    rewrites; `quark.onnx.optimize.REWRITES` has them in their order.

    The two lists of operators say where `copy_shared_init` and `copy_bias_init` apply, once enabled; empty is
    everywhere.
    """

    disabled: frozenset[str] = frozenset()
    enabled: frozenset[str] = frozenset()
    shared_init_op_types: tuple[str, ...] = ()
    bias_init_op_types: tuple[str, ...] = ()

    @property
    def changes_outputs(self) -> bool:
        """That a rewrite is asked for which is not exact."""
        return "replace_clip6_relu" in self.enabled
