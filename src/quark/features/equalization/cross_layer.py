"""Cross-layer equalization of a graph: regions say what has to be scaled together, `scales` which scales are wanted.

The function of the float network stays; only a Clip needs care (`ClipTreatment`). What is the same for both roads is
here; a `Road` reads the numbers of a layer and writes the scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from quark.account import AlgorithmFacts
from quark.decide.view import Array, Graph, Node
from quark.features.equalization import scales
from quark.features.equalization.options import ClipTreatment, CrossLayerOptions
from quark.features.equalization.regions import Channels, Layer, Region, find_regions
from quark.features.equalization.scales import (
    MAX_AT_WORK,
    MAX_SWEEPS,
    ChannelMagnitudes,
    Ranges,
    largest_of_pairs,
    limits_of_clip,
    share_at_work,
    sweep,
)
from quark.plan import SkippedNode

NAME = "cross-layer equalization"
Extremes: TypeAlias = Mapping[str, tuple[Array, Array]]


class Road(Protocol):
    """The numbers of a graph's layers, and how they are changed."""

    @property
    def writes_constants(self) -> bool:
        """True if constants that are added between layers can be rescaled too."""
        ...

    def obstacle(self, layer: Layer, is_source: bool) -> str | None:
        """The reason why the layer cannot be rescaled, if there is one that the graph does not show."""
        ...

    def weight(self, layer: Layer) -> Array:
        """The weight that inference multiplies by."""
        ...

    def bias(self, layer: Layer) -> Array | None:
        """The bias that inference adds."""
        ...

    def write(self, rescalings: Sequence[Rescaling], weights: Weights) -> None:
        """Carry out what was found."""
        ...


class Weights:
    """The magnitudes of the layers' weights, one for all layers that share a weight."""

    def __init__(self, road: Road) -> None:
        self._road = road
        self._by_weight: dict[object, tuple[Layer, ChannelMagnitudes]] = {}

    def of(self, layer: Layer) -> ChannelMagnitudes:
        if layer.weight not in self._by_weight:
            view = layer.view(self._road.weight(layer))
            self._by_weight[layer.weight] = layer, ChannelMagnitudes(largest_of_pairs(view))
        return self._by_weight[layer.weight][1]

    def __iter__(self) -> Iterator[tuple[Layer, ChannelMagnitudes]]:
        """Every weight once, with a layer that reads it."""
        return iter(self._by_weight.values())


class Rescaling(scales.Rescaling):
    """One region: its scales so far, and its ranges by now."""

    def __init__(self, region: Region, weights: Weights, road: Road, options: CrossLayerOptions) -> None:
        self.region, self.options = region, options
        type_name = next(iter(region.sources.values())).weight.type_name or ""
        numbers = {"float16": np.finfo(np.float16), "double": np.finfo(np.float64), "float64": np.finfo(np.float64)}
        largest = float(numbers.get(type_name, np.finfo(np.float32)).max)
        sources = []
        for layer in region.sources.values():
            bias, reach = road.bias(layer), None
            if bias is not None:
                reach = reach_of_channels(np.atleast_1d(bias), Channels(max(bias.ndim - 1, 0)))
                reach = np.broadcast_to(reach, (layer.groups * layer.outputs,))
            sources.append((weights.of(layer), reach))
        added = []
        for (node, index), channels in region.constants.items():
            value = node.input(index)
            assert value is not None
            assert value.constant is not None
            added.append(reach_of_channels(value.constant.array(), channels))
        sinks = {weights.of(layer): width for layer, width in region.sinks.values()}
        ranges = Ranges(sources, sinks, added, type_name, largest)
        super().__init__(region.count, ranges, options.has_appended_bias)

    @property
    def phrase(self) -> str:
        """A phrase about what was done to the region, for the account."""
        low, high = self.scales.min(), self.scales.max()
        return f"{ends_of(self.region)}: {self.region.count} channels, scales {low:.2g}..{high:.2g}"


@dataclass(frozen=True)
class Equalized:
    """The regions that were equalized, what was done, and what was left."""

    rescalings: Sequence[Rescaling]
    changed: list[str]
    left: list[SkippedNode]

    @property
    def facts(self) -> AlgorithmFacts:
        return AlgorithmFacts(NAME, tuple(self.changed), tuple(self.left))


