"""Rewrite the graph into the form that is quantized, without changing what it computes.

    drop_empty_parts       empty caches are left out of concatenations
    decompose_attention    products of queries, keys and values, which the fused operator hides
    separate_weights       products with a weight whose bias comes first get the order of linear layers
    fuse_batch_norm        a convolution or linear layer and the batch norm behind it become one layer that trains

They are applied in the order of `REWRITES`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from quark.torch.graph import Network, attribute_of, is_call, module_of, rank_of, set_attribute, shape_of
from quark.torch.operators import input_first_linear, masked_softmax
from quark.torch.train.conv_batch_norm import (
    CONVOLUTIONS,
    TRANSPOSED,
    TRANSPOSED_GROUPS,
    ConvBatchNorm,
    LinearOperation,
)

aten = torch.ops.aten
_ATTENTION_DEFAULTS: dict[str, Any] = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


def optimize(network: Network) -> None:
    """Apply all rewrites, in place."""
    for rewrite in REWRITES:
        rewrite(network)
    network.graph.eliminate_dead_code()
    network.delete_all_unused_submodules()
    network.graph.lint()
    network.recompile()


def decompose_attention(network: Network) -> None:
    """Write attention as products and a softmax, in place, so that the operands of both products can be quantized.

        attention(q, k, v) = softmax(q k^T * scale + mask) v,     scale = 1 / sqrt(width) unless given

    A softmax with a mask stays in float (`masked_softmax`). Attention with dropout stays the fused operator, in float.
    """
    graph = network.graph
    for node in list(graph.nodes):
        if not is_call(node, aten.scaled_dot_product_attention.default):
            continue
        query, key, value = node.args[:3]
        given = {**dict(zip(_ATTENTION_DEFAULTS, node.args[3:], strict=False)), **node.kwargs}
        options = {**_ATTENTION_DEFAULTS, **given}
        shapes = [shape_of(operand) if isinstance(operand, fx.Node) else None for operand in (query, key)]
        if shapes[0] is None or shapes[1] is None or options["dropout_p"]:
            continue
        scale = options["scale"]
        if scale is None and isinstance(shapes[0][-1], int):
            scale = 1 / math.sqrt(shapes[0][-1])
        repeats = 1
        if options["enable_gqa"]:
            counts = [shape[-3] if isinstance(shape[-3], int) else 0 for shape in shapes if shape is not None]
            repeats = counts[0] // counts[1] if all(counts) else 0
        if scale is None or not repeats:
            continue
        with graph.inserting_before(node):
            mask = options["attn_mask"]
            if options["is_causal"]:
                mask = _causal_mask(graph, node, query, key)
            if repeats > 1:
                key, value = (_call(graph, node, aten.repeat_interleave.self_int, x, repeats, -3) for x in (key, value))
            transposed = _call(graph, node, aten.transpose.int, key, -2, -1)
            scores = _call(graph, node, aten.matmul.default, query, transposed)
            scores = _call(graph, node, aten.mul.Tensor, scores, scale)
            if mask is None:
                weights = _call(graph, node, aten.softmax.int, scores, -1)
            else:
                weights = _call(graph, node, masked_softmax, scores, mask)
            result = _call(graph, node, aten.matmul.default, weights, value)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _causal_mask(graph: fx.Graph, node: fx.Node, query: fx.Node, key: fx.Node) -> fx.Node:
    """Add the mask of the positions up to a query's own."""
    device = query.meta["val"].device
    sizes = [shape[-2] for operand in (query, key) if (shape := shape_of(operand)) is not None]
    ranges = []
    for source, size in zip((query, key), sizes, strict=True):
        count = (
            size
            if isinstance(size, int)
            else _call(graph, node, aten.sym_size.int, source, source.meta["val"].dim() - 2)
        )
        ranges.append(_call(graph, node, aten.arange.default, count, device=device))
    own = _call(graph, node, aten.unsqueeze.default, ranges[0], -1)
    return _call(graph, node, aten.ge.Tensor, own, ranges[1])


def drop_empty_parts(network: Network) -> None:
    """Leave empty tensors without a shape out of concatenations, in place, as the first step of a cache of Hugging Face
    has them: ONNX does not."""
    for node in list(network.graph.nodes):
        parts = node.args[0] if is_call(node, aten.cat.default) else ()
        shapes = [shape_of(part) for part in parts] if isinstance(parts, (list, tuple)) else []
        kept = [part for part, shape in zip(parts, shapes, strict=False) if shape != (0,)]
        if not kept or len(kept) == len(shapes):
            continue
        node.args = (kept, *node.args[1:])
        if len(kept) == 1:
            node.replace_all_uses_with(kept[0])
            network.graph.erase_node(node)


