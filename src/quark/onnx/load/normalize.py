"""Bring a graph into the one form that the later steps rely on: functions inlined, sizes fixed, names unique,
sorted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveInitializersFromInputsPass

from quark.errors import InvalidValueError, ModelError, unknown_name
from quark.onnx.graph import FreeNames, graphs_in, remove_dead
from quark.onnx.load.structure import all_nodes
from quark.plan import SkippedNode

MAX_NODES = 200_000  # nodes of all functions, inlined
MAX_PARTS = 10_000_000  # inputs, outputs and attributes of these nodes
MAX_BYTES = 2**31 - 1  # the limit of a protobuf message: constants inside of functions multiply as well
MAX_CALL_DEPTH = 64  # exporters write one level for each nested module

Identifier: TypeAlias = tuple[str, str, str]  # domain, name, overload


def drop_empty_inputs(proto: onnx.ModelProto) -> None:
    """Remove omitted inputs at the end of a node, in place.

    The standard allows "" as their name, and ONNX Runtime has crashed on it (LayerNormalization without a bias).
    """
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        for node in all_nodes(nodes):
            while node.input and not node.input[-1]:
                node.input.pop()


def normalize(model: ir.Model, name: str, *, keeps_inputs: bool) -> list[str]:
    """Inline functions, turn constants into initializers, name and sort nodes, remove dead ones. Returns remarks for
    the user."""
    remarks: list[str] = []
    has_functions = bool(model.functions)
    if has_functions:
        remarks.append(f"{len(model.functions)} functions of the model were inlined")
        try:
            _Inliner(model).inline_calls(model.graph)
            model.functions.clear()
        except ValueError as error:
            raise ModelError(
                f"'{name}': the model's functions cannot be inlined: {error}. Export it without functions"
            ) from error
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    doubles = [value.name for value in model.graph.inputs if value.is_initializer()]
    if doubles and not keeps_inputs:
        RemoveInitializersFromInputsPass()(model)
        remarks.append(
            f"{len(doubles)} initializers were also inputs of the graph, such as '{doubles[0]}'; now constants"
        )
    if has_functions:  # calls may omit inputs
        for node in model.graph.all_nodes():
            count = len(node.inputs)
            while count and node.inputs[count - 1] is None:
                count -= 1
            if count != len(node.inputs):
                node.resize_inputs(count)
    unnamed: list[ir.Node] = []
    seen: set[str] = set()  # names are unique, also in subgraphs; the first node with a name keeps it
    for node in model.graph.all_nodes():
        if node.name and node.name not in seen:
            seen.add(node.name)
        else:
            unnamed.append(node)
    names = FreeNames(seen)
    for node in unnamed:
        node.name = names.free(node.name or (node.outputs[0].name if node.outputs else "") or node.op_type)
    model.graph.sort()
    remove_dead(model)
    return remarks


def check_layers(model: ir.Model, name: str) -> None:
    """Raise ModelError if a convolution of the main graph has an empty weight, and so no features.

    ONNX Runtime does not take such a convolution. A MatMul without features returns zeros, which is fine.
    """
    for node in model.graph:
        if node.op_type not in ("Conv", "ConvTranspose") or node.domain:
            continue
        for value in node.inputs:
            tensor = None if value is None else value.const_value
            if value is not None and tensor is not None and tensor.size == 0:
                raise ModelError(
                    f"'{name}': {node.op_type} '{node.name}' has no features: its weight '{value.name}' is of shape "
                    f"{list(tensor.shape.numpy())}. Remove the layer, or export the model again"
                )


def nodes_in_subgraphs(model: ir.Model) -> tuple[list[SkippedNode], list[SkippedNode]]:
    """The nodes of the main graph that hold subgraphs; and these again, each followed by everything inside. All of them
    stay in float."""
    holders, nodes = [], []
    for node in model.graph:
        graphs = [graph for attr in node.attributes.values() for graph in graphs_in(attr)]
        if not graphs:
            continue
        holders.append(SkippedNode(node.name or "", node.op_type, "holds a subgraph, which is left in float"))
        nodes.append(holders[-1])
        reason = f"inside {node.op_type} '{node.name}', which is left in float"
        inner = (node for graph in graphs for node in graph.all_nodes())
        nodes += [SkippedNode(node.name or "", node.op_type, reason) for node in inner]
    return holders, nodes


# ---- functions ----


@dataclass
class _Extent:
    """The size of a list of nodes with the functions that it calls inlined."""

    nodes: int = 0
    parts: int = 0
    bytes: int = 0
    depth: int = 0  # depth of calls

    def add_calls(self, called: _Extent, times: int) -> None:
        """Add what a function amounts to that the nodes call `times` times."""
        self.nodes += called.nodes * times
        self.parts += called.parts * times
        self.bytes += called.bytes * times
        self.depth = max(self.depth, called.depth + 1)

    @property
    def excess(self) -> str:
        """Describe the limit that is exceeded; empty if there is none."""
        if self.nodes > MAX_NODES:
            return f"would give more than {MAX_NODES:,} nodes"
        if self.parts > MAX_PARTS:
            return f"would give nodes with more than {MAX_PARTS:,} inputs, outputs and attributes"
        return f"would give more than {MAX_BYTES:,} bytes" if self.bytes > MAX_BYTES else ""


def check_functions(proto: onnx.ModelProto, name: str) -> None:
    """Raise ModelError if a function calls itself, or if the model would be too large with its functions inlined.

    A function may call others, so a file of 1 KB can stand for more nodes than fit into any memory. Shape inference and
    ONNX Runtime inline as well. So everything that reads a model calls this, which counts nodes without making them.
    """
    if not proto.functions:
        return
    functions: dict[Identifier, onnx.FunctionProto] = {}
    for function in proto.functions:
        if (function.domain, function.name, function.overload) in functions:
            raise ModelError(f"'{name}': two functions are called '{function.name}'. Names must be unique: rename one")
        functions[function.domain, function.name, function.overload] = function
    calls = {key: _calls(function.node, functions) for key, function in functions.items()}
    try:
        order = list(TopologicalSorter(calls).static_order())  # a function comes after those that it calls
    except CycleError as error:
        raise ModelError(
            f"'{name}': function '{error.args[1][0][1]}' calls itself, which ONNX does not allow. Export the model "
            "again"
        ) from error
    extents: dict[Identifier, _Extent] = {}
    for key in order:
        function, nodes = functions[key], list(all_nodes(functions[key].node))
        parts = sum(len(node.input) + len(node.output) + len(node.attribute) for node in nodes)
        extent = _Extent(len(nodes), parts + len(function.input) + len(function.output), function.ByteSize())
        for called, times in calls[key].items():
            extent.add_calls(extents[called], times)
        if extent.depth > MAX_CALL_DEPTH:
            raise ModelError(
                f"'{name}': function '{function.name}' calls functions that call others, more than {MAX_CALL_DEPTH} "
                "levels deep. Export the model without functions"
            )
        extents[key] = extent
    total = _Extent()
    for key, times in _calls(proto.graph.node, functions).items():
        total.add_calls(extents[key], times)
        if total.excess:
            raise ModelError(
                f"'{name}': inlining its {len(functions)} functions, such as '{key[1]}', {total.excess}. Export the "
                "model without functions, or in parts"
            )


def _calls(nodes: Iterable[onnx.NodeProto], functions: Mapping[Identifier, onnx.FunctionProto]) -> Counter[Identifier]:
    keys = ((node.domain, node.op_type, node.overload) for node in all_nodes(nodes))
    return Counter(key for key in keys if key in functions)


class _Inliner:
    """Replaces calls of functions by the nodes of these functions, also in subgraphs, in place.

    Names of nodes and values that are in use already get a number from 2 on. Raises ValueError if a call does not fit
    its function.
    """

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
        for node in graph:  # this includes the nodes that are inserted meanwhile
            function = self.functions.get(node.op_identifier())
            if function is None:
                for attr in node.attributes.values():
                    for inner in graphs_in(attr):
                        self.inline_calls(inner)
                continue
            for domain, version in function.opset_imports.items():
                if self.opset_imports.setdefault(domain, version) != version:
                    raise ValueError(
                        f"function '{function.name}' uses version {version} of domain '{domain or 'ai.onnx'}', and the "
                        f"model {self.opset_imports[domain]}"
                    )
            nodes, outputs = _FunctionCopy(self, function, node).nodes_and_outputs()
            ir.convenience.replace_nodes_and_values(
                graph, node, [node], nodes, node.outputs, outputs[: len(node.outputs)]
            )


class _FunctionCopy:
    """A copy of a function for one call."""

    def __init__(self, inliner: _Inliner, function: ir.Function, call: ir.Node) -> None:
        self.inliner, self.function, self.call = inliner, function, call
        self.label = f"function '{function.name}'"
        if len(call.inputs) > len(function.inputs) or len(call.outputs) > len(function.outputs):
            raise ValueError(
                f"{self.label} has {len(function.inputs)} inputs and {len(function.outputs)} outputs, and is called "
                f"with {len(call.inputs)} and {len(call.outputs)}"
            )
        defaults = {attr.name: attr for attr in function.attributes.values() if attr.value is not None}
        self.attributes: dict[str, ir.Attr] = {**defaults, **call.attributes}
        if any(True for attr in self.attributes.values() for _ in graphs_in(attr)):
            raise ValueError(f"{self.label} is called with a graph as an attribute")
        self.values: dict[ir.Value, ir.Value | None] = dict.fromkeys(function.inputs)
        self.values.update(zip(function.inputs, call.inputs, strict=False))

    def nodes_and_outputs(self) -> tuple[list[ir.Node], list[ir.Value]]:
        """The nodes, and the values that replace the call's outputs."""
        nodes = [self._copy_node(node) for node in self.function]
        outputs: list[ir.Value] = []
        inputs, given = set(self.function.inputs), set()
        for output in self.function.outputs:
            value = self.values[output]
            if value is None:
                raise ValueError(f"{self.label} gives out an input that a call leaves out")
            if output in inputs or output in given:  # the value has a name of its own, which it keeps
                nodes.append(ir.Node("", "Identity", [value], name=self.inliner.node_names.free("node")))
                value = nodes[-1].outputs[0]
                value.name = self.inliner.value_names.free(output.name or "val")
            given.add(output)
            outputs.append(value)
        return nodes, outputs

    def _copy_node(self, node: ir.Node) -> ir.Node:
        attributes = [self._copy_attribute(attr) for attr in node.attributes.values()]
        result = ir.Node(
            node.domain,
            node.op_type,
            [None if value is None else self._value(value) for value in node.inputs],
            [attr for attr in attributes if attr is not None],
            overload=node.overload,
            num_outputs=len(node.outputs),
            version=node.version,
            name=self.inliner.node_names.free(node.name or "node"),
            doc_string=node.doc_string,
            metadata_props={**self.call.metadata_props, **node.metadata_props},
        )
        for old, new in zip(node.outputs, result.outputs, strict=True):
            self.values[old] = new
            new.name = self.inliner.value_names.free(old.name or "val")
            new.type, new.shape = old.type, None if old.shape is None else old.shape.copy()
            new.const_value, new.doc_string = old.const_value, old.doc_string
            new.metadata_props.update(old.metadata_props)
        return result

    def _copy_attribute(self, attr: ir.Attr) -> ir.Attr | None:
        """The attribute in the copy; None if it refers to one that the call omits."""
        if attr.is_ref():
            given = self.attributes.get(str(attr.ref_attr_name))
            return None if given is None else ir.Attr(attr.name, given.type, given.value, doc_string=given.doc_string)
        copies = [self._copy_graph(graph) for graph in graphs_in(attr)]
        if not copies:
            return attr
        content = copies[0] if attr.type == ir.AttributeType.GRAPH else copies
        return ir.Attr(attr.name, attr.type, content, doc_string=attr.doc_string)

    def _copy_graph(self, graph: ir.Graph) -> ir.Graph:
        for value in (*graph.inputs, *graph.initializers.values()):
            if value in self.values:
                continue
            shape = None if value.shape is None else value.shape.copy()
            copied = ir.Value(name=value.name, type=value.type, shape=shape, const_value=value.const_value)
            copied.doc_string = value.doc_string
            copied.metadata_props.update(value.metadata_props)
            self.values[value] = copied
        nodes = [self._copy_node(node) for node in graph]
        result = ir.Graph(
            [self._present(value) for value in graph.inputs],
            [self._present(value) for value in graph.outputs],
            nodes=nodes,
            initializers=[self._present(value) for value in graph.initializers.values()],
            doc_string=graph.doc_string,
            opset_imports=dict(graph.opset_imports),
            name=graph.name,
        )
        result.metadata_props.update(graph.metadata_props)
        return result

    def _value(self, value: ir.Value) -> ir.Value | None:
        if value not in self.values:
            raise ValueError(f"'{value.name}' is read before it is made")
        return self.values[value]

    def _present(self, value: ir.Value) -> ir.Value:
        copied = self._value(value)
        if copied is None:
            raise ValueError(f"a subgraph gives out '{value.name}', which a call leaves out")
        return copied


