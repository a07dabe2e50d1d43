"""Give LeakyRelu the slope that the NPU has for it: a multiple of 1 / 256.

alpha   becomes   round(256 * alpha) / 256
"""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from quark.npu import leaky_relu_alpha
from quark.onnx.graph import attribute

_STANDARD_ALPHA = 0.01


class LeakyRelu:
    name: ClassVar[str] = "leaky_relu"
    is_default: ClassVar[bool] = True
    op_types: ClassVar[tuple[str, ...]] = ("LeakyRelu",)

    def apply(self, model: ir.Model, node: ir.Node) -> bool:
        alpha = float(attribute(node, "alpha", _STANDARD_ALPHA))
        rounded = leaky_relu_alpha(alpha)
        if rounded == alpha:
            return False
        node.attributes["alpha"] = ir.AttrFloat32("alpha", rounded)
        return True
