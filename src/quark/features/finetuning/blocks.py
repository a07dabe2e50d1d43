"""Blocks: runs of trained layers between two tensors, fitted together to what comes out behind the last of them.

    x ---> conv ---> relu ---> conv ---> add ---> relu ---> y       a block with its shortcut, from x to y
      \\___________________________________/

What lies between the two tensors reads nothing else, and nothing of it is read elsewhere but its output. A tensor with
several readers begins a block that ends where all of them have come together again. Layers between such blocks are
chains: as many as a block may have, in parts of about the same length. The activation behind the last layer belongs to
the block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from quark.features.finetuning.layers import TrainedLayer
from quark.onnx.graph import attribute, is_constant, is_read_once, readers

LONGEST = 8  # layers of a block
ACTIVATIONS = frozenset(
    {"Relu", "Clip", "Min", "Max", "LeakyRelu", "PRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Gelu", "Erf"}
    | {"Add", "Sub", "Mul", "Div", "Identity"}
)


@dataclass(frozen=True, eq=False)
class Block:
    """`input` and `output` are tensors of the network without quantizers."""

    layers: tuple[TrainedLayer, ...]
    input: str
    output: str

    @property
    def name(self) -> str:
        first, last = self.layers[0].name, self.layers[-1].name
        return first if first == last else f"{first} to {last}"


def blocks(model: ir.Model, layers: Sequence[TrainedLayer]) -> list[Block]:
    """Divide the layers, in their order, into blocks."""
    return _Search(model, layers).run()


def nodes_of(model: ir.Model, block: Block) -> list[ir.Node]:
    """The nodes between the tensors of a block, in the order of the graph."""
    network = _Network(model)
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    values |= {str(value.name): value for value in model.graph.inputs}
    nodes = network.between(values[block.input], values[block.output])
    return [] if nodes is None else sorted(nodes, key=network.place)


@dataclass(frozen=True, eq=False)
class _Segment:
    """`count` layers from number `start` on; a branched one begins where its input is read several times."""

    start: int
    count: int
    input: ir.Value
    output: ir.Value
    is_branched: bool = False


class _Network:
    """The graph as an order of nodes."""

    def __init__(self, model: ir.Model) -> None:
        self.nodes = list(model.graph)
        self._places = {node: place for place, node in enumerate(self.nodes)}

    def place(self, node: ir.Node) -> int:
        return self._places[node]

    def between(self, begin: ir.Value, end: ir.Value) -> set[ir.Node] | None:
        """The nodes that compute `end` from `begin`; None if they read anything else, or if anything but `end` is read
        elsewhere."""
        maker = begin.producer()
        first = -1 if maker is None else self._places[maker]
        nodes: set[ir.Node] = set()
        pending = [end]
        while pending:
            value = pending.pop()
            if value is begin:
                continue
            node = value.producer()
            if node is None or self._places.get(node, -1) <= first:
                return None
            if any(isinstance(attribute(node, name), ir.Graph) for name in node.attributes):
                return None
            if node not in nodes:
                nodes.add(node)
                pending += _activations(node)
        inside = [value for node in nodes for value in node.outputs if value is not end]
        is_closed = all(
            not value.is_graph_output() and all(reader in nodes for reader, _ in readers(value)) for value in inside
        )
        return nodes if is_closed else None


class _Search:
    def __init__(self, model: ir.Model, layers: Sequence[TrainedLayer]) -> None:
        self._network = _Network(model)
        self._layers = list(layers)
        self._numbers = {layer.name: number for number, layer in enumerate(layers)}
        nodes = {str(node.name): node for node in self._network.nodes}
        self._nodes = [nodes[layer.name] for layer in layers]

    def run(self) -> list[Block]:
        result: list[Block] = []
        chain: list[_Segment] = []
        start = 0
        while start < len(self._layers):
            segment = self._segment(start)
            start += segment.count
            if segment.is_branched:
                result += [*self._chained(chain), self._block(segment)]
                chain = []
            else:
                chain.append(segment)
        return [*result, *self._chained(chain)]

    def _segment(self, start: int) -> _Segment:
        """The smallest block that begins with that layer."""
        source = self._nodes[start].inputs[0]
        assert source is not None
        fork = self._fork_before(source)
        if fork is not None:
            for segment, nodes in self._segments(start, fork):
                if all(reader in nodes for reader, _ in readers(fork)):
                    return self._extended(start, fork, segment, nodes, is_branched=True)
        for segment, nodes in self._segments(start, source):
            if segment.count == 1:
                return self._extended(start, source, segment, nodes, is_branched=False)
        return _Segment(start, 1, source, self._nodes[start].outputs[0])

    def _fork_before(self, value: ir.Value) -> ir.Value | None:
        """The tensor with several readers that a layer's input is computed from alone."""
        while is_read_once(value):
            node = value.producer()
            if node is None or node.name in self._numbers or len(set(_activations(node))) != 1:
                return None
            value = _activations(node)[0]
        return None if value.is_graph_output() else value

    def _segments(self, start: int, source: ir.Value) -> Iterator[tuple[_Segment, set[ir.Node]]]:
        """All segments that begin at `source` with that layer as their first; the smallest come first."""
        reached = {source}
        limit = start + LONGEST
        last = self._network.place(self._nodes[limit]) if limit < len(self._nodes) else len(self._network.nodes)
        maker = source.producer()
        for node in self._network.nodes[0 if maker is None else self._network.place(maker) + 1 : last]:
            inputs = _activations(node)
            if not inputs or not reached.issuperset(inputs):
                continue
            reached.update(node.outputs)
            for value in node.outputs:
                nodes = self._network.between(source, value)
                count = None if nodes is None else self._count(start, nodes)
                if nodes is not None and count:
                    yield _Segment(start, count, source, value), nodes

    def _count(self, start: int, nodes: Collection[ir.Node]) -> int | None:
        """The number of layers among the nodes, if they are the next ones from `start` on."""
        numbers = sorted(self._numbers[str(node.name)] for node in nodes if node.name in self._numbers)
        is_run = numbers == list(range(start, start + len(numbers)))
        return len(numbers) if is_run and len(numbers) <= LONGEST else None

    def _extended(
        self, start: int, source: ir.Value, first: _Segment, nodes: set[ir.Node], *, is_branched: bool
    ) -> _Segment:
        """The segment with the activation behind it."""
        best = first
        for segment, more in self._segments(start, source):
            if segment.count > first.count:
                break
            if more >= nodes and all(node.op_type in ACTIVATIONS and not node.domain for node in more - nodes):
                best = segment
        return _Segment(start, best.count, source, best.output, is_branched)

    def _chained(self, chain: Sequence[_Segment]) -> Iterator[Block]:
        if not chain:
            return
        parts = -(-len(chain) // LONGEST)
        size = -(-len(chain) // parts)
        start = 0
        while start < len(chain):
            end = min(start + size, len(chain))
            while end > start + 1 and not self._is_whole(chain[start:end]):
                end -= 1
            part = chain[start:end]
            yield self._block(_Segment(part[0].start, len(part), part[0].input, part[-1].output))
            start = end

    def _is_whole(self, part: Sequence[_Segment]) -> bool:
        nodes = self._network.between(part[0].input, part[-1].output)
        return nodes is not None and self._count(part[0].start, nodes) == len(part)

    def _block(self, segment: _Segment) -> Block:
        layers = tuple(self._layers[segment.start : segment.start + segment.count])
        return Block(layers, str(segment.input.name), str(segment.output.name))


def _activations(node: ir.Node) -> list[ir.Value]:
    """The inputs of a node that are not constant."""
    return [value for value in node.inputs if value is not None and not is_constant(value)]
