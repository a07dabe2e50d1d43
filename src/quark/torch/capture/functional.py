"""Operators that write into their input are replaced by those that give a new tensor.

    y = relu_(x)        becomes   y = relu(x),  and whoever read x behind it reads y

A model may reuse one in-place module in many places, and does no harm by it here. Where the input is a view of another
tensor that is read afterwards, the other would have changed too: that is refused, with the line to change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from quark.errors import ModelError
from quark.torch.graph import layer_name, source_line

aten = torch.ops.aten
_ALIASES = (aten.dropout.default,)  # gives its input in eval mode, though its schema does not say so


def make_functional(graph: fx.Graph) -> None:
    """In place on the graph; the order of nodes stays."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_mutating(node.target):
            continue
        written = node.args[0]
        if written.op == "get_attr":
            _drop_update_of_buffer(graph, node, written)
            continue
        _refuse_aliases(node, written, order)
        node.target = _functional(node)
        later = [user for user in written.users if user is not node and order[user] > order[node]]
        for user in later:
            user.replace_input_with(written, node)


def _is_mutating(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _functional(node: fx.Node) -> Callable[..., Any]:
    target: Any = node.target
    name, overload = target._schema.name.removeprefix("aten::"), target._overloadname
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    found = getattr(packet, overload, None)
    if found is None:
        raise ModelError(
            f"node '{node.name}' of {layer_name(node)} ({source_line(node)}) writes into a tensor with {target}, which "
            "has no form that gives a new one: write the line without '_' or out="
        )
    functional: Callable[..., Any] = found
    return functional


def _drop_update_of_buffer(graph: fx.Graph, node: fx.Node, written: fx.Node) -> None:
    """A model that was captured in training mode counts its batches; its batch norms do so again as modules."""
    if not str(written.target).endswith("num_batches_tracked"):
        raise ModelError(
            f"node '{node.name}' of {layer_name(node)} ({source_line(node)}) changes the parameter or buffer "
            f"'{written.target}' while the network runs: a quantized network has constant weights"
        )
    node.replace_all_uses_with(written)
    graph.erase_node(node)


def _refuse_aliases(node: fx.Node, written: fx.Node, order: dict[fx.Node, int]) -> None:
    family = _family(_root(written))
    for other in family - {written, node}:
        reader = next((user for user in other.users if order[user] > order[node] and user not in family), None)
        if reader is not None and not _is_mutating(reader.target):
            raise ModelError(
                f"node '{node.name}' of {layer_name(node)} ({source_line(node)}) writes into a view of '{other.name}', "
                f"which '{reader.name}' reads afterwards: write the line without in-place operators"
            )


def _root(node: fx.Node) -> fx.Node:
    while _is_view(node) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _family(root: fx.Node) -> set[fx.Node]:
    """All nodes that share memory with the root."""
    found, pending = {root}, [root]
    while pending:
        for user in pending.pop().users:
            if user not in found and _is_view(user):
                found.add(user)
                pending.append(user)
    return found


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    is_alias = any(each.alias_info is not None and not each.alias_info.is_write for each in target._schema.returns)
    return is_alias or target in _ALIASES
