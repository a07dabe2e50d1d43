"""The options of simulating an NPU: which operators are replaced by what it computes in their place."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SimulateOptions:
    """Names of the substitutions that are carried out; `quark.onnx.simulate.SUBSTITUTIONS` has them in their order.
    Empty: none."""

    substitutions: frozenset[str] = field(default_factory=frozenset)
