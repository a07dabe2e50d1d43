"""Regions: tensors whose channels can only be rescaled together, with the layers that write and read them.

A region grows from the output of a layer along every operator that lets a scale through, forwards and backwards: all
writers and all readers of a residual stream are in one. A layer ends it: as a source, whose output channels are
divided, or as a sink, whose input channels are multiplied. Whatever else touches the region makes it impossible, and is
its `obstacle`: an input or output of the network, or a layer that shares its weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from quark.equalization.channels import CannotScaleError, Channels
from quark.torch.equalize.channels import Layer, Readers, is_layer, layer_of
from quark.torch.equalize.passages import passage
from quark.torch.graph import layer_name


@dataclass(eq=False)
class Region:
    """`count` channels; by tensor, where they lie; and what is scaled with them. Dictionaries, for their order."""

    count: int
    members: dict[fx.Node, Channels] = field(default_factory=dict)
    sources: dict[fx.Node, Layer] = field(default_factory=dict)
    sinks: dict[fx.Node, tuple[Layer, int]] = field(default_factory=dict)  # with the width of the channels there
    clips: dict[fx.Node, float] = field(default_factory=dict)  # with the bound
    obstacle: str | None = None


def find_regions(network: fx.GraphModule) -> list[Region]:
    """All regions that start at a layer, in the order of their first layers."""
    regions: list[Region] = []
    seen: dict[fx.Node, Region] = {}
    readers = Readers(network)
    for node in network.graph.nodes:
        if not is_layer(network, node) or node in seen:
            continue
        try:
            layer = layer_of(network, node, readers)
            start = Channels(layer.axis_of(node))
        except CannotScaleError:
            continue
        region = Region(layer.count)
        _Growth(network, region, seen, readers).from_tensor(node, start)
        regions.append(region)
    return regions


class _Growth:
    """One region as it grows. It is followed to its ends even when it is known to be impossible, so that none of its
    tensors becomes the start of another."""

    def __init__(self, network: fx.GraphModule, region: Region, seen: dict[fx.Node, Region], readers: Readers) -> None:
        self.network, self.region, self.seen, self.readers = network, region, seen, readers
        self.pending: list[tuple[fx.Node, Channels]] = []

    def from_tensor(self, value: fx.Node, channels: Channels) -> None:
        self.pending.append((value, channels))
        while self.pending:
            self._take(*self.pending.pop())

    def _take(self, value: fx.Node, channels: Channels) -> None:
        known = self.region.members.get(value)
        if known is None and value not in self.seen:
            self.region.members[value] = channels
            self.seen[value] = self.region
            for node in (value, *value.users):
                self._visit(node, value, channels)
        elif known != channels:
            self._obstruct(value, "has channels along two axes")

    def _visit(self, node: fx.Node, value: fx.Node, channels: Channels) -> None:
        try:
            self._go_through(node, value, channels)
        except CannotScaleError as reason:
            self._obstruct(node, str(reason))

    def _go_through(self, node: fx.Node, value: fx.Node, channels: Channels) -> None:
        if node.op == "output":
            raise CannotScaleError(f"'{value.name}' is an output of the network")
        if node.op in ("placeholder", "get_attr"):
            raise CannotScaleError("it is an input of the network or a constant")
        if is_layer(self.network, node):
            layer = layer_of(self.network, node, self.readers)
            if value is node:
                self._end_at_source(layer, channels)
            else:
                self._end_at_sink(layer, value, channels)
            return
        found = passage(self.network, node, value, channels)
        self.pending.extend(found.links)
        if found.bound is not None:
            self.region.clips[node] = found.bound

    def _end_at_source(self, layer: Layer, channels: Channels) -> None:
        norm = layer.norm
        if norm is not None and (norm.weight is None or norm.bias is None):
            raise CannotScaleError("its batch norm has no weight and bias")
        if channels != Channels(layer.axis_of(layer.node)) or layer.count != self.region.count:
            raise CannotScaleError("its output channels lie along another axis")
        self.region.sources[layer.node] = layer

    def _end_at_sink(self, layer: Layer, value: fx.Node, channels: Channels) -> None:
        if value is not layer.node.args[0] or value in layer.node.args[1:]:
            raise CannotScaleError("it reads it as something other than its data")
        if channels.axis != layer.axis_of(value) or layer.groups * layer.inputs != self.region.count * channels.width:
            raise CannotScaleError("its input channels lie along another axis")
        self.region.sinks[layer.node] = (layer, channels.width)

    def _obstruct(self, node: fx.Node, reason: str) -> None:
        if self.region.obstacle is None:
            where = "" if node.op == "output" else f"'{layer_name(node)}': "
            self.region.obstacle = f"{where}{reason}"
