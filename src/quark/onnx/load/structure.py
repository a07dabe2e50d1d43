"""That a graph hangs together: it has nodes, every value that is read is made once, nothing turns in a circle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from quark.errors import ModelError


def check_structure(proto: onnx.ModelProto, name: str) -> None:
    """A ModelError that names the node or value, where the main graph, a subgraph or a function is no graph."""
    if not proto.graph.node:
        raise ModelError(f"'{name}': the graph has no nodes. Expected a network")
    if proto.graph.sparse_initializer:
        sparse = proto.graph.sparse_initializer[0].values.name
        raise ModelError(
            f"'{name}': initializer '{sparse}' is sparse, which cannot be quantized. Store it as a dense tensor"
        )
    _check_graph(proto.graph, frozenset(), name)
    _check_attributes(proto.graph, name)
    for function in proto.functions:
        _check_nodes(function.node, set(function.input), frozenset(), f"'{name}', function '{function.name}'")


def describe(node: onnx.NodeProto) -> str:
    """The node in a message: by its name, or by what it makes."""
    if node.name:
        return f"{node.op_type} '{node.name}'"
    made = next(iter(node.output), "")
    return f"{node.op_type} (unnamed, makes '{made}')"


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that the node holds, as If, Loop and Scan do."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _check_graph(graph: onnx.GraphProto, outer: frozenset[str], where: str) -> None:
    inputs = [info.name for info in graph.input]
    if len(set(inputs)) < len(inputs):
        raise ModelError(f"{_quoted(where)}: two inputs of the graph are called '{_first_double(inputs)}'")
    given = {*inputs, *(tensor.name for tensor in graph.initializer)}
    made = _check_nodes(graph.node, given, outer, where)
    for info in graph.output:
        if info.name not in made and (info.name not in outer):
            raise ModelError(f"{_quoted(where)}: output '{info.name}' of the graph is made by no node")


def _check_attributes(graph: onnx.GraphProto, name: str) -> None:
    """Outside of functions, an attribute has a content of its own, and one that should hold a graph does."""
    for node in graph.node:
        for attribute in node.attribute:
            is_empty = attribute.type == onnx.AttributeProto.GRAPH and not attribute.HasField("g")
            if is_empty or attribute.ref_attr_name:
                what = "holds no graph" if is_empty else "refers to a function's attribute, and is in none"
                raise ModelError(
                    f"'{name}': attribute '{attribute.name}' of {describe(node)} {what}. Export the model again"
                )
        for inner in subgraphs(node):
            _check_attributes(inner, name)


def _check_nodes(nodes: Iterable[onnx.NodeProto], given: set[str], outer: frozenset[str], where: str) -> set[str]:
    """Check the nodes of one graph, return the names of all values in it."""
    nodes = list(nodes)
    made = set(given)
    for node in nodes:
        for output in node.output:
            if output and output in made:
                raise ModelError(
                    f"{_quoted(where)}: {describe(node)} makes '{output}', which another node, an input or an "
                    "initializer makes already. Every value is made once: rename one of them"
                )
            made.add(output)
    made.discard("")
    visible = outer | made
    for node in nodes:
        for value in node.input:
            if value and value not in visible:
                raise ModelError(f"{_quoted(where)}: {describe(node)} reads '{value}', which nothing makes")
        for graph in subgraphs(node):
            _check_graph(graph, visible, f"{_quoted(where)}, inside {describe(node)}")
    _check_acyclic(nodes, where)
    return made


def _check_acyclic(nodes: list[onnx.NodeProto], where: str) -> None:
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
        raise ModelError(
            f"{_quoted(where)}: the graph turns in a circle: {describe(stuck)} needs a value that depends on its own"
        )


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """What the node reads, also from inside its subgraphs."""
    yield from node.input
    for graph in subgraphs(node):
        for inner in graph.node:
            yield from _reads(inner)
        yield from (info.name for info in graph.output)


def _first_double(names: list[str]) -> str:
    return next(name for name in names if names.count(name) > 1)


def _quoted(where: str) -> str:
    return where if where.startswith("'") else f"'{where}'"
