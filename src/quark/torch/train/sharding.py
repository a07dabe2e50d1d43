"""Quantized networks under FSDP2.

`torch.distributed.fsdp.fully_shard` takes no parameters without axes, and steps and thresholds of whole tensors are
such. They stay whole on every process, and their gradients are averaged, as FSDP averages the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn


def fully_shard(network: nn.Module, **options: Any) -> nn.Module:
    """Shard a quantized network over the processes of torchrun, in place, and return it; `options` are those of torch's
    `fully_shard`, such as `mesh` and `mp_policy`.

    Call it instead of torch's function, before the optimizer is made. Parameters without axes start as those of
    the first process. To save or freeze the network, gather its parameters with
    `torch.distributed.checkpoint.state_dict.get_model_state_dict` (full_state_dict=True) and load them into a network
    that is not sharded.
    """
    from torch.distributed.fsdp import fully_shard as shard  # noqa: PLC0415 - torch 2.6 has it, older ones do not

    whole = [parameter for parameter in network.parameters() if parameter.dim() == 0]  # in the same order everywhere
    group = options["mesh"].get_group() if options.get("mesh") is not None else None
    for parameter in whole:
        distributed.broadcast(parameter.detach(), group_src=0, group=group)
        parameter.register_post_accumulate_grad_hook(lambda ready: _average(ready, group))  # type: ignore[no-untyped-call]
    ignored = {*whole, *(options.pop("ignored_params", None) or ())}
    shard(network, ignored_params=ignored, **options)
    return network


def _average(parameter: torch.Tensor, group: Any) -> None:
    """Replace a gradient by its mean over the processes."""
    if parameter.grad is not None:
        distributed.all_reduce(parameter.grad, group=group)
        parameter.grad /= distributed.get_world_size(group)
