"""Regions while their scales are found: what each layer's ranges are by now, and how far a scale may go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from quark.equalization.cross_layer import BIAS_SHARE, ChannelMagnitudes, combine, relative_to, scales_towards_mean
from quark.onnx.equalize.channels import Array, Channels, Layer, reach_of_channels
from quark.onnx.equalize.options import CrossLayerOptions
from quark.onnx.equalize.regions import Region
from quark.onnx.graph import constant, input_value

# No scale goes further: a channel that is almost dead would take its activations out of the range of the type.
_FURTHEST = {np.dtype(np.float16): 2.0**5}
_FURTHEST_OTHERWISE = 2.0**16


class Weights:
    """The magnitudes of the layers' weights, one for all layers that share a weight."""

    def __init__(self) -> None:
        self._by_weight: dict[ir.Value, tuple[Layer, ChannelMagnitudes]] = {}

    def of(self, layer: Layer) -> ChannelMagnitudes:
        if layer.weight not in self._by_weight:
            array = constant(layer.weight)
            assert array is not None
            view = layer.view(array if array.dtype in (np.float32, np.float64) else array.astype(np.float32))
            self._by_weight[layer.weight] = layer, ChannelMagnitudes(_largest(view))
        return self._by_weight[layer.weight][1]

    def __iter__(self) -> Iterator[tuple[Layer, ChannelMagnitudes]]:
        """Every weight once, with a layer that reads it."""
        return iter(self._by_weight.values())


class Rescaling:
    """One region: its scales so far, between `lowest` and `highest`, and its ranges by now."""

    def __init__(self, region: Region, weights: Weights, options: CrossLayerOptions) -> None:
        self.region, self.options = region, options
        self.scales: Array = np.ones(region.count)
        self._sources = [(weights.of(layer), _bias_reach(layer)) for layer in region.sources.values()]
        self._added = [_constant_reach(*place) for place in region.constants.items()]
        # twins hold one weight, which is divided or multiplied once
        self._divided = list(dict.fromkeys(weight for weight, _ in self._sources))
        self._multiplied = {weights.of(layer): width for layer, width in region.sinks.values()}
        self.lowest, self.highest = self._room()

    @property
    def is_changed(self) -> bool:
        return bool((self.scales != 1).any())

    def limit(self, lowest: Array, highest: Array) -> None:
        """Let no scale go below or beyond these; a channel whose two limits are the same is held."""
        self.lowest, self.highest = np.maximum(self.lowest, lowest), np.minimum(self.highest, highest)

    def source_ranges(self) -> Array:
        """The range of every channel in the layers that write it."""
        ranges = []
        for weight, bias in self._sources:
            ranges.append(weight.of_outputs())
            if self.options.has_appended_bias and bias is not None:
                ranges[-1] = np.maximum(ranges[-1], bias / weight.divided * BIAS_SHARE)
        if self.options.has_appended_bias:
            ranges[0] = np.max([ranges[0], *(each / self.scales * BIAS_SHARE for each in self._added)], axis=0)
        return combine(ranges)

    def sink_ranges(self) -> Array:
        """The range of every channel in the layers that read it."""
        return combine(
            [weight.of_inputs().reshape(-1, width).max(axis=1) for weight, width in self._multiplied.items()]
        )

    def scale(self, wanted: Array) -> Array:
        """Scale by what is wanted, as far as it is allowed; what it became."""
        total = np.clip(self.scales * wanted, self.lowest, self.highest)
        scales: Array = total / self.scales
        self.scales = total
        for weight in self._divided:
            weight.divide_outputs(scales)
        for weight, width in self._multiplied.items():
            weight.multiply_inputs(np.repeat(scales, width))
        return scales

    def beside_held(self, ranges: Array) -> Array:
        """The ranges relative to those of channels that are held."""
        return relative_to(np.asarray(self.lowest == self.highest), ranges)

    def _room(self) -> tuple[Array, Array]:
        """How far the scales may go: what is divided has to stay in the range of its type."""
        dtype = next(iter(self.region.sources.values())).dtype
        furthest = _FURTHEST.get(dtype, _FURTHEST_OTHERWISE)
        largest = float(np.finfo(dtype if dtype.kind == "f" else np.float32).max) / 2
        biases = [bias for _, bias in self._sources if bias is not None]
        reach = np.max([*(weight.of_outputs() for weight in self._divided), *biases, *self._added], axis=0)
        return np.clip(reach / largest, 1 / furthest, 1.0), np.full(self.region.count, furthest)


def sweep(chains: Sequence[Sequence[Rescaling]], weight_threshold: float) -> float:
    """Equalize every chain once, in their order; the mean change of a scale, as a factor less one."""
    changes = [np.zeros(0)]
    for chain in chains:
        first, behind = chain[0].source_ranges(), [each.sink_ranges() for each in chain]
        for index, each in enumerate(chain):
            rest = [later.beside_held(ranges) for later, ranges in zip(chain[index:], behind[index:], strict=True)]
            wanted = scales_towards_mean(each.beside_held(first), rest)
            is_small = first + np.sum(behind[index:], axis=0) < weight_threshold
            scales = each.scale(np.where(is_small, 1.0, wanted))
            changes.append(np.abs(scales - 1))
            first = behind[index] * scales  # where the chain goes on, what is behind is a depthwise layer
    every = np.concatenate(changes)
    return float(every.mean()) if every.size else 0.0


def chains_of(rescalings: Sequence[Rescaling]) -> list[list[Rescaling]]:
    """The regions that a depthwise layer alone connects, in a row; most chains are one or two regions long."""
    by_source = {next(iter(each.region.sources)): each for each in rescalings if len(each.region.sources) == 1}
    following: dict[Rescaling, Rescaling] = {}
    for each in rescalings:
        sinks = [layer for layer, _ in each.region.sinks.values()]
        behind = by_source.get(sinks[0].node) if len(sinks) == 1 and sinks[0].is_depthwise else None
        if behind is not None and behind is not each:
            following[each] = behind
    chains = [_followed(each, following) for each in rescalings if each not in following.values()]
    placed = {each for chain in chains for each in chain}
    return chains + [[each] for each in rescalings if each not in placed]  # a ring of depthwise layers has no start


def _followed(start: Rescaling, following: dict[Rescaling, Rescaling]) -> list[Rescaling]:
    chain = [start]
    while chain[-1] in following:
        chain.append(following[chain[-1]])
    return chain


def _largest(view: Array) -> Array:
    """The largest magnitude of each pair of channels, out of the rest."""
    largest: Array = np.abs(view[..., 0]) if view.shape[3] == 1 else np.maximum(view.max(axis=3), -view.min(axis=3))
    return largest


def _bias_reach(layer: Layer) -> Array | None:
    bias = constant(input_value(layer.node, 2))
    if bias is None:
        return None
    reach = reach_of_channels(np.atleast_1d(bias), Channels(max(bias.ndim - 1, 0)))
    return np.broadcast_to(reach, (layer.groups * layer.outputs,))


def _constant_reach(place: tuple[ir.Node, int], channels: Channels) -> Array:
    array = constant(input_value(*place))
    assert array is not None
    return reach_of_channels(array, channels)
