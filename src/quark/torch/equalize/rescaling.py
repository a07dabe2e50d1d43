"""Regions of a network as sets of channels whose scales are found (quark.equalization.rescaling), and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import fx

from quark.equalization import rescaling as channels_of_layers
from quark.equalization.clip_limits import limits_of_clip
from quark.equalization.cross_layer import ChannelMagnitudes
from quark.equalization.rescaling import Ranges, largest_of_pairs
from quark.torch.equalize.channels import Layer
from quark.torch.equalize.regions import Region

Array: TypeAlias = NDArray[Any]
Extremes: TypeAlias = Mapping[str, tuple[Array, Array]]


class Weights:
    """The magnitudes of the layers' weights; a layer between two regions is in both."""

    def __init__(self) -> None:
        self._by_node: dict[fx.Node, tuple[Layer, ChannelMagnitudes]] = {}

    def of(self, layer: Layer) -> ChannelMagnitudes:
        if layer.node not in self._by_node:
            self._by_node[layer.node] = layer, ChannelMagnitudes(largest_of_pairs(layer.folded_weight()))
        return self._by_node[layer.node][1]

    def __iter__(self) -> Iterator[tuple[Layer, ChannelMagnitudes]]:
        return iter(self._by_node.values())


class Rescaling(channels_of_layers.Rescaling):
    """One region: its scales so far, and its ranges by now."""

    def __init__(self, region: Region, weights: Weights, extremes: Extremes) -> None:
        self.region = region
        dtype = next(iter(region.sources.values())).weight.dtype
        ranges = Ranges(
            [(weights.of(layer), layer.bias_reach()) for layer in region.sources.values()],
            {weights.of(layer): width for layer, width in region.sinks.values()},
            type_name=str(dtype).removeprefix("torch."),
            largest=float(torch.finfo(dtype).max),
        )
        super().__init__(region.count, ranges)
        for clip, bound in region.clips.items():
            self.limit(*limits_of_clip(*extremes[clip.all_input_nodes[0].name], bound))


def following_sets(rescalings: Sequence[Rescaling]) -> dict[Rescaling, Rescaling]:
    """For each region the one behind it, where a depthwise layer alone connects the two."""
    by_source = {next(iter(each.region.sources)): each for each in rescalings if len(each.region.sources) == 1}
    following: dict[Rescaling, Rescaling] = {}
    for each in rescalings:
        sinks = [layer for layer, _ in each.region.sinks.values()]
        behind = by_source.get(sinks[0].node) if len(sinks) == 1 and sinks[0].is_depthwise else None
        if behind is not None and behind is not each:
            following[each] = behind
    return following


def apply_scales(rescalings: Sequence[Rescaling], weights: Weights) -> None:
    """Carry out what was found, on the parameters where they are."""
    with torch.no_grad():
        for layer, magnitudes in weights:
            _multiply(layer.weight, layer, magnitudes.multiplied, of_inputs=True)
            if layer.norm is None:
                _multiply(layer.weight, layer, 1 / magnitudes.divided, of_inputs=False)
        for each in rescalings:
            for layer in each.region.sources.values():
                _divide_constants(layer, each.scales)


def _multiply(weight: torch.Tensor, layer: Layer, factors: Array, of_inputs: bool) -> None:
    shape = (layer.groups, 1, layer.inputs, 1) if of_inputs else (layer.groups, layer.outputs, 1, 1)
    spread = torch.from_numpy(factors).to(weight).reshape(shape)
    weight.copy_(_like(weight, layer, layer.view(weight) * spread))


def _like(weight: torch.Tensor, layer: Layer, view: torch.Tensor) -> torch.Tensor:
    """Back from groups, outputs, inputs and the rest to the shape of the weight."""
    return (view.swapaxes(1, 2) if layer.is_input_first else view).reshape(weight.shape)


def _divide_constants(layer: Layer, scales: Array) -> None:
    """The bias; or all that a batch norm behind the layer gives out, and with it what the layer's own bias comes to."""
    norm = layer.norm
    for each in (layer.bias,) if norm is None else (norm.weight, norm.bias):
        if each is not None:
            each.div_(torch.from_numpy(scales).to(each))
