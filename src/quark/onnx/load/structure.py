"""Check that a graph is consistent: it has nodes, every value that is read is made once, nothing turns in a circle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isqrt

import onnx

from quark.errors import ModelError

MOST_CHARACTERS = 200  # of a name in a message
_WORDS = {"sequence_type": "sequence of tensors", "map_type": "map", "sparse_tensor_type": "sparse tensor"}
MAX_INPUT_SQUARES = 100_000_000  # added up over all nodes: giving a node another input takes time for each input it has


def check_structure(proto: onnx.ModelProto, name: str) -> None:
    """Raise ModelError, naming the node or value, if the main graph, a subgraph or a function is not a graph."""
    if not proto.graph.node:
        raise ModelError(f"'{name}': the graph has no nodes. Expected a network")
    if proto.graph.sparse_initializer:
        sparse = proto.graph.sparse_initializer[0].values.name
        raise ModelError(
            f"'{name}': initializer '{sparse}' is sparse, which cannot be quantized. Store it as a dense tensor"
        )
    _check_input_counts(proto, name)
    _Place(f"'{name}'").check_graph(proto.graph)
    _check_attributes(proto.graph, name)
    for function in proto.functions:
        _Place(f"'{name}', function '{_shortened(function.name)}'").check_nodes(function.node, set(function.input))


def check_ports(proto: onnx.ModelProto, name: str) -> None:
    """Raise ModelError if an input or output of the graph is a sequence or a map: samples and verdicts are of tensors.

    An optional tensor counts as one. An input without a type is for those who need the type.
    """
    for role, infos in (("input", proto.graph.input), ("output", proto.graph.output)):
        for info in infos:
            kind, words = info.type, ""
            if kind.HasField("optional_type"):
                kind, words = kind.optional_type.elem_type, "optional "
            what = kind.WhichOneof("value")
            if what in (None, "tensor_type"):
                continue
            is_map = what == "map_type" or kind.sequence_type.elem_type.HasField("map_type")
            words += "sequence of maps" if is_map and what == "sequence_type" else _WORDS.get(what, what)
            hint = "Remove it from the outputs" if role == "output" else "Build what it holds from tensors"
            if is_map:
                hint += " (skl2onnx: options={'zipmap': False})"
            raise ModelError(
                f"'{name}': {role} '{_shortened(info.name)}' is of type {words}, and only networks whose inputs and "
                f"outputs are tensors can be quantized or compared. {hint}, and export the model again"
            )


def describe(node: onnx.NodeProto) -> str:
    """The node in a message: by its name, or by what it makes."""
    if node.name:
        return f"{_shortened(node.op_type)} '{_shortened(node.name)}'"
    made = next(iter(node.output), "")
    return f"{_shortened(node.op_type)} (unnamed, makes '{_shortened(made)}')"


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that the node holds, as If, Loop and Scan do."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes, each followed by those of the subgraphs that it holds."""
    for node in nodes:
        yield node
        if node.attribute:
            for graph in subgraphs(node):
                yield from all_nodes(graph.node)


class _Place:
    """A graph that is being checked: the nodes that it is inside of, and the values that it sees in each of their
    graphs. Sets of outer values are shared, not copied, because a graph may have thousands of subgraphs."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.holders: list[onnx.NodeProto] = []
        self.visible: list[set[str]] = []

    def error(self, text: str) -> ModelError:
        inside = "".join(f", inside {describe(node)}" for node in self.holders)
        return ModelError(f"{self.label}{inside}: {text}")

    def sees(self, value: str) -> bool:
        return any(value in values for values in reversed(self.visible))

    def check_graph(self, graph: onnx.GraphProto) -> None:
        given: set[str] = set()
        for info in graph.input:
            if info.name in given:
                raise self.error(f"two inputs of the graph are called '{_shortened(info.name)}'")
            given.add(info.name)
        given.update(tensor.name for tensor in graph.initializer)
        made = self.check_nodes(graph.node, given)
        for info in graph.output:
            if info.name not in made and not self.sees(info.name):
                raise self.error(f"output '{_shortened(info.name)}' of the graph is made by no node")

    def check_nodes(self, nodes: Iterable[onnx.NodeProto], given: set[str]) -> set[str]:
        """Check the nodes of one graph, return the names of all values in it."""
        nodes = list(nodes)
        made = given
        for node in nodes:
            for output in node.output:
                if output and output in made:
                    raise self.error(
                        f"{describe(node)} makes '{_shortened(output)}', which another node, an input or an "
                        "initializer makes already. Every value is made once: rename one of them"
                    )
                made.add(output)
        made.discard("")
        self.visible.append(made)
        for node in nodes:
            for value in node.input:
                if value and not self.sees(value):
                    raise self.error(f"{describe(node)} reads '{_shortened(value)}', which nothing makes")
            if node.attribute:
                self.holders.append(node)
                for graph in subgraphs(node):
                    self.check_graph(graph)
                self.holders.pop()
        self.visible.pop()
        self._check_acyclic(nodes)
        return made

    def _check_acyclic(self, nodes: list[onnx.NodeProto]) -> None:
        maker = {output: index for index, node in enumerate(nodes) for output in node.output if output}
        needs = [{maker[value] for value in _reads(node) if value in maker} for node in nodes]
        readers: dict[int, list[int]] = {}
        for index, makers in enumerate(needs):
            for each in makers:
                readers.setdefault(each, []).append(index)
        missing = [len(makers) for makers in needs]
        ready = [index for index, count in enumerate(missing) if not count]
        done = 0
        while ready:
            done += 1
            for reader in readers.get(ready.pop(), ()):
                missing[reader] -= 1
                if not missing[reader]:
                    ready.append(reader)
        if done < len(nodes):
            stuck = next(node for node, count in zip(nodes, missing, strict=True) if count)
            raise self.error(f"the graph turns in a circle: {describe(stuck)} needs a value that depends on its own")


def _check_input_counts(proto: onnx.ModelProto, name: str) -> None:
    squares, most, largest = 0, 0, None
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        for node in all_nodes(nodes):
            count = len(node.input)
            squares += count * count
            if count > most:
                most, largest = count, node
    if largest is not None and squares > MAX_INPUT_SQUARES:
        raise ModelError(
            f"'{name}': its nodes have too many inputs, {describe(largest)} alone {most:,}. The squares of the numbers "
            f"of inputs may add up to {MAX_INPUT_SQUARES:,}, as those of one node with {isqrt(MAX_INPUT_SQUARES):,} do"
        )


def _check_attributes(graph: onnx.GraphProto, name: str) -> None:
    """Outside of functions, an attribute has a type and a content of its own, and one that should hold a graph does."""
    for node in all_nodes(graph.node):
        for attribute in node.attribute:
            what = ""
            if attribute.ref_attr_name:
                what = "refers to a function's attribute, and is in none"
            elif attribute.type == onnx.AttributeProto.GRAPH and not attribute.HasField("g"):
                what = "holds no graph"
            elif attribute.type == onnx.AttributeProto.UNDEFINED:
                what = "has no type"
            if what:
                raise ModelError(
                    f"'{name}': attribute '{_shortened(attribute.name)}' of {describe(node)} {what}. Export the model "
                    "again"
                )


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """What the node reads, also from inside its subgraphs."""
    yield from node.input
    if node.attribute:
        for graph in subgraphs(node):
            for inner in graph.node:
                yield from _reads(inner)
            yield from (info.name for info in graph.output)


def _shortened(name: str) -> str:
    return name if len(name) <= MOST_CHARACTERS else f"{name[:MOST_CHARACTERS]}..."
