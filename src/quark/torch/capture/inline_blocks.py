"""Blocks under `torch.no_grad()` and with autocast switched off, which the tracer makes graphs of their own, become a
part of the graph that they stand in.

What a block without gradients gives is detached, so that nothing inside learns, as the model wants it. Blocks in which
autocast is on compute in other types, and are left for others to refuse.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_GRAD = ("wrap_with_set_grad_enabled", 1)  # the operator, and which of its arguments is the block
_AUTOCAST = ("wrap_with_autocast", 4)
_IS_AUTOCAST_ENABLED = 2


def inline_blocks(module: fx.GraphModule, graph: fx.Graph) -> None:
    """In place on the graph, a copy of the module's; blocks within blocks too."""
    while (found := next((node for node in graph.nodes if _place(node) is not None), None)) is not None:
        _inline(module, graph, found)


def _place(node: fx.Node) -> int | None:
    """Which argument of the node is a block that can be part of the graph; None where it has none."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    if name == _GRAD[0]:
        return _GRAD[1]
    return _AUTOCAST[1] if name == _AUTOCAST[0] and not node.args[_IS_AUTOCAST_ENABLED] else None


def _inline(module: fx.GraphModule, graph: fx.Graph, node: fx.Node) -> None:
    place = _place(node)
    assert place is not None
    source: Any = node.args[place]
    with graph.inserting_before(node):
        results = _copied(graph, source, operator.attrgetter(str(source.target))(module).graph, node.args[place + 1 :])
        if place == _GRAD[1] and not node.args[0]:
            results = [_detached(graph, each) for each in results]
    for user in list(node.users):  # the operator gives a tuple, which is taken apart
        index: Any = user.args[1]
        user.replace_all_uses_with(results[index])
        graph.erase_node(user)
    graph.erase_node(node)
    if not source.users:
        graph.erase_node(source)


def _copied(graph: fx.Graph, source: fx.Node, block: fx.Graph, inputs: tuple[Any, ...]) -> list[Any]:
    """The nodes of the block, at the graph's place of insertion; what it returns."""
    placeholders = [node for node in block.nodes if node.op == "placeholder"]
    known: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    for node in block.nodes:
        if node.op in ("placeholder", "output"):
            continue
        known[node] = graph.node_copy(node, lambda each: known[each])
        if node.op == "get_attr":
            known[node].target = f"{source.target}.{node.target}"
    returned: Any = block.output_node().args[0]
    return [known[each] if isinstance(each, fx.Node) else each for each in returned]


def _detached(graph: fx.Graph, value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    made = graph.call_function(aten.detach.default, (value,))
    made.meta = dict(value.meta)
    return made
