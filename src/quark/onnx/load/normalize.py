"""Bring a graph into the one form that the later steps rely on."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveInitializersFromInputsPass

from quark.errors import ModelError
from quark.onnx.graph import FreeNames, graphs_in, remove_dead
from quark.onnx.load.functions import inline_functions
from quark.onnx.load.structure import all_nodes
from quark.plan import SkippedNode


def drop_empty_inputs(proto: onnx.ModelProto) -> None:
    """Remove inputs that are left out at the end of a node, in place.

    The standard lets them be named "", and ONNX Runtime has crashed on it (LayerNormalization without a bias).
    """
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        for node in all_nodes(nodes):
            while node.input and not node.input[-1]:
                node.input.pop()


def normalize(model: ir.Model, name: str, *, keeps_inputs: bool) -> list[str]:
    """Functions inlined, constants as initializers, names, order, nothing dead. Returns what a user should know."""
    remarks: list[str] = []
    has_functions = bool(model.functions)
    if has_functions:
        remarks.append(f"{len(model.functions)} functions of the model were inlined")
        try:
            inline_functions(model)
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
    if has_functions:
        _drop_empty_inputs(model)
    _name_nodes(model)
    model.graph.sort()
    remove_dead(model)
    return remarks


def check_layers(model: ir.Model, name: str) -> None:
    """Raise ModelError if a convolution of the main graph has a weight without any value: it has no features.

    ONNX Runtime does not take such a convolution. A product without features is one of zeros, which is fine.
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


@dataclass(frozen=True)
class InSubgraph:
    """A node that stays in float because of a subgraph: the holder itself, or one inside."""

    skipped: SkippedNode
    is_holder: bool


def nodes_in_subgraphs(model: ir.Model) -> list[InSubgraph]:
    """The nodes of the main graph that hold subgraphs, each followed by everything inside."""
    result: list[InSubgraph] = []
    for node in model.graph:
        graphs = [graph for attr in node.attributes.values() for graph in graphs_in(attr)]
        if not graphs:
            continue
        reason = "holds a subgraph, which is left in float"
        result.append(InSubgraph(SkippedNode(node.name or "", node.op_type, reason), True))
        inside = f"inside {node.op_type} '{node.name}', which is left in float"
        for graph in graphs:
            result += [
                InSubgraph(SkippedNode(inner.name or "", inner.op_type, inside), False) for inner in graph.all_nodes()
            ]
    return result


def _drop_empty_inputs(model: ir.Model) -> None:
    """The same for inputs of inlined functions that a call leaves out."""
    for node in model.graph.all_nodes():
        count = len(node.inputs)
        while count and node.inputs[count - 1] is None:
            count -= 1
        if count != len(node.inputs):
            node.resize_inputs(count)


def _name_nodes(model: ir.Model) -> None:
    """A name of its own for every node, also in subgraphs: the one it has, where it is the first with that name."""
    unnamed: list[ir.Node] = []
    seen: set[str] = set()
    for node in model.graph.all_nodes():
        if node.name and node.name not in seen:
            seen.add(node.name)
        else:
            unnamed.append(node)
    names = FreeNames(seen)
    for node in unnamed:
        node.name = names.free(node.name or (node.outputs[0].name if node.outputs else "") or node.op_type)
