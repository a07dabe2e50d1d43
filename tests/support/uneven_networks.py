"""Small torch networks whose channels differ widely, captured, for tests of equalizing and correcting."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from quark.torch.capture import capture
from quark.torch.graph import Network
from quark.torch.optimize import optimize

Model = TypeVar("Model", bound=nn.Module)


def make_uneven(model: Model, seed: int = 0) -> Model:
    """Weights whose channels differ along both axes, and batch norms that have seen something; in eval mode."""
    generator = torch.Generator().manual_seed(seed)

    def factors(count: int) -> torch.Tensor:
        return torch.exp(torch.randn(count, generator=generator))

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
                shape = module.weight.shape
                module.weight.copy_(torch.randn(shape, generator=generator) / module.weight[0].numel() ** 0.5)
                module.weight.mul_(factors(shape[0]).reshape(-1, *[1] * (len(shape) - 1)))
                module.weight.mul_(factors(shape[1]).reshape(1, -1, *[1] * (len(shape) - 2)))
                if module.bias is not None:
                    module.bias.copy_(torch.randn(module.bias.shape, generator=generator) / 4)
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                _fill_batch_norm(module, generator)
    return model.eval()


def _fill_batch_norm(norm: nn.modules.batchnorm._BatchNorm, generator: torch.Generator) -> None:
    count = norm.num_features
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.copy_(torch.randn(count, generator=generator) / 4)
    norm.running_var.copy_(torch.rand(count, generator=generator) + 0.5)
    if norm.affine:
        norm.weight.copy_(torch.exp(torch.randn(count, generator=generator)))
        norm.bias.copy_(torch.randn(count, generator=generator) / 4)


def network_of(model: nn.Module, x: torch.Tensor) -> Network:
    """Captured and optimized, as equalizing finds it."""
    network = capture(model, lambda: (x,))
    optimize(network)
    return network


def images(seed: int = 0, batch: int = 4, channels: int = 4, size: int = 8) -> torch.Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(seed))
