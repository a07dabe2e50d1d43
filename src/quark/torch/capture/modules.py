"""Batch norms and dropouts become modules again, which know the difference between training and inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from quark.torch.graph import Network, attribute_of, is_call, rank_of, set_attribute

aten = torch.ops.aten
_CLASSES: dict[int | None, type[_BatchNorm]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 5: nn.BatchNorm3d}
_FIELDS = ("weight", "bias", "running_mean", "running_var")


def restore_modules(network: Network) -> None:
    """In place. Parameters keep the names that they have; a batch norm without running statistics stays a function."""
    made: dict[str, _BatchNorm] = {}
    for node in list(network.graph.nodes):
        if is_call(node, aten.batch_norm.default) and node.args[3] is not None and node.args[4] is not None:
            _restore_batch_norm(network, node, made)
        elif is_call(node, aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default):
            _restore_dropout(network, node)


def _restore_batch_norm(network: Network, node: fx.Node, made: dict[str, _BatchNorm]) -> None:
    running_mean: Any = node.args[3]
    path = str(running_mean.target).rpartition(".")[0] or str(node.name)
    if path not in made:
        made[path] = _batch_norm(network, node, path)
        set_attribute(network, path, made[path])
    with network.graph.inserting_before(node):
        call = network.graph.call_module(path, (node.args[0],))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    network.graph.erase_node(node)
    call.name = node.name


def _batch_norm(network: Network, node: fx.Node, path: str) -> _BatchNorm:
    values = [attribute_of(network, argument) for argument in node.args[1:5]]
    mean = values[2]
    assert mean is not None
    kind = _CLASSES.get(rank_of(node), nn.BatchNorm2d)
    momentum, eps = (float(node.args[i]) for i in (6, 7))  # type: ignore[arg-type]
    norm = kind(mean.numel(), eps, momentum, affine=values[0] is not None, device=mean.device, dtype=mean.dtype)
    for field, value in zip(_FIELDS, values, strict=True):
        if value is not None:
            setattr(norm, field, value)
    tracked = getattr(network.get_submodule(path), "num_batches_tracked", None) if _has(network, path) else None
    if isinstance(tracked, torch.Tensor) and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.copy_(tracked)
    return norm.eval()


def _has(network: Network, path: str) -> bool:
    try:
        network.get_submodule(path)
    except AttributeError:
        return False
    return True


def _restore_dropout(network: Network, node: fx.Node) -> None:
    kinds: dict[Any, type[nn.Module]] = {
        aten.dropout.default: nn.Dropout,
        aten.feature_dropout.default: nn.Dropout2d,
        aten.alpha_dropout.default: nn.AlphaDropout,
    }
    path = f"dropouts.{node.name}"
    set_attribute(network, path, kinds[node.target](float(node.args[1])).eval())  # type: ignore[arg-type]
    with network.graph.inserting_before(node):
        call = network.graph.call_module(path, (node.args[0],))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    network.graph.erase_node(node)
