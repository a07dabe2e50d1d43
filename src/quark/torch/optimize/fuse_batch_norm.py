"""A convolution, transposed convolution or linear layer and the batch norm behind it become one `ConvBatchNorm`.

Where the layer's result is read elsewhere too, or its weight or the batch norm is used twice, they stay apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from quark.torch.graph import Network, attribute_of, is_call, module_of, rank_of, set_attribute
from quark.torch.train.conv_batch_norm import (
    CONVOLUTIONS,
    TRANSPOSED,
    TRANSPOSED_GROUPS,
    ConvBatchNorm,
    LinearOperation,
)

aten = torch.ops.aten


def fuse_batch_norm(network: Network) -> int:
    """In place; the number of layers that were made."""
    pairs = [(node, norm) for node in network.graph.nodes if (norm := _norm(network, node)) is not None]
    return sum(_fuse(network, node, norm) for node, norm in pairs)


def _norm(network: Network, node: fx.Node) -> _BatchNorm | None:
    module = module_of(network, node)
    return module if isinstance(module, _BatchNorm) else None


def _fuse(network: Network, node: fx.Node, norm: _BatchNorm) -> bool:
    layer = node.args[0]
    operation = _operation(layer)
    if operation is None or not isinstance(layer, fx.Node) or len(layer.users) != 1 or _calls(network, node) != 1:
        return False
    weight, bias = _owned(network, layer.args[1]), _owned(network, _argument(layer, 2))
    if weight is None or (bias is None and _argument(layer, 2) is not None):
        return False
    path = _path(network, layer)
    set_attribute(network, path, ConvBatchNorm(operation, weight, bias, norm))
    with network.graph.inserting_before(node):
        fused = network.graph.call_module(path, (layer.args[0],))
    fused.meta = {**node.meta, "nn_module_stack": layer.meta.get("nn_module_stack")}
    node.replace_all_uses_with(fused)
    network.graph.erase_node(node)
    network.graph.erase_node(layer)
    return True


def _operation(layer: Any) -> LinearOperation | None:
    """The layer as an operation on input, weight and bias; None where a batch norm cannot be folded into it."""
    if not isinstance(layer, fx.Node) or layer.kwargs:
        return None
    if is_call(layer, *CONVOLUTIONS):
        return LinearOperation(layer.target, _plain(layer.args[3:]))  # type: ignore[arg-type]
    if is_call(layer, *TRANSPOSED) and _argument(layer, TRANSPOSED_GROUPS) in (None, 1):
        return LinearOperation(layer.target, _plain(layer.args[3:]), channel_axis=1)  # type: ignore[arg-type]
    if is_call(layer, aten.linear.default) and rank_of(layer) == 2:
        return LinearOperation(layer.target)  # type: ignore[arg-type]
    return None


def _plain(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a node as ordinary lists: the graph's own kind is no list to torch.compile."""
    return tuple(list(each) if isinstance(each, list) else each for each in arguments)


def _owned(network: Network, node: Any) -> nn.Parameter | None:
    """The parameter that a node gives, where nobody else reads it."""
    value = attribute_of(network, node)
    if value is None or len(node.users) != 1:
        return None
    others = [each for each in network.graph.nodes if each is not node and attribute_of(network, each) is value]
    if others:
        return None
    return value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)


def _argument(node: fx.Node, index: int) -> Any:
    return node.args[index] if len(node.args) > index else None


def _calls(network: Network, node: fx.Node) -> int:
    return sum(each.op == "call_module" and each.target == node.target for each in network.graph.nodes)


def _path(network: Network, layer: fx.Node) -> str:
    """Where the layer's weight was; beside it where other tensors live there."""
    weight: Any = layer.args[1]
    path = str(weight.target).rpartition(".")[0]
    own = {str(each.target) for each in layer.args[1:3] if isinstance(each, fx.Node)}
    used = [str(each.target) for each in network.graph.nodes if each.op in ("get_attr", "call_module")]
    is_shared = any(name.startswith(f"{path}.") and name not in own for name in used)
    return f"{path or str(layer.name)}_batch_norm" if is_shared or not path else path