def separate_weights(network: Network) -> None:
    """Write `addmm(bias, x, weight)`, as the Conv1D of Hugging Face computes it, as a linear layer with the usual order
    of inputs, in place."""
    for node in network.graph.nodes:
        if is_call(node, aten.addmm.default) and not node.kwargs and attribute_of(network, node.args[2]) is not None:
            bias, x, weight = node.args
            node.target, node.args = input_first_linear, (x, weight, bias)


def _call(graph: fx.Graph, like: fx.Node, target: Any, *arguments: Any, **named: Any) -> fx.Node:
    """Add a call that comes from the same module as another node, with the shape of its result."""
    made = graph.call_function(target, arguments, named)
    made.meta = {key: value for key, value in like.meta.items() if key in ("nn_module_stack", "stack_trace")}
    values = [argument.meta.get("val") if isinstance(argument, fx.Node) else argument for argument in arguments]
    if all(value is not None for value in values):
        made.meta["val"] = target(*values, **named)
    return made


def fuse_batch_norm(network: Network) -> None:
    """Make one `ConvBatchNorm` of a convolution, transposed convolution or linear layer and the batch norm behind it,
    in place. They stay apart if the layer's result is read elsewhere too, or its weight or the batch norm is used
    twice."""
    graph = network.graph
    for node in list(graph.nodes):
        norm = module_of(network, node)
        if not isinstance(norm, _BatchNorm):
            continue
        layer = node.args[0]
        operation = _linear_operation(layer)
        calls = [call for call in graph.nodes if call.op == "call_module" and call.target == node.target]
        if operation is None or len(layer.users) != 1 or len(calls) != 1:
            continue
        weight, bias = _owned(network, layer.args[1]), _owned(network, _argument(layer, 2))
        if weight is None or (bias is None and _argument(layer, 2) is not None):
            continue
        path = _path(network, layer)
        set_attribute(network, path, ConvBatchNorm(operation, weight, bias, norm))
        with graph.inserting_before(node):
            fused = graph.call_module(path, (layer.args[0],))
        fused.meta = {**node.meta, "nn_module_stack": layer.meta.get("nn_module_stack")}
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
        graph.erase_node(layer)


def _linear_operation(layer: Any) -> LinearOperation | None:
    """The layer as an operation on input, weight and bias; None if a batch norm cannot be folded into it."""
    if not isinstance(layer, fx.Node) or layer.kwargs:
        return None
    target: Any = layer.target
    # torch.compile does not accept the graph's own type of list
    arguments = tuple(list(arg) if isinstance(arg, list) else arg for arg in layer.args[3:])
    if is_call(layer, *CONVOLUTIONS):
        return LinearOperation(target, arguments)
    if is_call(layer, *TRANSPOSED) and _argument(layer, TRANSPOSED_GROUPS) in (None, 1):
        return LinearOperation(target, arguments, channel_axis=1)
    if is_call(layer, aten.linear.default) and rank_of(layer) == 2:
        return LinearOperation(target)
    return None


def _owned(network: Network, node: Any) -> nn.Parameter | None:
    """The parameter that a node returns, if nothing else reads it."""
    value = attribute_of(network, node)
    if value is None or len(node.users) != 1:
        return None
    if any(other is not node and attribute_of(network, other) is value for other in network.graph.nodes):
        return None
    return value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)


def _argument(node: fx.Node, index: int) -> Any:
    return node.args[index] if len(node.args) > index else None


def _path(network: Network, layer: fx.Node) -> str:
    """The path of the layer's weight; next to it if other tensors live there."""
    weight: Any = layer.args[1]
    path = str(weight.target).rpartition(".")[0]
    own = {str(arg.target) for arg in layer.args[1:3] if isinstance(arg, fx.Node)}
    used = [str(node.target) for node in network.graph.nodes if node.op in ("get_attr", "call_module")]
    is_shared = any(name.startswith(f"{path}.") and name not in own for name in used)
    return f"{path or str(layer.name)}_batch_norm" if is_shared or not path else path


REWRITES = (drop_empty_parts, decompose_attention, separate_weights, fuse_batch_norm)
