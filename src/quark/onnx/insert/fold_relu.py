"""Drop activations that saturation does already.

    Relu(x) before codes whose lowest one stands for zero          = the codes of x
    Clip(x, a, b) before codes that stand for nothing beyond a, b  = the codes of x

Applies where nothing else reads the activation. Rounding is monotone, so that the codes are the same.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import bypass, constant, input_value, nodes, readers

_TOLERANCE = 1e-5  # of the bound: scales are rounded


def fold_activations(model: ir.Model) -> int:
    """Remove what it can; how many."""
    return sum(_fold(node) for node in nodes(model) if node.op_type in ("Relu", "Clip") and node.domain == "")


def _fold(node: ir.Node) -> bool:
    following = readers(node.outputs[0])
    if node.outputs[0].is_graph_output() or not following:
        return False
    low, high = _bounds(node)
    if low is None or high is None:
        return False
    return all(_is_within(reader, low, high) for reader, _ in following) and bypass(node)


def _bounds(node: ir.Node) -> tuple[float | None, float | None]:
    """The lowest and highest number that comes out; None where that is not known beforehand."""
    if node.op_type == "Relu":
        return 0.0, np.inf
    found: list[float | None] = []
    for index, default in ((1, -np.inf), (2, np.inf)):
        value = input_value(node, index)
        array = constant(value)
        found.append(default if value is None else None if array is None else float(array))
    return found[0], found[1]


def _is_within(reader: ir.Node, low: float, high: float) -> bool:
    """That the reader is a QuantizeLinear of the whole tensor whose codes stay within the bounds."""
    scale, zero_point = constant(input_value(reader, 1)), constant(input_value(reader, 2))
    if reader.op_type != "QuantizeLinear" or scale is None or zero_point is None or scale.size != 1:
        return False
    limits = np.iinfo(zero_point.dtype)
    lowest = (limits.min - int(zero_point)) * float(scale)
    highest = (limits.max - int(zero_point)) * float(scale)
    return lowest >= low - _TOLERANCE * abs(low) and highest <= high + _TOLERANCE * abs(high)
