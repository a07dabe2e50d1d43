"""Regions: tensors whose channels can only be rescaled together, with the layers that write and read them.

A region grows from the output of a layer along every operator that lets a scale through, forwards and backwards: all
writers and all readers of a residual stream are in one. A layer ends it: as a source, whose output channels are
divided, or as a sink, whose input channels are multiplied. Layers with the same weight draw each other's tensors in.
Whatever else touches the region makes it impossible, and is its `obstacle`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from quark.equalization.channels import CannotScaleError, Channels
from quark.onnx.equalize.channels import LAYERS, Layer, layer_of
from quark.onnx.equalize.passages import passage
from quark.onnx.graph import constant, input_value, nodes, readers


@dataclass(frozen=True)
class Obstacle:
    """The first node that makes a region impossible, and the reason."""

    node: str
    op_type: str
    reason: str


@dataclass(eq=False)
class Region:
    """`count` channels; by value, where they lie; and what is scaled with them. Dictionaries, for their order."""

    count: int
    members: dict[ir.Value, Channels] = field(default_factory=dict)
    sources: dict[ir.Node, Layer] = field(default_factory=dict)
    sinks: dict[ir.Node, tuple[Layer, int]] = field(default_factory=dict)  # with the width of the channels there
    constants: dict[tuple[ir.Node, int], Channels] = field(default_factory=dict)
    clips: dict[ir.Node, float] = field(default_factory=dict)  # with the bound
    passed: dict[ir.Node, None] = field(default_factory=dict)  # nodes that let the scale through
    obstacle: Obstacle | None = None


def find_regions(model: ir.Model) -> list[Region]:
    """All regions that start at a layer of the main graph, in the order of their first layers."""
    regions: list[Region] = []
    seen: dict[ir.Value, Region] = {}
    for node in nodes(model):
        if node.op_type not in LAYERS or node.domain or node.outputs[0] in seen:
            continue
        try:
            layer = layer_of(node)
            start = layer.result
        except CannotScaleError:
            continue
        region = Region(layer.groups * layer.outputs)
        _Growth(model, region, seen).from_tensor(*start)
        regions.append(region)
    return regions


class _Growth:
    """One region as it grows. It is followed to its ends even when it is known to be impossible, so that none of its
    tensors becomes the start of another."""

    def __init__(self, model: ir.Model, region: Region, seen: dict[ir.Value, Region]) -> None:
        self.model, self.region, self.seen = model, region, seen
        self.pending: list[tuple[ir.Value, Channels]] = []

    def from_tensor(self, value: ir.Value, channels: Channels) -> None:
        self.pending.append((value, channels))
        while self.pending:
            self._take(*self.pending.pop())

    def _take(self, value: ir.Value, channels: Channels) -> None:
        known = self.region.members.get(value)
        if known is None and value not in self.seen:
            self.region.members[value] = channels
            self.seen[value] = self.region
            self._visit_around(value, channels)
        elif known != channels:
            self._obstruct(value.producer(), f"'{value.name}' has channels along two axes")

    def _visit_around(self, value: ir.Value, channels: Channels) -> None:
        producer = value.producer()
        if value.is_graph_output():
            self._obstruct(producer, f"'{value.name}' is an output of the graph")
        if producer is None:
            self._obstruct(None, f"'{value.name}' is an input of the graph or a constant")
        for node in _once(producer, *(node for node, _ in readers(value))):
            self._visit(node, value, channels)

    def _visit(self, node: ir.Node, value: ir.Value, channels: Channels) -> None:
        try:
            self._go_through(node, value, channels)
        except CannotScaleError as reason:
            self._obstruct(node, str(reason))

    def _go_through(self, node: ir.Node, value: ir.Value, channels: Channels) -> None:
        if node.op_type in LAYERS and not node.domain and node.graph is self.model.graph:
            if value is node.outputs[0]:
                self._end_at_source(layer_of(node), channels)
            else:
                self._end_at_sink(layer_of(node), value, channels)
            return
        found = passage(self.model, node, value, channels)
        self.pending.extend(found.links)
        if found.links:
            self.region.passed[node] = None
        if found.bound is not None:
            self.region.clips[node] = found.bound
        for index, where in found.constants:
            self.region.constants[node, index] = where

    def _end_at_source(self, layer: Layer, channels: Channels) -> None:
        bias = input_value(layer.node, 2)
        if bias is not None and constant(bias) is None:
            raise CannotScaleError("its bias is not constant")
        if channels != layer.result[1] or layer.groups * layer.outputs != self.region.count:
            raise CannotScaleError("its output channels lie along another axis")
        self.region.sources[layer.node] = layer
        self.pending.extend(twin.result for twin in self._twins(layer))

    def _end_at_sink(self, layer: Layer, value: ir.Value, channels: Channels) -> None:
        if any(value is each for each in layer.node.inputs[1:]):
            raise CannotScaleError("reads it as something other than its data")
        size = self.region.count * channels.width
        if channels.axis != layer.source[1].axis or layer.groups * layer.inputs != size:
            raise CannotScaleError("its input channels lie along another axis")
        self.region.sinks[layer.node] = (layer, channels.width)
        for twin in self._twins(layer):
            value, where = twin.source
            self.pending.append((value, Channels(where.axis, channels.width)))

    def _twins(self, layer: Layer) -> Iterator[Layer]:
        """The other layers that read the same weight."""
        for node, index in readers(layer.weight):
            if node is layer.node and index == 1:
                continue
            is_layer = node.op_type in LAYERS and not node.domain and node.graph is self.model.graph and index == 1
            twin = layer_of(node) if is_layer else None
            if twin is None or not twin.resembles(layer):
                raise CannotScaleError(f"its weight is also read by '{node.name}' ({node.op_type})")
            yield twin

    def _obstruct(self, node: ir.Node | None, reason: str) -> None:
        if self.region.obstacle is None:
            name, op_type = (str(node.name), node.op_type) if node is not None else ("", "")
            self.region.obstacle = Obstacle(name, op_type, reason)


def _once(*found: ir.Node | None) -> list[ir.Node]:
    return [node for node in dict.fromkeys(found) if node is not None]
