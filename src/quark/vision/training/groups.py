"""Which parameters learn how.

weights       matrices and kernels: with weight decay
plain         biases, and scales and offsets of norms: without
steps         of LSQ quantizers: without decay, at a rate of their own; by the optimizer of the weights, because
              LSQ brings their gradients to the size of the weights'
thresholds    logarithms, of TQT quantizers: by Adam always, because their gradients are sums over tensors of any
              size, and only Adam's steps do not depend on that
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from quark.vision.training.options import OptimizerName, TrainingOptions

LOG_THRESHOLD_RATE = 1e-2  # of the paper, arXiv 1903.08066
FULL_RATE = "full_rate"  # the key of a group's learning rate before the schedule


@dataclass
class ParameterKinds:
    weights: list[nn.Parameter] = field(default_factory=list)
    plain: list[nn.Parameter] = field(default_factory=list)
    steps: list[nn.Parameter] = field(default_factory=list)
    thresholds: list[nn.Parameter] = field(default_factory=list)


def sort_parameters(model: nn.Module) -> ParameterKinds:
    """Those that learn, each once."""
    kinds = ParameterKinds()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        owner, _, own_name = name.rpartition(".")
        if own_name.startswith("log2_"):
            kinds.thresholds.append(parameter)
        elif "quantizer" in owner:
            kinds.steps.append(parameter)
        elif parameter.ndim > 1:
            kinds.weights.append(parameter)
        else:
            kinds.plain.append(parameter)
    return kinds


def make_optimizers(model: nn.Module, options: TrainingOptions) -> list[Optimizer]:
    """One or two. Every group has its learning rate under `full_rate` too, for the schedule."""
    kinds = sort_parameters(model)
    rate, own = options.learning_rate, options.threshold_learning_rate
    groups = [
        _group(kinds.weights, rate, options.weight_decay),
        _group(kinds.plain, rate),
        _group(kinds.steps, own or rate),
    ]
    made: list[Optimizer] = []
    if any(group["params"] for group in groups):
        made.append(_main_optimizer([group for group in groups if group["params"]], options))
    if kinds.thresholds:
        made.append(torch.optim.Adam([_group(kinds.thresholds, own or LOG_THRESHOLD_RATE)]))
    return made


def set_rates(optimizers: Iterable[Optimizer], factor: float) -> None:
    """Every group's learning rate, as a part of its full one."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group[FULL_RATE] * factor


def _group(parameters: list[nn.Parameter], rate: float, decay: float = 0.0) -> dict[str, Any]:
    return {"params": parameters, "lr": rate, FULL_RATE: rate, "weight_decay": decay}


def _main_optimizer(groups: list[dict[str, Any]], options: TrainingOptions) -> Optimizer:
    if options.optimizer is OptimizerName.ADAM:
        return torch.optim.AdamW(groups, options.learning_rate)
    return torch.optim.SGD(groups, options.learning_rate, options.momentum, nesterov=options.momentum > 0)
