"""Channels through operators that only rearrange a tensor."""

from __future__ import annotations

import onnx_ir as ir

from quark.equalization.channels import CannotScaleError, Channels, through_permutation, through_shapes
from quark.onnx.graph import attribute, dimensions, input_value


def through_transpose(node: ir.Node, value: ir.Value, channels: Channels) -> tuple[tuple[ir.Value, Channels], ...]:
    """The channels before and behind a Transpose, from those of one of the two."""
    first, last = _ends(node)
    order = list(attribute(node, "perm") or reversed(range(len(dimensions(first) or ()))))
    before, behind = through_permutation(order, channels, value is first, "Transpose")
    return (first, before), (last, behind)


def through_reshape(node: ir.Node, value: ir.Value, channels: Channels) -> tuple[tuple[ir.Value, Channels], ...]:
    """The channels before and behind a reshape, from those of one of the two."""
    first, last = _ends(node)
    sizes = dimensions(first), dimensions(last)
    before, behind = through_shapes(*sizes, channels, value is first, node.op_type)
    return (first, before), (last, behind)


def _ends(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    first = input_value(node, 0)
    if first is None:
        raise CannotScaleError(f"{node.op_type} has no tensor to scale")
    return first, node.outputs[0]
