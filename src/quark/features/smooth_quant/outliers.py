"""Compute the few input channels of a product that smoothing cannot help in float.

Smoothing moves width from a channel of the input to its row of the weight. The product of the two widths stays as it
is, so a channel in which both are far wider than in the others makes one of them hard to round, whatever alpha is. The
massive activations of transformers are such channels: at one or two tokens they are hundreds of times larger than
everything else, and a step that covers them rounds all other tokens to zero. With O for these channels,

    y = x W = x' W' + x_O W_O           x', W': without the channels O

in which only x' and W' are quantized. The second product is small: at most one channel in `USUAL` is taken out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from quark.account import AlgorithmFacts
from quark.decide.view import Array
from quark.features.smooth_quant.folding import Road
from quark.features.smooth_quant.groups import Group, Layer, find_groups
from quark.features.smooth_quant.options import OUTLIERS
from quark.features.smooth_quant.smoothing import ChannelStatistics
from quark.onnx.graph import READS_FLOAT, add_initializer, add_node, constant, is_read_once, readers
from quark.onnx.view import view_of
from quark.report.quantities import count_of

FACTOR = 8.0  # the width of an outlier relative to the usual one, in the product of both widths
USUAL = 64  # one channel in this many may be wider than usual
FEWEST_CHANNELS = 2 * USUAL


def outlier_channels(activation_reach: Array, weight_reach: Array) -> Array:
    """The numbers of the channels that are far wider than the others in input and weight together.

    >>> reach = np.ones(128)
    >>> reach[5] = 40.0
    >>> outlier_channels(reach, np.ones(128)), outlier_channels(reach, 1 / reach)
    (array([5]), array([], dtype=int64))
    """
    widths = np.asarray(activation_reach, np.float64) * np.asarray(weight_reach, np.float64)
    if widths.size < FEWEST_CHANNELS or not np.isfinite(widths).all():
        return np.zeros(0, np.int64)
    usual = np.sort(widths)[-1 - widths.size // USUAL]
    return np.flatnonzero(widths > FACTOR * usual) if usual > 0 else np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class _Split:
    """A group with its outliers, and where the result of the second product is added for each layer."""

    group: Group
    channels: Array
    places: Sequence[ir.Value]


def split_outliers(
    model: ir.Model, statistics: dict[str, ChannelStatistics], road: Road | None = None
) -> AlgorithmFacts | None:
    """Split the products that have such channels, in place, and add the statistics of what is left of their inputs.
    Returns what was done, or None if there was nothing to do. Nodes that the road has an obstacle for are left."""
    groups, _ = find_groups(view_of(model)) if road is None else find_groups(view_of(model), road.obstacle)
    splits = [split for group in groups if (split := _split_of(group, statistics)) is not None]
    changed = [_carry_out(model, split, statistics) for split in splits]
    return AlgorithmFacts(OUTLIERS, tuple(changed), ()) if changed else None


def _split_of(group: Group, statistics: dict[str, ChannelStatistics]) -> _Split | None:
    if len(group.tensors) != 1 or not all(_is_plain(layer) for layer in group.layers):
        return None
    known = statistics.get(next(iter(group.tensors)).name)
    reach = np.max([layer.arranged().reach for layer in group.layers], axis=0)
    if known is None or known.reach.size != reach.size or not known.is_finite:
        return None
    channels = outlier_channels(known.reach, reach)
    places = [_place(layer.node.origin) for layer in group.layers]
    if not channels.size or any(place.is_graph_output() for place in places):
        return None
    return _Split(group, channels, places)


def _is_plain(layer: Layer) -> bool:
    """True for a product with a matrix that nothing else reads."""
    is_matrix = layer.weight.constant is not None and len(layer.weight.constant.shape) == 2
    return layer.node.op_type == "MatMul" and layer.data == 0 and is_matrix and is_read_once(layer.weight.origin)


def _place(node: ir.Node) -> ir.Value:
    """The result of the product, behind its bias if it has one, so that the bias stays with it."""
    value = node.outputs[0]
    if is_read_once(value):
        reader, index = readers(value)[0]
        if reader.op_type == "Add" and reader.graph is node.graph and constant(reader.inputs[1 - index]) is not None:
            return reader.outputs[0]
    return value


def _carry_out(model: ir.Model, split: _Split, statistics: dict[str, ChannelStatistics]) -> str:
    """Change the graph; returns what was done, in words."""
    group, channels = split.group, split.channels
    tensor = next(iter(group.tensors))
    value, first = tensor.origin, group.layers[0].node.origin
    weight = constant(first.inputs[1])
    assert weight is not None
    usual = np.ones(weight.shape[0], weight.dtype)
    usual[channels] = 0
    held = add_initializer(model, f"{value.name}_usual", usual)
    numbers = add_initializer(model, f"{value.name}_outliers", channels.astype(np.int64))
    rest = add_node(model, "Mul", [value, held], before=first, name=f"{first.name}_usual")
    rest.outputs[0].shape = value.shape
    picked = add_node(
        model, "Gather", [value, numbers], before=first, name=f"{first.name}_outlier_inputs", attributes={"axis": -1}
    )
    added = [rest, picked]
    for layer, place in zip(group.layers, split.places, strict=True):
        added.append(_add_product(model, layer.node.origin, place, channels, picked))
        layer.node.origin.replace_input_with(0, rest.outputs[0])
    for node in added:
        node.meta[READS_FLOAT] = OUTLIERS
    known = statistics[tensor.name]
    lowest, highest, squares = (value * (usual != 0) for value in (known.lowest, known.highest, known.mean_square))
    statistics[str(rest.outputs[0].name)] = replace(known, lowest=lowest, highest=highest, mean_square=squares)
    names = ", ".join(layer.node.label for layer in group.layers)
    return f"{names}: {count_of(channels.size, 'channel')} of {weight.shape[0]} in float"


def _add_product(model: ir.Model, node: ir.Node, place: ir.Value, channels: Array, picked: ir.Node) -> ir.Node:
    """Take the rows of the channels out of the weight, and add their product behind the place."""
    weight = node.inputs[1]
    rows = constant(weight)
    assert weight is not None
    assert rows is not None
    uses = list(place.uses())
    held = add_initializer(model, f"{weight.name}_outliers", rows[channels])
    rows = rows.copy()
    rows[channels] = 0
    weight.const_value = ir.Tensor(rows, name=weight.name)
    small = add_node(model, "MatMul", [picked.outputs[0], held], after=node, name=f"{node.name}_outliers")
    last = place.producer()
    total = add_node(
        model, "Add", [place, small.outputs[0]], after=small if last is node else last, name=f"{node.name}_total"
    )
    small.outputs[0].shape = total.outputs[0].shape = place.shape
    for use in uses:
        use.node.replace_input_with(use.idx, total.outputs[0])
    return small
