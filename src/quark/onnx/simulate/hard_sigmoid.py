"""Multiply HardSigmoid(alpha 1/6, beta 1/2) by what the NPU's slope is off: it has 2731 / 2^14 for 1 / 6."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from quark.npu import HARD_SIGMOID_FACTOR, is_npu_hard_sigmoid
from quark.onnx.graph import attribute
from quark.onnx.simulate.substitution import scale_output


class HardSigmoid:
    name: ClassVar[str] = "hard_sigmoid"
    is_default: ClassVar[bool] = True
    op_types: ClassVar[tuple[str, ...]] = ("HardSigmoid",)

    def apply(self, model: ir.Model, node: ir.Node) -> bool:
        if not is_npu_hard_sigmoid(float(attribute(node, "alpha", 0.2)), float(attribute(node, "beta", 0.5))):
            return False
        return scale_output(model, node, HARD_SIGMOID_FACTOR)
