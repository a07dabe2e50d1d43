"""Fuse a division by the Euclidean norm into LpNormalization.

    x / ReduceL2(x)   and   x / sqrt(ReduceSum(x^2))   become   LpNormalization(x, p=2)

with the norm over one axis, kept as a dimension. A lower bound of the norm, max(norm, e) as exporters write it with e
up to 1e-12, is left out: it matters for vectors shorter than that. A vector of zeros gives zeros, and gave NaN
where there was no bound. Applies to float32 and float64: the runtime has no other.
"""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from quark.onnx.graph import attribute, become, dimensions, input_value, nodes, rank
from quark.onnx.optimize.normalization import made_by
from quark.onnx.optimize.rewrite import integers, reduction_axes, scalar

MAX_BOUND = 1.01e-12  # 1e-12, as float32 has it


class FuseL2Norm:
    name: ClassVar[str] = "fuse_l2_norm"
    is_default: ClassVar[bool] = True

    def apply(self, model: ir.Model) -> int:
        return sum(_fuse(model, node) for node in nodes(model) if node.op_type == "Div" and not node.domain)


def _fuse(model: ir.Model, div: ir.Node) -> bool:
    x = input_value(div, 0)
    if x is None or x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE) or rank(x) is None:
        return False
    reduction = _norm_of(_without_bound(_without_expand(input_value(div, 1), x)), x)
    axes = reduction_axes(model, reduction) if reduction is not None else None
    if reduction is None or axes is None or len(axes) != 1 or not attribute(reduction, "keepdims", 1):
        return False
    become(div, "LpNormalization", [x], {"axis": axes[0], "p": 2})
    return True


def _without_expand(value: ir.Value | None, x: ir.Value) -> ir.Value | None:
    """An Expand to the shape of x changes nothing for a division, which broadcasts by itself."""
    expand = made_by(value, "Expand")
    if expand is None:
        return value
    shape = made_by(input_value(expand, 1), "Shape")
    is_shape_of_x = shape is not None and input_value(shape, 0) is x and not shape.attributes
    return input_value(expand, 0) if is_shape_of_x or integers(input_value(expand, 1)) == _sizes(x) else value


def _sizes(x: ir.Value) -> list[int | None]:
    return list(dimensions(x) or ())


def _without_bound(value: ir.Value | None) -> ir.Value | None:
    clip, largest = made_by(value, "Clip"), made_by(value, "Max")
    if clip is not None and input_value(clip, 2) is None and _is_tiny(input_value(clip, 1)):
        return input_value(clip, 0)
    if largest is not None and len(largest.inputs) == 2:
        for index in (0, 1):
            if _is_tiny(input_value(largest, index)):
                return input_value(largest, 1 - index)
    return value


def _is_tiny(value: ir.Value | None) -> bool:
    number = scalar(value)
    return number is not None and 0 <= number <= MAX_BOUND


def _norm_of(value: ir.Value | None, x: ir.Value) -> ir.Node | None:
    """The reduction, where the value is the norm of x."""
    direct = made_by(value, "ReduceL2")
    if direct is not None:
        return direct if input_value(direct, 0) is x else None
    root = made_by(value, "Sqrt")
    total = made_by(input_value(root, 0), "ReduceSum") if root is not None else None
    square = input_value(total, 0) if total is not None else None
    power, product = made_by(square, "Pow"), made_by(square, "Mul")
    if power is not None and input_value(power, 0) is x and scalar(input_value(power, 1)) == 2:
        return total
    is_square = product is not None and input_value(product, 0) is x and input_value(product, 1) is x
    return total if is_square else None
