"""Functions that a network calls instead of aten operators, so that decisions can tell them apart."""

from __future__ import annotations

import torch


def input_first_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x weight + bias, for a weight of (inputs, outputs), as the Conv1D of Hugging Face has it."""
    return torch.addmm(bias, x, weight)


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The weights of attention: a softmax over the scores that a mask leaves, which is boolean or added.

    It is one function because the masked scores have to stay in float: -inf has no codes, and any other number in its
    place would be the range of the scores. A row that is masked as a whole has weights of zero.
    """
    if mask.dtype is not torch.bool:
        return torch._safe_softmax(scores + mask, -1)
    hidden = torch.logical_not(mask)
    weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), -1)
    return weights.masked_fill(hidden, 0.0)
