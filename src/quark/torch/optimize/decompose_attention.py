"""Attention as products and a softmax, so that the operands of both products can be quantized.

    attention(q, k, v) = softmax(q k^T * scale) v,     scale = 1 / sqrt(width) unless given

Masks, causal and grouped attention and dropout inside stay the fused operator, in float: a mask of -inf has no codes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from quark.torch.graph import Network, is_call, shape_of

aten = torch.ops.aten
_DEFAULTS: dict[str, Any] = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


def decompose_attention(network: Network) -> int:
    """In place; the number of operators that were taken apart."""
    found = [node for node in network.graph.nodes if is_call(node, aten.scaled_dot_product_attention.default)]
    return sum(_decompose(network.graph, node) for node in found)


def _decompose(graph: fx.Graph, node: fx.Node) -> bool:
    query, key, value = node.args[:3]
    given = {**dict(zip(_DEFAULTS, node.args[3:], strict=False)), **node.kwargs}
    options = {**_DEFAULTS, **given}
    scale = options.pop("scale")
    if any(options[name] != _DEFAULTS[name] for name in options):
        return False
    shape = shape_of(query) if isinstance(query, fx.Node) else None
    if scale is None:
        if shape is None or not isinstance(shape[-1], int):
            return False
        scale = 1 / math.sqrt(shape[-1])
    with graph.inserting_before(node):
        turned = _call(graph, node, aten.transpose.int, key, -2, -1)
        scores = _call(graph, node, aten.matmul.default, query, turned)
        scaled = _call(graph, node, aten.mul.Tensor, scores, scale)
        weights = _call(graph, node, aten.softmax.int, scaled, -1)
        result = _call(graph, node, aten.matmul.default, weights, value)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return True


def _call(graph: fx.Graph, like: fx.Node, target: Any, *arguments: Any) -> fx.Node:
    """A call in the place of another node, with the shape of its result."""
    made = graph.call_function(target, arguments)
    made.meta = {key: value for key, value in like.meta.items() if key in ("nn_module_stack", "stack_trace")}
    values = [each.meta.get("val") if isinstance(each, fx.Node) else each for each in arguments]
    if all(each is not None for each in values):
        made.meta["val"] = target(*values)
    return made
