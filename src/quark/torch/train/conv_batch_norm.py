"""A convolution, or linear layer, with the batch norm behind it, as one layer whose folded weight is quantized.

Inference computes with the folded layer, so this is what has to be quantized, while training needs the statistics of
each batch. With c = gamma / sqrt(running_var + eps) for each output channel

    in eval mode     y = conv(x, Q(w c), Q(beta + (b - running_mean) c))
    in training      y = batch_norm(conv(x, Q(w c) / c, b)),   plus the rounding error of the folded bias

So a step of training costs one convolution and one batch norm, as in float, and both modes agree if the statistics of
the batch are the running ones. If only the batch norm is in eval mode (`freeze_batch_norm`), training goes through the
folded form, with gradients for gamma and beta.

A channel whose c is 0 is quantized as if c were 1 while it is trained, so that it can recover. If gradient
checkpointing runs a forward pass again, it uses the c of the first time, though the batch norm has moved on since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from quark.torch.pickling import read_target, written_target
from quark.torch.train.quantizers import Quantizer

aten = torch.ops.aten
CONVOLUTIONS = (
    *(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
    *(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding),
)
TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
TRANSPOSED_GROUPS = 6  # the argument of a transposed convolution that counts its groups


@dataclass(frozen=True)
class LinearOperation:
    """An operator on input, weight and bias, with the arguments behind those. `channel_axis` counts output channels in
    the weight; the result has them on axis `output_axis`."""

    target: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...] = ()
    channel_axis: int = 0
    output_axis: int = 1

    def __reduce__(self) -> Any:
        arguments = (written_target(self.target), self.arguments, self.channel_axis, self.output_axis)
        return read_operation, arguments

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.target(x, weight, bias, *self.arguments)


def read_operation(target: Any, *others: Any) -> LinearOperation:
    """A `LinearOperation` that was pickled."""
    return LinearOperation(read_target(target), *others)


class ConvBatchNorm(nn.Module):
    """See the module's docstring. `weight_quantizer` and `bias_quantizer` are None if weight or bias stay float."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    statistics: torch.Tensor  # running mean and variance that this step of training folds with

    def __init__(
        self, operation: LinearOperation, weight: nn.Parameter, bias: nn.Parameter | None, batch_norm: _BatchNorm
    ) -> None:
        super().__init__()
        self.operation = operation
        self.weight = weight
        self.register_parameter("bias", bias)
        self.batch_norm = batch_norm
        self.weight_quantizer: Quantizer | None = None
        self.bias_quantizer: Quantizer | None = None
        self.training = batch_norm.training
        self.register_buffer("statistics", self._running_statistics().detach().clone(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.batch_norm.training:
            weight = _quantized(self.weight_quantizer, self.folded_weight())
            return self.operation(x, weight, _quantized(self.bias_quantizer, self.folded_bias()))
        with torch.no_grad():
            if not _is_run_again():
                self.statistics.copy_(self._running_statistics())
            channel_scale = self.channel_scale(self.statistics)
            channel_scale = self._spread(torch.where(channel_scale == 0, 1.0, channel_scale))
        weight = _quantized(self.weight_quantizer, self.weight * channel_scale) / channel_scale
        y = self.operation(x, weight, self.bias)
        return self._normalized(y)

    def channel_scale(self, statistics: torch.Tensor | None = None) -> torch.Tensor:
        """gamma / sqrt(running_var + eps), the factor of each output channel in folding."""
        norm = self.batch_norm
        _, variance = self._running_statistics() if statistics is None else statistics
        inverse = torch.rsqrt(variance + norm.eps)
        scale: torch.Tensor = inverse if norm.weight is None else norm.weight * inverse
        return scale

    def folded_weight(self) -> torch.Tensor:
        return self.weight * self._spread(self.channel_scale())

    def folded_bias(self, statistics: torch.Tensor | None = None) -> torch.Tensor:
        norm = self.batch_norm
        mean, _ = self._running_statistics() if statistics is None else statistics
        folded = (-mean if self.bias is None else self.bias - mean) * self.channel_scale(statistics)
        shifted: torch.Tensor = folded if norm.bias is None else folded + norm.bias
        return shifted

    def _running_statistics(self) -> torch.Tensor:
        mean, variance = self.batch_norm.running_mean, self.batch_norm.running_var
        assert mean is not None
        assert variance is not None
        return torch.stack((mean, variance))

    def freeze_batch_norm(self) -> None:
        """Keep the running statistics, and train through the folded layer from here on."""
        self.batch_norm.eval()

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        """Reshape one number for each output channel so that it broadcasts with the weight."""
        shape = [1] * self.weight.dim()
        shape[self.operation.channel_axis] = -1
        return values.reshape(shape)

    def _normalized(self, y: torch.Tensor) -> torch.Tensor:
        """Return the batch norm of y; the rounding error of the folded bias goes into beta, without a pass over y."""
        norm = self.batch_norm
        if self.bias_quantizer is None:
            normalized: torch.Tensor = norm(y)
            return normalized
        folded = self.folded_bias(self.statistics)
        shift = _quantized(self.bias_quantizer, folded) - folded
        if isinstance(norm, nn.SyncBatchNorm):
            return torch.as_tensor(norm(y)) + shift.reshape(1, -1, *[1] * (y.dim() - 2))
        count, momentum = norm.num_batches_tracked, norm.momentum
        if count is not None:
            count.add_(1)
            momentum = 1.0 / float(count) if momentum is None else momentum
        assert momentum is not None
        return functional.batch_norm(
            y,
            norm.running_mean,
            norm.running_var,
            norm.weight,
            shift if norm.bias is None else norm.bias + shift,
            training=True,
            momentum=float(momentum),
            eps=norm.eps,
        )


def _quantized(quantizer: Quantizer | None, values: torch.Tensor) -> torch.Tensor:
    if quantizer is None:
        return values
    quantized: torch.Tensor = quantizer(values)
    return quantized


def _is_run_again() -> bool:
    """True during a backward pass, in which gradient checkpointing runs forward passes again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
