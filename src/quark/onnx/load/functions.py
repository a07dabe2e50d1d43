"""The functions of a model: checked for what inlining would make of them, and inlined.

A function may call others, so that a file of 1 KB can stand for more nodes than any memory holds. Shape inference and
ONNX Runtime inline as well. Therefore everything that reads a model calls `check_functions`, which counts the nodes
without making them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import onnx
import onnx_ir as ir

from quark.errors import ModelError
from quark.onnx.graph import FreeNames, graphs_in
from quark.onnx.load.structure import all_nodes

MAX_NODES = 200_000  # that functions may become
MAX_PARTS = 10_000_000  # inputs, outputs and attributes of all nodes
MAX_BYTES = 2**31 - 1  # what one protobuf message can hold: constants inside of functions multiply as well
MAX_CALL_DEPTH = 64  # exporters write one level for each module inside another

Identifier: TypeAlias = tuple[str, str, str]  # domain, name, overload


@dataclass(frozen=True)
class _Extent:
    """What a list of nodes amounts to, with the functions that it calls inlined."""

    nodes: int = 0
    parts: int = 0
    bytes: int = 0
    depth: int = 0  # of calls

    def with_calls(self, called: _Extent, times: int) -> _Extent:
        """The sum, where the nodes also call a function `times` times."""
        return _Extent(
            self.nodes + called.nodes * times,
            self.parts + called.parts * times,
            self.bytes + called.bytes * times,
            max(self.depth, called.depth + 1),
        )

    @property
    def excess(self) -> str:
        """Which limit is exceeded, in words; empty if none is."""
        if self.nodes > MAX_NODES:
            return f"would give more than {MAX_NODES:,} nodes"
        if self.parts > MAX_PARTS:
            return f"would give nodes with more than {MAX_PARTS:,} inputs, outputs and attributes"
        if self.bytes > MAX_BYTES:
            return f"would give more than {MAX_BYTES:,} bytes"
        return ""


def check_functions(proto: onnx.ModelProto, name: str) -> None:
    """Raise ModelError if a function calls itself, or if the model would be too large with its functions inlined."""
    if not proto.functions:
        return
    functions: dict[Identifier, onnx.FunctionProto] = {}
    for function in proto.functions:
        if (function.domain, function.name, function.overload) in functions:
            raise ModelError(f"'{name}': two functions are called '{function.name}'. Names must be unique: rename one")
        functions[function.domain, function.name, function.overload] = function
    calls = {key: _calls(function.node, functions) for key, function in functions.items()}
    extents: dict[Identifier, _Extent] = {}
    for key in functions:
        _measure(key, functions, calls, extents, name)
    total = _Extent()
    for key, times in _calls(proto.graph.node, functions).items():
        total = total.with_calls(extents[key], times)
        if total.excess:
            raise ModelError(
                f"'{name}': inlining its {len(functions)} functions, such as '{key[1]}', {total.excess}. Export the "
                "model without functions, or in parts"
            )


def _measure(
    first: Identifier,
    functions: Mapping[Identifier, onnx.FunctionProto],
    calls: Mapping[Identifier, Counter[Identifier]],
    extents: dict[Identifier, _Extent],
    name: str,
) -> None:
    """Fill in the extent of a function and of all that it calls, those without calls first."""
    open_calls: dict[Identifier, None] = {}  # the functions that are being measured, in the order of their calls
    waiting = [first]
    while waiting:
        key = waiting[-1]
        if key in extents:
            waiting.pop()
            continue
        missing = [each for each in calls[key] if each not in extents]
        if missing and key not in open_calls:
            open_calls[key] = None
            circle = next((each for each in missing if each in open_calls), None)
            if circle is not None:
                raise ModelError(
                    f"'{name}': function '{circle[1]}' calls itself, which ONNX does not allow. Export the model again"
                )
            waiting += missing
            continue
        function = functions[key]
        extent = _own_extent(function)
        for each, times in calls[key].items():
            extent = extent.with_calls(extents[each], times)
        if extent.depth > MAX_CALL_DEPTH:
            raise ModelError(
                f"'{name}': function '{function.name}' calls functions that call others, more than {MAX_CALL_DEPTH} "
                "levels deep. Export the model without functions"
            )
        extents[key] = extent
        open_calls.pop(key, None)
        waiting.pop()


def _calls(nodes: Iterable[onnx.NodeProto], functions: Mapping[Identifier, onnx.FunctionProto]) -> Counter[Identifier]:
    keys = ((node.domain, node.op_type, node.overload) for node in all_nodes(nodes))
    return Counter(key for key in keys if key in functions)


def _own_extent(function: onnx.FunctionProto) -> _Extent:
    nodes = parts = 0
    for node in all_nodes(function.node):
        nodes += 1
        parts += len(node.input) + len(node.output) + len(node.attribute)
    return _Extent(nodes, parts + len(function.input) + len(function.output), function.ByteSize())


def inline_functions(model: ir.Model) -> None:
    """Put the nodes of functions in the place of the nodes that call them, in subgraphs as well, in place.

    Names of nodes and values that are taken already get a number from 2 on. Raises ValueError where a call does not fit
    its function.
    """
    inliner = _Inliner(model)
    inliner.inline_calls(model.graph)
    model.functions.clear()


class _Inliner:
    def __init__(self, model: ir.Model) -> None:
        self.functions = dict(model.functions)
        self.opset_imports = model.opset_imports
        self.value_names = FreeNames(first=2)
        self.node_names = FreeNames(first=2)

    def inline_calls(self, graph: ir.Graph) -> None:
        self.value_names.take(value.name for value in graph.inputs)
        self.value_names.take(graph.initializers)
        for node in graph:
            self.node_names.take([node.name])
            self.value_names.take(value.name for value in node.outputs)
        for node in graph:  # also comes to the nodes that are inserted on the way
            function = self.functions.get(node.op_identifier())
            if function is None:
                for attr in node.attributes.values():
                    for inner in graphs_in(attr):
                        self.inline_calls(inner)
                continue
            nodes, outputs = self._copy_of(function, node)
            ir.convenience.replace_nodes_and_values(
                graph, node, [node], nodes, node.outputs, outputs[: len(node.outputs)]
            )

    def _copy_of(self, function: ir.Function, call: ir.Node) -> tuple[list[ir.Node], list[ir.Value]]:
        """The nodes of a function for one call, and the values that take the place of the call's outputs."""
        label = f"function '{function.name}'"
        for domain, version in function.opset_imports.items():
            if self.opset_imports.setdefault(domain, version) != version:
                raise ValueError(
                    f"{label} uses version {version} of domain '{domain or 'ai.onnx'}', and the model "
                    f"{self.opset_imports[domain]}"
                )
        if len(call.inputs) > len(function.inputs) or len(call.outputs) > len(function.outputs):
            raise ValueError(
                f"{label} has {len(function.inputs)} inputs and {len(function.outputs)} outputs, and is called with "
                f"{len(call.inputs)} and {len(call.outputs)}"
            )
        attributes = {
            **{attr.name: attr for attr in function.attributes.values() if attr.value is not None},
            **call.attributes,
        }
        if any(True for attr in attributes.values() for _ in graphs_in(attr)):
            raise ValueError(f"{label} is called with a graph as an attribute")
        values: dict[ir.Value, ir.Value | None] = dict.fromkeys(function.inputs)
        values.update(zip(function.inputs, call.inputs, strict=False))
        nodes = [self._copy_node(node, values, attributes, call) for node in function]
        outputs: list[ir.Value] = []
        inputs, given = set(function.inputs), set()
        for output in function.outputs:
            value = values[output]
            if value is None:
                raise ValueError(f"{label} gives out an input that a call leaves out")
            if output in inputs or output in given:  # the value has a name of its own, which must stay
                nodes.append(ir.Node("", "Identity", [value], name=self.node_names.free("node")))
                value = nodes[-1].outputs[0]
                value.name = self.value_names.free(output.name or "val")
            given.add(output)
            outputs.append(value)
        return nodes, outputs

    def _copy_node(
        self,
        node: ir.Node,
        values: dict[ir.Value, ir.Value | None],
        attributes: Mapping[str, ir.Attr],
        call: ir.Node,
    ) -> ir.Node:
        copied = [self._copy_attribute(attr, values, attributes, call) for attr in node.attributes.values()]
        result = ir.Node(
            node.domain,
            node.op_type,
            [None if value is None else _value_of(values, value) for value in node.inputs],
            [attr for attr in copied if attr is not None],
            overload=node.overload,
            num_outputs=len(node.outputs),
            version=node.version,
            name=self.node_names.free(node.name or "node"),
            doc_string=node.doc_string,
            metadata_props={**call.metadata_props, **node.metadata_props},
        )
        for old, new in zip(node.outputs, result.outputs, strict=True):
            values[old] = new
            new.name = self.value_names.free(old.name or "val")
            new.type, new.shape = old.type, None if old.shape is None else old.shape.copy()
            new.const_value, new.doc_string = old.const_value, old.doc_string
            new.metadata_props.update(old.metadata_props)
        return result

    def _copy_attribute(
        self,
        attr: ir.Attr,
        values: dict[ir.Value, ir.Value | None],
        attributes: Mapping[str, ir.Attr],
        call: ir.Node,
    ) -> ir.Attr | None:
        """The attribute in the copy; None if it refers to one that the call leaves out."""
        if attr.is_ref():
            given = attributes.get(str(attr.ref_attr_name))
            return None if given is None else ir.Attr(attr.name, given.type, given.value, doc_string=given.doc_string)
        copies = [self._copy_graph(graph, values, attributes, call) for graph in graphs_in(attr)]
        if not copies:
            return attr
        content = copies[0] if attr.type == ir.AttributeType.GRAPH else copies
        return ir.Attr(attr.name, attr.type, content, doc_string=attr.doc_string)

    def _copy_graph(
        self,
        graph: ir.Graph,
        values: dict[ir.Value, ir.Value | None],
        attributes: Mapping[str, ir.Attr],
        call: ir.Node,
    ) -> ir.Graph:
        for value in (*graph.inputs, *graph.initializers.values()):
            if value in values:
                continue
            copied = ir.Value(
                name=value.name,
                type=value.type,
                shape=None if value.shape is None else value.shape.copy(),
                doc_string=value.doc_string,
                const_value=value.const_value,
            )
            copied.metadata_props.update(value.metadata_props)
            values[value] = copied
        nodes = [self._copy_node(node, values, attributes, call) for node in graph]
        result = ir.Graph(
            [_present(values, value) for value in graph.inputs],
            [_present(values, value) for value in graph.outputs],
            nodes=nodes,
            initializers=[_present(values, value) for value in graph.initializers.values()],
            doc_string=graph.doc_string,
            opset_imports=dict(graph.opset_imports),
            name=graph.name,
        )
        result.metadata_props.update(graph.metadata_props)
        return result


def _value_of(values: Mapping[ir.Value, ir.Value | None], value: ir.Value) -> ir.Value | None:
    if value not in values:
        raise ValueError(f"'{value.name}' is read before it is made")
    return values[value]


def _present(values: Mapping[ir.Value, ir.Value | None], value: ir.Value) -> ir.Value:
    copied = _value_of(values, value)
    if copied is None:
        raise ValueError(f"a subgraph gives out '{value.name}', which a call leaves out")
    return copied
