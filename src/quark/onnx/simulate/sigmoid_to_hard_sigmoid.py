"""Replace Sigmoid by the piecewise linear function that the NPU has for it.

    1 / (1 + exp(-x))   becomes   max(0, min(1, x / 6 + 1 / 2))

which is off by up to 0.07. Not an approximation of choice: it is what the hardware computes.
"""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from quark.npu import HARD_SIGMOID_ALPHA, HARD_SIGMOID_BETA
from quark.onnx.graph import become, input_value


class SigmoidToHardSigmoid:
    name: ClassVar[str] = "sigmoid_to_hard_sigmoid"
    is_default: ClassVar[bool] = True
    op_types: ClassVar[tuple[str, ...]] = ("Sigmoid",)

    def apply(self, model: ir.Model, node: ir.Node) -> bool:
        attributes = {"alpha": HARD_SIGMOID_ALPHA, "beta": HARD_SIGMOID_BETA}
        become(node, "HardSigmoid", [input_value(node, 0)], attributes)
        return True