def clip_tensors(graph: Graph, options: CrossLayerOptions, road: Road) -> dict[str, int]:
    """The tensors in front of Clips that stay as they are, each with the axis of its channels: their extremes have to
    be known."""
    if options.clip is not ClipTreatment.CALIBRATED:
        return {}
    wanted: dict[str, int] = {}
    for region in find_regions(graph, road.obstacle):
        if region.obstacle is None and region.sinks:
            inputs = [clip.input(0) for clip in region.clips]
            wanted |= {value.name: region.members[value].axis for value in inputs if value is not None}
    return wanted


def equalize_cross_layer(graph: Graph, options: CrossLayerOptions, extremes: Extremes, road: Road) -> Equalized:
    """Equalize in place; `extremes` are the lowest and highest values by channel of what `clip_tensors` asked for."""
    possible: list[Region] = []
    left: list[SkippedNode] = []
    for region in find_regions(graph, road.obstacle):
        reason = _reason_against(region, options, extremes, road.writes_constants)
        if reason is None:
            possible.append(region)
        else:
            left.append(left_alone(region, reason))
    weights = Weights(road)
    rescalings = [Rescaling(region, weights, road, options) for region in possible]
    if options.clip is ClipTreatment.CALIBRATED:
        for rescaling in rescalings:
            for clip, bound in rescaling.region.clips.items():
                rescaling.limit(*limits_of_clip(*extremes[_before(clip)], bound))
    chains = _chains_of(rescalings)
    for _ in range(MAX_SWEEPS if options.steps < 0 else options.steps):
        if sweep(chains, options.weight_threshold) < options.settled_at:
            break
    road.write(rescalings, weights)
    changed = [rescaling.phrase for rescaling in rescalings if rescaling.is_changed]
    why = "its channels are as even as they can be" if options.steps else "CLESteps is 0: nothing may be rescaled"
    left += [left_alone(rescaling.region, why) for rescaling in rescalings if not rescaling.is_changed]
    return Equalized(rescalings, changed, left)


def _reason_against(region: Region, options: CrossLayerOptions, extremes: Extremes, has_constants: bool) -> str | None:
    if region.obstacle is not None:
        return region.obstacle
    if not region.sources or not region.sinks:
        return "no layer reads its channels"
    if region.constants and not has_constants:
        return f"'{next(iter(region.constants))[0].label}': it adds a constant"
    for clip, bound in region.clips.items():
        if options.clip is ClipTreatment.SKIP:
            return f"'{clip.label}': a Clip that is left as it is"
        if options.clip is not ClipTreatment.CALIBRATED:
            return None
        if _before(clip) not in extremes:
            return f"'{clip.label}': the values before this Clip were not measured"
        share = share_at_work(extremes[_before(clip)][1], bound)
        if share > MAX_AT_WORK:
            return f"'{clip.label}': this Clip is at work in {share:.0%} of the channels"
    return None


def _before(clip: Node) -> str:
    value = clip.inputs[0]
    assert value is not None
    return value.name


def _chains_of(rescalings: Sequence[Rescaling]) -> list[list[Rescaling]]:
    """The regions that a depthwise layer alone connects, in a row."""
    by_source = {
        next(iter(rescaling.region.sources)): rescaling
        for rescaling in rescalings
        if len(rescaling.region.sources) == 1
    }
    following: dict[Rescaling, Rescaling] = {}
    for rescaling in rescalings:
        sinks = [layer for layer, _ in rescaling.region.sinks.values()]
        behind = by_source.get(sinks[0].node) if len(sinks) == 1 and sinks[0].is_depthwise else None
        if behind is not None and behind is not rescaling:
            following[rescaling] = behind
    return scales.chains_of(rescalings, following)


def reach_of_channels(array: Array, channels: Channels) -> Array:
    """The largest magnitude of every channel of a constant."""
    before = int(np.prod(array.shape[: channels.axis]))
    magnitudes = np.abs(array.astype(np.float64)).reshape(before, array.shape[channels.axis] // channels.width, -1)
    reach: Array = magnitudes.max(axis=(0, 2))
    return reach


def left_alone(region: Region, reason: str) -> SkippedNode:
    """An account of a region that is left as it is."""
    node = next(iter(region.sources), None) or next(iter(region.members)).producer
    assert node is not None
    return SkippedNode(node.label, node.op_type, reason)


def ends_of(region: Region) -> str:
    """The layers on both sides, for the account."""

    def listed(nodes: Iterable[Node]) -> str:
        names = [node.label for node in nodes]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    return f"{listed(region.sources)} -> {listed(region.sinks)}"
