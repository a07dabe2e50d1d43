"""Channels through operators that only rearrange a tensor."""

from __future__ import annotations

import math

import onnx_ir as ir

from quark.onnx.equalize.channels import CannotScaleError, Channels
from quark.onnx.graph import attribute, dimensions, input_value


def through_transpose(node: ir.Node, value: ir.Value, channels: Channels) -> tuple[tuple[ir.Value, Channels], ...]:
    """The channels before and behind a Transpose, from those of one of the two."""
    first, last = _ends(node)
    order = list(attribute(node, "perm") or reversed(range(len(dimensions(first) or ()))))
    if channels.axis >= len(order):
        raise CannotScaleError("Transpose of a tensor of unknown rank")
    if value is first:
        return (first, channels), (last, Channels(order.index(channels.axis), channels.width))
    return (first, Channels(order[channels.axis], channels.width)), (last, channels)


def through_reshape(node: ir.Node, value: ir.Value, channels: Channels) -> tuple[tuple[ir.Value, Channels], ...]:
    """The channels before and behind a reshape that keeps the first axis, from those of one of the two.

    Either the channels stay what they are, as in [N, C, H, W] to [N, C, H*W], or what follows them is flattened into
    their axis, as in [N, C, H, W] to [N, C*H*W], where each is H*W wide. All sizes but the first must be known.
    """
    first, last = _ends(node)
    before, after = dimensions(first), dimensions(last)
    if before is None or after is None or channels.axis != 1 or len(before) < 2 or len(after) < 2:
        raise CannotScaleError(f"{node.op_type} mixes axes")
    inner, outer = [size for size in before[1:] if size], [size for size in after[1:] if size]
    if len(inner) != len(before) - 1 or len(outer) != len(after) - 1 or math.prod(inner) != math.prod(outer):
        raise CannotScaleError(f"{node.op_type} mixes axes")
    if inner[0] == outer[0]:
        return (first, channels), (last, channels)
    width = math.prod(inner[1:])
    if outer[0] != inner[0] * width or (value is last and channels.width % width):
        raise CannotScaleError(f"{node.op_type} mixes channels")
    narrow = channels.width if value is first else channels.width // width
    return (first, Channels(1, narrow)), (last, Channels(1, narrow * width))


def _ends(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    first = input_value(node, 0)
    if first is None:
        raise CannotScaleError(f"{node.op_type} has no tensor to scale")
    return first, node.outputs[0]
