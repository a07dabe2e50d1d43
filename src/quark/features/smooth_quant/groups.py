"""Smooth a graph: find the layers whose input can be smoothed, in groups that must share scales, and change each group.

A layer is a MatMul, Gemm, Conv or ConvTranspose with a constant weight. Layers that read the same tensor share its
scales, and so do layers that share a weight, whose rows can only be multiplied once. A weight that something else reads
as well, such as the table of an embedding, stays as it is, with its layers.

The tensors of a group are divided in the constants of what computes them (`folding`) if nothing but the layers reads
them; otherwise by a Mul before the layers, if the road inserts nodes. A group is left as it is if the estimated error
would not fall enough. That holds for a given alpha too, since one alpha for a whole network ruins single layers.
Convolutions must gain more, and even more if it takes a Mul. Groups with weights that would leave the range of their
type are left, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quark.account import AlgorithmFacts
from quark.decide.specs import AffineSpec, LayerSpec
from quark.decide.view import Array, Graph, Node, Value
from quark.features.smooth_quant.folding import Edit, Fold, Reader, Road, find_fold
from quark.features.smooth_quant.options import OUTLIERS, SmoothOptions
from quark.features.smooth_quant.smoothing import ChannelStatistics, LayerWeight, Smoothing, Steps, find_smoothing
from quark.plan import SkippedNode

NAME = "SmoothQuant"
LAYER_TYPES = ("MatMul", "Gemm", "Conv", "ConvTranspose")
MIN_GAIN_DB = 1.0
MIN_CONV_GAIN_DB = 6.0  # without outliers, calibration that averages or clips ranges loses as much again
MIN_CONV_MUL_GAIN_DB = 10.0  # only for outliers: the Mul prevents the layer before it from being computed in integers


@dataclass(frozen=True, eq=False)
class Layer:
    """A node that sums over `axis` (from the end) of input number `data`, with the rows of a constant weight."""

    node: Node
    data: int
    axis: int
    row_axis: int  # row axis of the weight; for a Conv, within its group

    @property
    def tensor(self) -> Value:
        value = self.node.inputs[self.data]
        assert value is not None
        return value

    @property
    def weight(self) -> Value:
        value = self.node.inputs[1 - self.data]
        assert value is not None
        return value

    @property
    def groups(self) -> int:
        return int(self.node.setting("group", 1))

    @property
    def use(self) -> tuple[str, int, int]:
        """The way in which the weight is read: layers that read it alike can share scales."""
        return self.node.op_type, self.row_axis, self.groups

    def arranged(self) -> LayerWeight:
        """The weight by groups, input channels, outputs and taps."""
        weight = self.weight.array()
        assert weight is not None
        if self.node.op_type in ("Conv", "ConvTranspose"):
            by_group = weight.reshape(self.groups, weight.shape[0] // self.groups, weight.shape[1], -1)
            return LayerWeight.of(by_group.transpose(0, 2, 1, 3) if self.node.op_type == "Conv" else by_group)
        rows = np.moveaxis(weight, self.row_axis, 0)
        return LayerWeight.of(rows.reshape(1, rows.shape[0], -1, 1))

    def rows_times(self, scales: Array) -> Edit:
        """The edit that multiplies the rows of the weight."""
        assert self.weight.constant is not None
        shape = self.weight.constant.shape
        if self.node.op_type == "Conv":
            by_output = np.repeat(scales.reshape(self.groups, -1), shape[0] // self.groups, axis=0)
            factor = by_output.reshape(*by_output.shape, *(1,) * (len(shape) - 2))
        else:
            factor = scales.reshape(-1, *(1,) * (len(shape) - self.row_axis - 1))
        return Edit(self.node, 1 - self.data, factor, is_by_input=True)


@dataclass(frozen=True, eq=False)
class Group:
    """Layers with the same scales, in the order of the graph."""

    layers: tuple[Layer, ...]

    @property
    def tensors(self) -> dict[Value, list[Layer]]:
        """The tensors that the layers read, each with its layers."""
        layers_of: dict[Value, list[Layer]] = {}
        for layer in self.layers:
            layers_of.setdefault(layer.tensor, []).append(layer)
        return layers_of

    @property
    def is_conv(self) -> bool:
        return any(layer.node.op_type in ("Conv", "ConvTranspose") for layer in self.layers)


def steps_of(specs: LayerSpec) -> Steps:
    """The quantization steps of layers with these specs."""
    return Steps(
        is_per_channel=not isinstance(specs.weight, AffineSpec) or specs.weight.is_per_channel,
        is_symmetric=isinstance(specs.activation, AffineSpec) and specs.activation.is_symmetric,
    )


def tensors_to_survey(graph: Graph, road: Road) -> dict[str, int]:
    """The tensors whose statistics `smooth_graph` needs, each with the axis of its channels, from the end."""
    groups, _ = find_groups(graph, road.obstacle)
    return {layer.tensor.name: layer.axis for group in groups for layer in group.layers}


def smooth_graph(
    graph: Graph, road: Road, options: SmoothOptions, statistics: Mapping[str, ChannelStatistics], steps: Steps
) -> AlgorithmFacts:
    """Smooth, in place, the groups that gain by it."""
    groups, left = find_groups(graph, road.obstacle)
    changed: list[str] = []
    # from the back, because a layer's columns need their final scales before its rows are considered
    for group in reversed(groups):
        change = _find_change(group, road, options, statistics, steps)
        if isinstance(change, str):
            left += [(layer.node, change) for layer in group.layers]
        else:
            changed.append(_carry_out(group, road, *change))
    position = {node: i for i, node in enumerate(graph)}
    left.sort(key=lambda entry: position[entry[0]])
    skipped = tuple(SkippedNode(node.label, node.op_type, reason) for node, reason in left)
    return AlgorithmFacts(NAME, tuple(reversed(changed)), skipped)


def find_groups(
    graph: Graph, obstacle_of: Callable[[Node], str | None] = lambda node: None
) -> tuple[list[Group], list[tuple[Node, str]]]:
    """All groups in the order of their first layers, and the layers that cannot be smoothed, with the reason.
    `obstacle_of` names reasons that the graph does not show."""
    layers: list[Layer] = []
    left: list[tuple[Node, str]] = []
    axes: dict[Value, int] = {}
    for node in graph:
        if node.op_type not in LAYER_TYPES or not node.is_standard or node.reads_float_for == OUTLIERS:
            continue
        result = obstacle_of(node) or _layer(node)
        if isinstance(result, Layer) and axes.setdefault(result.tensor, result.axis) != result.axis:
            result = f"sums over another axis of '{result.tensor.name}' than the layers before it"
        if isinstance(result, Layer):
            layers.append(result)
        else:
            left.append((node, result))
    uses = {(layer.node, 1 - layer.data): layer.use for layer in layers}
    possible: list[Layer] = []
    for layer in layers:
        others = [node for node, index in layer.weight.readers if uses.get((node, index)) != layer.use]
        if layer.weight.outputs:
            left.append((layer.node, "its weight is an output of the model"))
        elif others:
            left.append((layer.node, f"its weight is also read by '{others[0].label}' in another way"))
        else:
            possible.append(layer)
    return _grouped(possible), left


def _layer(node: Node) -> Layer | str:
    """The layer, or the reason why the node cannot be smoothed."""
    inputs = node.input(0), node.input(1)
    constants = [value is not None and value.constant is not None for value in inputs]
    if all(constants):
        return "its input is a constant"
    if node.op_type != "MatMul" and not constants[1]:
        return "its weight is not constant"
    if not any(constants):
        return "both operands are activations"
    data = constants.index(False)
    value, weight = inputs[data], inputs[1 - data]
    if value is None or weight is None or not weight.is_number:
        return "computes on integers"
    shape = weight.shape or ()
    if not all(shape):
        return "its weight is empty"
    if node.op_type in ("Conv", "ConvTranspose"):
        return Layer(node, data, 1 - len(shape), 1 if node.op_type == "Conv" else 0)
    if node.op_type == "Gemm":
        return Layer(node, data, -2 if node.setting("transA", 0) else -1, 1 if node.setting("transB", 0) else 0)
    if data == 0:
        return Layer(node, data, -1, max(len(shape) - 2, 0))
    if value.rank is None:
        return "the shape of its input is not known"
    return Layer(node, data, -1 if value.rank == 1 else -2, len(shape) - 1)


def _grouped(layers: Sequence[Layer]) -> list[Group]:
    """Join layers that share a tensor or a weight."""
    members: dict[Value, list[Layer]] = {}
    for layer in layers:
        joined = members.get(layer.tensor, [])
        others = members.get(layer.weight, [])
        if others is not joined:
            joined = joined + others
        joined.append(layer)
        members.update(dict.fromkeys((value for member in joined for value in (member.tensor, member.weight)), joined))
    position = {layer: i for i, layer in enumerate(layers)}
    distinct = {id(group): sorted(group, key=position.__getitem__) for group in members.values()}
    return sorted((Group(tuple(group)) for group in distinct.values()), key=lambda group: position[group.layers[0]])


def _find_change(
    group: Group, road: Road, options: SmoothOptions, statistics: Mapping[str, ChannelStatistics], steps: Steps
) -> tuple[Smoothing, list[Fold | None]] | str:
    """The scales of the group, and how each of its tensors is divided by them (None: by a Mul), or the reason to leave
    it as it is."""
    weights = [layer.arranged() for layer in group.layers]
    channels = weights[0].reach.size
    known = [statistics.get(value.name) for value in group.tensors]
    for value, measured in zip(group.tensors, known, strict=True):
        if measured is None or measured.reach.size != channels:
            return f"'{value.name}' was not looked at for each of its {channels} channels"
        if not measured.is_finite:
            return f"'{value.name}' has values that are not finite, or too large to be squared"
    of_all = functools.reduce(ChannelStatistics.with_other, [measured for measured in known if measured is not None])
    smoothing = find_smoothing(weights, of_all, options.alpha, steps)
    if not smoothing.gain_db >= (MIN_CONV_GAIN_DB if group.is_conv else MIN_GAIN_DB):  # NaN is not a gain
        alpha = f"alpha {smoothing.alpha:g}" if options.alpha is not None else "the best alpha"
        if smoothing.gain_db <= 0:
            return f"{alpha} would raise the estimated error by {-smoothing.gain_db:.1f} dB"
        return f"{alpha} would lower the estimated error by {smoothing.gain_db:.1f} dB only"
    if not all(road.is_possible(layer.rows_times(smoothing.scales)) for layer in group.layers):
        return "its weight would leave the range of its type"
    folds: list[Fold | None] = []
    for value, layers in group.tensors.items():
        readers = _readers(layers)
        is_free = not value.outputs and all(reader in readers for reader in value.readers)
        folds.append(find_fold(value, _factor(layers[0], smoothing.scales), road) if is_free else None)
        if folds[-1] is None and road.insert_mul is None:
            return f"nothing that computes '{value.name}' can take the division in"
    if group.is_conv and None in folds and smoothing.gain_db < MIN_CONV_MUL_GAIN_DB:
        return f"would take a Mul before a convolution to lower the estimated error by {smoothing.gain_db:.1f} dB"
    return smoothing, folds


def _readers(layers: Sequence[Layer]) -> list[Reader]:
    return [(layer.node, layer.data) for layer in layers]


def _factor(layer: Layer, scales: Array) -> Array:
    """The divisor of the layer's input for these scales, in a shape that broadcasts to it."""
    return (1 / scales).reshape(-1, *(1,) * (-layer.axis - 1))


def _carry_out(group: Group, road: Road, smoothing: Smoothing, folds: Sequence[Fold | None]) -> str:
    """Change the graph; returns what was done, in words."""
    for layer in {layer.weight: layer for layer in group.layers}.values():
        road.write([layer.rows_times(smoothing.scales)])
    for layers, fold in zip(group.tensors.values(), folds, strict=True):
        if fold is not None:
            road.write(fold.edits)
        elif road.insert_mul is not None:
            road.insert_mul(_readers(layers), _factor(layers[0], smoothing.scales))
    into = ", ".join(f"{fold.into.op_type} {fold.into.label}" for fold in folds if fold is not None)
    muls = sum(fold is None for fold in folds)
    places = [f"folded into {into}"] if into else []
    places += [f"{muls} Mul inserted"] if muls else []
    names = ", ".join(layer.node.label for layer in group.layers)
    gain = f"estimated error {-smoothing.gain_db:+.1f} dB"
    return f"{names}: alpha {smoothing.alpha:g}, {' and '.join(places)}, {gain}"
