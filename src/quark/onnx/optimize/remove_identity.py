"""Remove nodes that do nothing.

    Identity, Dropout in inference, Cast to the type it has, Transpose that keeps the order, Reshape and Flatten to the
    shape it has, Pad by nothing, Slice of everything, Concat and Sum of one, Expand and Tile by ones,
    x + 0, x - 0, x * 1, x / 1

Applies when what makes it a no-op is known beforehand: shapes, constants, types. A node between an input and an output
of the graph stays: both keep their names. Adding zero may change the sign of a zero, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import onnx_ir as ir

from quark.onnx.graph import attribute, bypass, constant, dimensions, input_value, nodes, rank
from quark.onnx.optimize.rewrite import integers, scalar


class RemoveIdentity:
    name: ClassVar[str] = "remove_identity"
    is_default: ClassVar[bool] = True

    def apply(self, model: ir.Model) -> int:
        count = 0
        for node in nodes(model):
            does_nothing = _NOTHING.get(node.op_type)
            if node.domain or does_nothing is None or any(output.uses() for output in node.outputs[1:]):
                continue
            if any(output.is_graph_output() for output in node.outputs[1:]):
                continue
            source = does_nothing(node)
            if source is not None:
                count += bypass(node, source)
        return count


def _first(node: ir.Node) -> ir.Value | None:
    return input_value(node, 0)


def _dropout(node: ir.Node) -> ir.Value | None:
    if attribute(node, "training_mode", 0):
        return None
    mode = input_value(node, 2)
    training = constant(mode)
    is_inference = mode is None or (training is not None and not training.any())
    return _first(node) if is_inference else None


def _cast(node: ir.Node) -> ir.Value | None:
    value = _first(node)
    return value if value is not None and value.dtype == attribute(node, "to") else None


def _transpose(node: ir.Node) -> ir.Value | None:
    perm = attribute(node, "perm")
    return _first(node) if perm is not None and list(perm) == list(range(len(perm))) else None


def _reshape(node: ir.Node) -> ir.Value | None:
    """Every size is the one it has; zeros (where they mean that) and one -1 say so for sizes that are not known."""
    value, target = _first(node), integers(input_value(node, 1))
    dims = dimensions(value)
    if dims is None or target is None or len(target) != len(dims) or target.count(-1) > 1:
        return None
    keeps = not attribute(node, "allowzero", 0)
    is_same = all(size == had or size == -1 or (size == 0 and keeps) for size, had in zip(target, dims, strict=True))
    return value if is_same else None


def _flatten(node: ir.Node) -> ir.Value | None:
    return _first(node) if rank(_first(node)) == 2 and attribute(node, "axis", 1) in (1, -1) else None


def _pad(node: ir.Node) -> ir.Value | None:
    pads = integers(input_value(node, 1))
    return _first(node) if pads is not None and not any(pads) else None


def _slice(node: ir.Node) -> ir.Value | None:
    value = _first(node)
    starts, ends = integers(input_value(node, 1)), integers(input_value(node, 2))
    dims = dimensions(value)
    if dims is None or starts is None or ends is None or any(starts):
        return None
    axes = list(range(len(starts))) if input_value(node, 3) is None else integers(input_value(node, 3))
    steps = [1] if input_value(node, 4) is None else integers(input_value(node, 4))
    if axes is None or steps is None or any(step != 1 for step in steps):
        return None
    sizes = [dims[axis] for axis in axes]
    is_all = all(end >= 2**31 - 1 or (size is not None and end >= size) for end, size in zip(ends, sizes, strict=True))
    return value if is_all else None


def _of_one(node: ir.Node) -> ir.Value | None:
    return _first(node) if len(node.inputs) == 1 else None


def _all_ones(node: ir.Node) -> ir.Value | None:
    value, sizes = _first(node), integers(input_value(node, 1))
    has_room = sizes is not None and (rank(value) or -1) >= len(sizes)
    return value if sizes is not None and has_room and all(size == 1 for size in sizes) else None


def _neutral(number: float, *, is_commutative: bool) -> Callable[[ir.Node], ir.Value | None]:
    """The other operand, where one is a constant of nothing but `number` that does not make the result larger."""

    def other(node: ir.Node) -> ir.Value | None:
        for index in (1, 0) if is_commutative else (1,):
            value = input_value(node, 1 - index)
            if value is None or (rank(input_value(node, index)) or 0) > (rank(value) or 0):
                continue
            if scalar(input_value(node, index)) == number:
                return value
        return None

    return other


_NOTHING: Mapping[str, Callable[[ir.Node], ir.Value | None]] = {
    "Identity": _first,
    "Dropout": _dropout,
    "Cast": _cast,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Pad": _pad,
    "Slice": _slice,
    "Concat": _of_one,
    "Sum": _of_one,
    "Max": _of_one,
    "Min": _of_one,
    "Mean": _of_one,
    "Expand": _all_ones,
    "Tile": _all_ones,
    "Add": _neutral(0, is_commutative=True),
    "Sub": _neutral(0, is_commutative=False),
    "Mul": _neutral(1, is_commutative=True),
    "Div": _neutral(1, is_commutative=False),
}
