"""Regions of a graph as sets of channels whose scales are found (quark.equalization.rescaling)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from quark.equalization import rescaling as channels_of_layers
from quark.equalization.channels import Channels
from quark.equalization.cross_layer import ChannelMagnitudes
from quark.equalization.rescaling import Ranges, largest_of_pairs
from quark.onnx.equalize.channels import Array, Layer, reach_of_channels
from quark.onnx.equalize.options import CrossLayerOptions
from quark.onnx.equalize.regions import Region
from quark.onnx.graph import constant, input_value
from quark.onnx.large_tensors import whole


class Weights:
    """The magnitudes of the layers' weights, one for all layers that share a weight."""

    def __init__(self) -> None:
        self._by_weight: dict[ir.Value, tuple[Layer, ChannelMagnitudes]] = {}

    def of(self, layer: Layer) -> ChannelMagnitudes:
        if layer.weight not in self._by_weight:
            assert layer.weight.const_value is not None
            array = whole(layer.weight.const_value)
            view = layer.view(array if array.dtype in (np.float32, np.float64) else array.astype(np.float32))
            self._by_weight[layer.weight] = layer, ChannelMagnitudes(largest_of_pairs(view))
        return self._by_weight[layer.weight][1]

    def __iter__(self) -> Iterator[tuple[Layer, ChannelMagnitudes]]:
        """Every weight once, with a layer that reads it."""
        return iter(self._by_weight.values())


class Rescaling(channels_of_layers.Rescaling):
    """One region: its scales so far, and its ranges by now."""

    def __init__(self, region: Region, weights: Weights, options: CrossLayerOptions) -> None:
        self.region, self.options = region, options
        super().__init__(region.count, _ranges(region, weights), options.has_appended_bias)


def chains_of(rescalings: Sequence[Rescaling]) -> list[list[Rescaling]]:
    """The regions that a depthwise layer alone connects, in a row."""
    by_source = {next(iter(each.region.sources)): each for each in rescalings if len(each.region.sources) == 1}
    following: dict[Rescaling, Rescaling] = {}
    for each in rescalings:
        sinks = [layer for layer, _ in each.region.sinks.values()]
        behind = by_source.get(sinks[0].node) if len(sinks) == 1 and sinks[0].is_depthwise else None
        if behind is not None and behind is not each:
            following[each] = behind
    return channels_of_layers.chains_of(rescalings, following)


def _ranges(region: Region, weights: Weights) -> Ranges:
    dtype = next(iter(region.sources.values())).dtype
    return Ranges(
        [(weights.of(layer), _bias_reach(layer)) for layer in region.sources.values()],
        {weights.of(layer): width for layer, width in region.sinks.values()},
        [_constant_reach(*place) for place in region.constants.items()],
        str(dtype),
        float(np.finfo(dtype if dtype.kind == "f" else np.float32).max),
    )


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
