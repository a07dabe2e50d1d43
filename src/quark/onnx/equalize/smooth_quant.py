"""SmoothQuant on a graph: channels of a layer's input are divided by scales that its weight is multiplied by.

The algebra is in `quark.equalization.smooth`. Here are the layers (`smooth_quant_groups`), and where the division goes:
into the constants of what computes the input (`smooth_quant_fold`) where all its readers are layers that take part,
else into a Mul before those that do. Such a Mul is to stay in float and to read its input in float: behind a quantizer,
the small channels that it would save are lost already. It is marked so (`READS_FLOAT`).

A group of layers is left as it is where the estimated error would not fall enough; for a given alpha as well, since one
for the whole network ruins single layers. Convolutions must gain more, and the more where it takes a Mul. Weights that
would leave the range of their type are left, too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from quark.account import AlgorithmFacts
from quark.equalization.smooth import ChannelStatistics, Smoothing, Steps, find_smoothing
from quark.onnx.equalize.options import SmoothOptions
from quark.onnx.equalize.smooth_quant_fold import Fold, find_fold
from quark.onnx.equalize.smooth_quant_groups import Group, Layer, find_groups
from quark.onnx.graph import READS_FLOAT, add_initializer, add_node, constant, nodes, readers, replace_input
from quark.onnx.narrowing import in_dtype
from quark.plan import SkippedNode

Array = NDArray[Any]

NAME = "SmoothQuant"
MIN_GAIN_DB = 1.0
MIN_CONV_GAIN_DB = 6.0  # where little sticks out, ranges that calibration averages or cuts lose as much again
MIN_CONV_MUL_GAIN_DB = 10.0  # outliers only: the Mul keeps the layer before it from being computed in integers


def smooth_tensors(model: ir.Model, options: SmoothOptions) -> dict[str, int]:
    """The tensors whose channels `smooth` wants to know about, each with the axis of the channels, from the end."""
    groups, _ = find_groups(model)
    return {str(layer.tensor.name): layer.axis for group in groups for layer in group.layers}


def smooth(
    model: ir.Model,
    options: SmoothOptions,
    statistics: Mapping[str, ChannelStatistics],
    *,
    is_per_channel: bool = True,
    is_symmetric: bool = False,
) -> AlgorithmFacts:
    """Smooth in place what gains by it. `is_per_channel`: weights will have a scale for each output channel.
    `is_symmetric`: activations will have ranges that are as wide on both sides of zero."""
    steps = Steps(is_per_channel, is_symmetric)
    groups, left = find_groups(model)
    changed: list[str] = []
    # from the back: a layer's columns have their final scale before its rows are looked at
    for group in reversed(groups):
        found = _find_change(group, options, statistics, steps)
        if isinstance(found, str):
            left += [SkippedNode(str(each.node.name), each.node.op_type, found) for each in group.layers]
        else:
            changed.append(found.carry_out(model))
    position = {node.name: i for i, node in enumerate(nodes(model))}
    return AlgorithmFacts(NAME, tuple(reversed(changed)), tuple(sorted(left, key=lambda each: position[each.node])))


@dataclass(frozen=True, eq=False)
class _Change:
    """A group with its scales, and how each of its tensors comes to be divided by them: None is a Mul."""

    group: Group
    smoothing: Smoothing
    folds: Mapping[str, Fold | None]

    def carry_out(self, model: ir.Model) -> str:
        """Change the model; what was done, in words."""
        for layer in {id(layer.weight): layer for layer in self.group.layers}.values():
            scaled = _scaled_weight(layer, self.smoothing.scales)
            assert scaled is not None
            layer.weight.const_value = ir.Tensor(scaled, name=layer.weight.name)
        for name, value in self.group.tensors.items():
            fold = self.folds[name]
            if fold is None:
                _insert_mul(model, self.group.layers_of(value), 1 / self.smoothing.scales)
            else:
                fold.apply(model)
        gain = f"estimated error {-self.smoothing.gain_db:+.1f} dB"
        return f"{self.group.names}: alpha {self.smoothing.alpha:g}, {self._places()}, {gain}"

    def _places(self) -> str:
        found = [fold for fold in self.folds.values() if fold is not None]
        into = ", ".join(f"{fold.into.op_type} {fold.into.name}" for fold in found)
        muls = len(self.folds) - len(found)
        parts = [f"folded into {into}"] if into else []
        return " and ".join(parts + ([f"{muls} Mul inserted"] if muls else []))


def _find_change(
    group: Group, options: SmoothOptions, statistics: Mapping[str, ChannelStatistics], steps: Steps
) -> _Change | str:
    """What to do with the group, or the reason why nothing."""
    weights = [layer.arranged() for layer in group.layers]
    known = _statistics(group, statistics, weights[0].reach.size)
    if isinstance(known, str):
        return known
    smoothing = find_smoothing(weights, known, options.alpha, steps)
    is_conv = any(layer.is_conv for layer in group.layers)
    if not smoothing.gain_db >= (MIN_CONV_GAIN_DB if is_conv else MIN_GAIN_DB):  # NaN is no gain
        return _too_little(smoothing, options)
    if any(_scaled_weight(layer, smoothing.scales) is None for layer in group.layers):
        return "its weight would leave the range of its type"
    folds = {name: _fold(group.layers_of(value), smoothing.scales) for name, value in group.tensors.items()}
    if is_conv and None in folds.values() and smoothing.gain_db < MIN_CONV_MUL_GAIN_DB:
        return f"would take a Mul before a convolution to lower the estimated error by {smoothing.gain_db:.1f} dB"
    return _Change(group, smoothing, folds)


def _too_little(smoothing: Smoothing, options: SmoothOptions) -> str:
    alpha = f"alpha {smoothing.alpha:g}" if options.alpha is not None else "the best alpha"
    if smoothing.gain_db <= 0:
        return f"{alpha} would raise the estimated error by {-smoothing.gain_db:.1f} dB"
    return f"{alpha} would lower the estimated error by {smoothing.gain_db:.1f} dB only"


def _statistics(group: Group, statistics: Mapping[str, ChannelStatistics], channels: int) -> ChannelStatistics | str:
    """Those of all tensors of the group, taken together."""
    found: list[ChannelStatistics] = []
    for name in group.tensors:
        one = statistics.get(name)
        if one is None or one.reach.size != channels:
            return f"'{name}' was not looked at for each of its {channels} channels"
        if not one.is_finite:
            return f"'{name}' has values that are not finite, or too large to be squared"
        found.append(one)
    return functools.reduce(ChannelStatistics.with_other, found)


def _scaled_weight(layer: Layer, scales: Array) -> Array | None:
    weight = constant(layer.weight)
    return None if weight is None else in_dtype(layer.scaled(scales), weight)


def _fold(layers: Sequence[Layer], scales: Array) -> Fold | None:
    """A way to divide the tensor of these layers where it is computed; None where something else reads it, too."""
    value = layers[0].tensor
    taking = {(layer.node, layer.data) for layer in layers}
    if value.is_graph_output() or any(reader not in taking for reader in readers(value)):
        return None
    return find_fold(value, _factor(layers[0], 1 / scales))


def _factor(layer: Layer, vector: Array) -> Array:
    """One number for each channel, in a shape that broadcasts to the layer's input."""
    return vector.reshape(-1, *(1,) * (-layer.axis - 1))


def _insert_mul(model: ir.Model, layers: Sequence[Layer], vector: Array) -> None:
    value, weight = layers[0].tensor, constant(layers[0].weight)
    assert weight is not None
    factor = add_initializer(model, f"{value.name}_smooth", _factor(layers[0], vector).astype(weight.dtype))
    mul = add_node(model, "Mul", [value, factor], before=layers[0].node, name=f"{layers[0].node.name}_smooth")
    mul.meta[READS_FLOAT] = NAME
    mul.outputs[0].shape = value.shape
    for layer in layers:
        replace_input(layer.node, layer.data, mul.outputs[0])
