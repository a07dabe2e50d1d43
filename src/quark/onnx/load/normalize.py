"""Bring a graph into the one form that the later steps rely on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import (
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveInitializersFromInputsPass,
)

from quark.errors import ModelError
from quark.onnx.graph import remove_dead
from quark.plan import SkippedNode


def normalize(model: ir.Model, name: str, *, keeps_inputs: bool) -> list[str]:
    """Functions inlined, constants as initializers, names, order, nothing dead. Returns what a user should know."""
    remarks: list[str] = []
    if model.functions:
        remarks.append(f"{len(model.functions)} functions of the model were inlined")
        _inline(model, name)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    doubles = [value.name for value in model.graph.inputs if value.is_initializer()]
    if doubles and not keeps_inputs:
        RemoveInitializersFromInputsPass()(model)
        remarks.append(
            f"{len(doubles)} initializers were also inputs of the graph, such as '{doubles[0]}'; now constants"
        )
    _drop_empty_inputs(model)
    _name_nodes(model)
    model.graph.sort()
    remove_dead(model)
    return remarks


@dataclass(frozen=True)
class InSubgraph:
    """A node that stays in float because of a subgraph: the holder itself, or one inside."""

    skipped: SkippedNode
    is_holder: bool


def nodes_in_subgraphs(model: ir.Model) -> list[InSubgraph]:
    """The nodes of the main graph that hold subgraphs, each followed by everything inside."""
    result: list[InSubgraph] = []
    for node in model.graph:
        graphs = list(_graphs(node))
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


def _graphs(node: ir.Node) -> Iterable[ir.Graph]:
    for attr in node.attributes.values():
        if attr.type == ir.AttributeType.GRAPH:
            yield attr.as_graph()
        elif attr.type == ir.AttributeType.GRAPHS:
            yield from attr.as_graphs()


def _inline(model: ir.Model, name: str) -> None:
    try:
        InlinePass()(model)
        model.functions.clear()
    except Exception as error:  # onnx_ir wraps the reason
        reason = error.__cause__ or error
        raise ModelError(
            f"'{name}': the model's functions cannot be inlined: {reason}. Export it without functions"
        ) from error


def _drop_empty_inputs(model: ir.Model) -> None:
    """Inputs that are left out at the end of a node: the standard lets them be named "", ONNX Runtime has crashed on it
    (LayerNormalization without a bias)."""
    for node in model.graph.all_nodes():
        count = len(node.inputs)
        while count and node.inputs[count - 1] is None:
            count -= 1
        if count != len(node.inputs):
            node.resize_inputs(count)


def _name_nodes(model: ir.Model) -> None:
    """A name of its own for every node, also in subgraphs: the one it has, where it is the first with that name."""
    all_nodes = list(model.graph.all_nodes())
    taken: set[str] = set()
    nameless: list[ir.Node] = []
    for node in all_nodes:
        if node.name and node.name not in taken:
            taken.add(node.name)
        else:
            nameless.append(node)
    for node in nameless:
        base = node.name or (node.outputs[0].name if node.outputs else "") or node.op_type
        candidate, count = base, 0
        while candidate in taken:
            count += 1
            candidate = f"{base}_{count}"
        node.name = candidate
        taken.add(candidate)
