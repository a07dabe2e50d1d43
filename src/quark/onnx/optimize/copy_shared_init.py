"""Give each reader of a shared constant its own copy.

So that readers can have scales of their own. Applies to floating-point initializers that several inputs read, at
readers of the listed operators, or at all; the first reader keeps the original. Only when asked for: the file grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from quark.onnx.graph import add_copy, is_constant, is_float, readers, replace_input


@dataclass(frozen=True)
class CopySharedInit:
    name: ClassVar[str] = "copy_shared_init"
    is_default: ClassVar[bool] = False
    op_types: tuple[str, ...] = ()

    def apply(self, model: ir.Model) -> int:
        shared = [value for value in model.graph.initializers.values() if len(value.uses()) > 1]
        return sum(self._copy(model, value) for value in shared)

    def _copy(self, model: ir.Model, value: ir.Value) -> int:
        if not is_constant(value) or not is_float(value):
            return 0
        uses = readers(value)
        wanted = [use for use in uses if not self.op_types or use[0].op_type in self.op_types]
        copied = wanted[1:] if len(wanted) == len(uses) and not value.is_graph_output() else wanted
        for node, index in copied:
            replace_input(node, index, add_copy(model, value))
        return len(copied)
