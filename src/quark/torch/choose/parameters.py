"""Weights and biases by the names that the plan has for them, as inference uses them."""

from __future__ import annotations

import operator

import torch
from torch import fx

from quark.torch.train.conv_batch_norm import ConvBatchNorm


def parameter_of(network: fx.GraphModule, name: str) -> torch.Tensor | None:
    """The tensor of that name; of a layer with a batch norm, the folded one. None where there is none."""
    path, _, last = name.rpartition(".")
    try:
        owner = network.get_submodule(path)
    except AttributeError:
        return None
    if isinstance(owner, ConvBatchNorm):
        return owner.folded_weight() if last == "weight" else owner.folded_bias()
    value = operator.attrgetter(last)(owner) if hasattr(owner, last) else None
    return value if isinstance(value, torch.Tensor) else None