# ---- sizes of inputs that the user fixes ----


def fix_shapes(model: ir.Model, fixed: tuple[tuple[str, tuple[int, ...]], ...]) -> list[str]:
    """Give inputs and outputs the sizes that the user wants; a single shape under the name '' is for every input.

    A size that the model fixes already, or that follows from the inputs, cannot be changed. Unknown sizes of values
    inside are removed, so that they are inferred again.
    """
    if not fixed:
        return []
    inputs = {value.name: value for value in model.graph.inputs if value.name}
    ports = {value.name: value for value in model.graph.outputs if value.name} | inputs
    bindings: dict[str, int] = {}
    remarks = []
    for name, shape in fixed:
        if name and name not in ports:
            raise unknown_name("input or output of the model", name, ports)
        for value in [ports[name]] if name else inputs.values():
            kind = "input" if value.name in inputs else "output"
            if any(size < 1 for size in shape):
                raise InvalidValueError(f"shape {list(shape)} for {kind} '{value.name}': expected sizes from 1 on")
            old = list(value.shape) if value.shape is not None else [None] * len(shape)
            is_kept = len(old) == len(shape) and all(
                not isinstance(had, int) or had == size for had, size in zip(old, shape, strict=True)
            )
            if not is_kept:
                written = ", ".join("?" if size is None else str(size) for size in old)
                raise InvalidValueError(
                    f"shape {list(shape)} for {kind} '{value.name}', which is [{written}]: the rank and the sizes that "
                    "are numbers cannot change"
                )
            value.shape = ir.Shape(shape)
            for had, size in zip(old, shape, strict=True):
                if isinstance(had, ir.SymbolicDim) and had.value:
                    bindings[had.value] = size
            remarks.append(f"shape of {kind} '{value.name}' fixed to {list(shape)}")
    for value in [output for graph in model.graphs() for node in graph for output in node.outputs]:
        if value.shape is None or value.shape.is_static():
            continue
        bound = [size if isinstance(size, int) else bindings.get(str(size), size) for size in value.shape]
        is_known = value.is_graph_output() or all(isinstance(size, int) for size in bound)
        value.shape = ir.Shape(bound) if is_known else None
    return remarks
