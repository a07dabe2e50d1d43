"""The parameters of a quantized network by kind, for optimizers.

weights       matrices and kernels, with weight decay
plain         biases, and scales and offsets of norms, without decay
steps         of LSQ quantizers, without decay. LSQ scales their gradients to the size of the weights', so the
              optimizer of the weights suits them
thresholds    logarithms, of TQT quantizers: their gradients are sums over tensors of any size, and only Adam's
              steps do not depend on that
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

LOG_THRESHOLD_RATE = 1e-2  # from the paper, arXiv 1903.08066


@dataclass
class ParameterKinds:
    """Parameters by kind, see the docstring of the module."""

    weights: list[nn.Parameter] = field(default_factory=list)
    plain: list[nn.Parameter] = field(default_factory=list)
    steps: list[nn.Parameter] = field(default_factory=list)
    thresholds: list[nn.Parameter] = field(default_factory=list)


def sort_parameters(model: nn.Module) -> ParameterKinds:
    """Return the parameters that are trained, by kind."""
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


def parameter_groups(
    model: nn.Module,
    learning_rate: float,
    *,
    weight_decay: float = 0.0,
    step_learning_rate: float | None = None,
    threshold_learning_rate: float = LOG_THRESHOLD_RATE,
) -> list[dict[str, Any]]:
    """Return groups for an optimizer of torch, each with its learning rate and a `name`: weights, plain, steps and
    thresholds, as far as the network has them. Only weights decay.

    `step_learning_rate` is that of LSQ, the one of the weights if it is None. Thresholds of TQT need an optimizer like
    Adam, whose steps do not depend on the size of gradients.

    >>> import torch
    >>> network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    >>> optimizer = torch.optim.AdamW(parameter_groups(network, 1e-3, weight_decay=0.01))
    >>> [(group["name"], len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
    [('weights', 1, 0.01), ('plain', 3, 0.0)]
    """
    kinds = sort_parameters(model)
    step_rate = learning_rate if step_learning_rate is None else step_learning_rate
    groups = (
        ("weights", kinds.weights, learning_rate, weight_decay),
        ("plain", kinds.plain, learning_rate, 0.0),
        ("steps", kinds.steps, step_rate, 0.0),
        ("thresholds", kinds.thresholds, threshold_learning_rate, 0.0),
    )
    return [
        {"name": name, "params": parameters, "lr": rate, "weight_decay": decay}
        for name, parameters, rate, decay in groups
        if parameters
    ]
