"""Give each layer its own copy of a bias that several share.

A bias is quantized with the scales of its layer's input and weight, so that two layers cannot share the integers.
Applies to the bias of Conv, ConvTranspose and Gemm, of the listed operators or all; the first reader keeps the
original. Only when asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from quark.onnx.graph import add_copy, is_constant, is_float, readers, replace_input

BIAS_INDEX = 2
LAYERS = ("Conv", "ConvTranspose", "Gemm")


@dataclass(frozen=True)
class CopyBiasInit:
    name: ClassVar[str] = "copy_bias_init"
    is_default: ClassVar[bool] = False
    op_types: tuple[str, ...] = ()

    def apply(self, model: ir.Model) -> int:
        shared = [value for value in model.graph.initializers.values() if len(value.uses()) > 1]
        return sum(self._copy(model, value) for value in shared)

    def _copy(self, model: ir.Model, value: ir.Value) -> int:
        uses = readers(value)
        if not is_constant(value) or not is_float(value):
            return 0
        wanted = [use for use in uses if self._is_bias(*use)]
        copied = wanted[1:] if len(wanted) == len(uses) and not value.is_graph_output() else wanted
        for node, index in copied:
            replace_input(node, index, add_copy(model, value))
        return len(copied)

    def _is_bias(self, node: ir.Node, index: int) -> bool:
        return index == BIAS_INDEX and node.op_type in LAYERS and (not self.op_types or node.op_type in self.op_types)
