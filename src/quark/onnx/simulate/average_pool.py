"""Multiply the mean of a pooling window by what the NPU's division is off; see `quark.npu.factors`.

Applies to square windows in two dimensions: of GlobalAveragePool, where the size of the image is known beforehand.
"""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from quark.npu import average_pool_factor
from quark.onnx.graph import attribute, dimensions, input_value
from quark.onnx.simulate.substitution import scale_output


class AveragePool:
    name: ClassVar[str] = "average_pool"
    is_default: ClassVar[bool] = True
    op_types: ClassVar[tuple[str, ...]] = ("AveragePool", "GlobalAveragePool")

    def apply(self, model: ir.Model, node: ir.Node) -> bool:
        side = square_side(node)
        return side is not None and scale_output(model, node, average_pool_factor(side, side))


def square_side(node: ir.Node) -> int | None:
    """The side of the window, where it is a square and known."""
    if node.op_type == "AveragePool":
        window: tuple[int | None, ...] = tuple(attribute(node, "kernel_shape", ()))
    else:
        window = (dimensions(input_value(node, 0)) or ())[2:]
    is_square = len(window) == 2 and window[0] == window[1]
    return window[0] if is_square and window[0] else None
