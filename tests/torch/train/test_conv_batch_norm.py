"""A layer with its batch norm: what training and inference see is the folded, quantized weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quark.plan import AffineChoice, Role
from quark.torch.train.conv_batch_norm import ConvBatchNorm, LinearOperation
from quark.torch.train.quantizers import AffineQuantizer

aten = torch.ops.aten
LAYERS: dict[str, tuple[LinearOperation, tuple[int, ...], tuple[int, ...], type[Any]]] = {
    "conv1d": (LinearOperation(aten.conv1d.default, ([1], [1])), (6, 4, 3), (8, 4, 9), nn.BatchNorm1d),
    "conv2d": (LinearOperation(aten.conv2d.default, ([2, 2], [1, 1])), (6, 4, 3, 3), (8, 4, 9, 9), nn.BatchNorm2d),
    "conv3d": (LinearOperation(aten.conv3d.default), (6, 4, 2, 2, 2), (8, 4, 4, 4, 4), nn.BatchNorm3d),
    "transposed": (
        LinearOperation(aten.conv_transpose2d.input, ([2, 2],), channel_axis=1),
        (4, 6, 2, 2),
        (8, 4, 5, 5),
        nn.BatchNorm2d,
    ),
    "linear": (LinearOperation(aten.linear.default), (6, 4), (8, 4), nn.BatchNorm1d),
}


def layer(name: str, has_bias: bool) -> tuple[ConvBatchNorm, torch.Tensor]:
    operation, weight_shape, input_shape, kind = LAYERS[name]
    torch.manual_seed(0)
    norm = kind(6)
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -1, 1)
    weight = nn.Parameter(torch.randn(weight_shape))
    bias = nn.Parameter(torch.randn(6)) if has_bias else None
    return ConvBatchNorm(operation, weight, bias, norm), torch.randn(input_shape)


def plain(module: ConvBatchNorm, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module.batch_norm(module.operation(x, module.weight, module.bias))
    return result


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_without_quantizers_it_is_the_layer_and_its_batch_norm(name: str, has_bias: bool) -> None:
    module, x = layer(name, has_bias)
    module.eval()
    assert torch.allclose(module(x), plain(module, x), atol=1e-5)
    module.train()
    found = module(x)
    mean = module.batch_norm.running_mean.clone()
    other, _ = layer(name, has_bias)
    assert torch.allclose(found, plain(other.train(), x), atol=1e-5)
    assert torch.allclose(mean, other.batch_norm.running_mean, atol=1e-6)


def with_quantizers(name: str) -> tuple[ConvBatchNorm, torch.Tensor]:
    module, x = layer(name, has_bias=True)
    choice = AffineChoice("int8", (0.04,), (0,))
    module.weight_quantizer = AffineQuantizer("w", Role.WEIGHT, choice, ())
    module.bias_quantizer = AffineQuantizer("b", Role.BIAS, choice, ())
    return module, x


@pytest.mark.parametrize("name", LAYERS)
def test_inference_computes_with_the_quantized_folded_parameters(name: str) -> None:
    module, x = with_quantizers(name)
    module.eval()
    weight, bias = (
        torch.round(value() / 0.04).clamp(-128, 127) * 0.04 for value in (module.folded_weight, module.folded_bias)
    )
    assert torch.allclose(module(x), module.operation(x, weight, bias), atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_training_agrees_with_inference_where_the_batch_is_typical(name: str) -> None:
    module, x = with_quantizers(name)
    module.train()
    norm = module.batch_norm
    assert module.weight_quantizer is not None
    with torch.no_grad():  # statistics of this very batch, of the layer as it is quantized
        scale = module._spread(module.channel_scale())
        for _ in range(20):
            y = module.operation(x, module.weight_quantizer(module.weight * scale) / scale, module.bias)
            axes = [axis for axis in range(y.dim()) if axis != 1]
            norm.running_mean.copy_(y.mean(axes))
            norm.running_var.copy_(y.var(axes, unbiased=False))
            scale = module._spread(module.channel_scale())
        norm.momentum = 0.0
        trained = module(x)
        inferred = module.eval()(x)
    assert torch.allclose(trained, inferred, atol=4e-2 * float(inferred.abs().max()))


def test_gradients_reach_everything_in_both_forms() -> None:
    module, x = with_quantizers("conv2d")
    for is_frozen in (False, True):
        module.train()
        if is_frozen:
            module.freeze_batch_norm()
        module.zero_grad()
        (module(x) ** 2).sum().backward()
        assert all(
            parameter.grad is not None and parameter.grad.abs().sum() > 0
            for parameter in module.parameters()
            if parameter is not module.bias
        )


def test_a_frozen_batch_norm_keeps_its_statistics() -> None:
    module, x = with_quantizers("conv2d")
    module.train()
    module.freeze_batch_norm()
    before = module.batch_norm.running_mean.clone()
    module(x)
    assert torch.equal(module.batch_norm.running_mean, before)


def test_a_dead_channel_is_finite_and_can_come_back() -> None:
    module, x = with_quantizers("conv2d")
    with torch.no_grad():
        module.batch_norm.weight[2] = 0.0
    module.train()
    y = module(x)
    assert y.isfinite().all()
    y.sum().backward()
    gradient = module.batch_norm.weight.grad
    assert gradient is not None
    assert gradient.isfinite().all()
    assert module.eval()(x).isfinite().all()
