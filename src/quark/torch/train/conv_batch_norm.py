"""A convolution, or linear layer, with the batch norm behind it, as one layer whose folded weight is quantized.

Inference computes with the folded layer, so that this is what has to be quantized, while training goes on needs the
statistics of each batch. With c = gamma / sqrt(running_var + eps) for each output channel

    in eval mode     y = conv(x, Q(w c), Q(beta + (b - running_mean) c))
    in training      y = batch_norm(conv(x, Q(w c) / c, b)),   and what rounding the folded bias does is added

so that a step of training costs one convolution and one batch norm, as in float, and both modes agree where the
statistics of the batch are the running ones. Where the batch norm alone is in eval mode (`freeze_batch_norm`), training
goes through the folded form, with gradients for gamma and beta.

A channel whose c is 0 is quantized as if c were 1 while it is trained: it can come back to life. Where gradient
checkpointing runs a forward pass again, c is that of the first time, though the batch norm has moved on since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

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

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.target(x, weight, bias, *self.arguments)


class ConvBatchNorm(nn.Module):
    """See the text of the module. `weight_quantizer` and `bias_quantizer` are None where those stay float."""

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
            return self.operation(
                x, self._quantized_weight(self.folded_weight()), self._quantized_bias(self.folded_bias())
            )
        with torch.no_grad():
            if not _is_run_again():
                self.statistics.copy_(self._running_statistics())
            channel_scale = self.channel_scale(self.statistics)
            channel_scale = self._spread(torch.where(channel_scale == 0, 1.0, channel_scale))
        weight = self._quantized_weight(self.weight * channel_scale) / channel_scale
        y = self.operation(x, weight, self.bias)
        return self._normalized(y)

    def channel_scale(self, statistics: torch.Tensor | None = None) -> torch.Tensor:
        """gamma / sqrt(running_var + eps), what folding multiplies each output channel with."""
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

    def _quantized_weight(self, weight: torch.Tensor) -> torch.Tensor:
        if self.weight_quantizer is None:
            return weight
        quantized: torch.Tensor = self.weight_quantizer(weight)
        return quantized

    def _quantized_bias(self, folded: torch.Tensor) -> torch.Tensor:
        if self.bias_quantizer is None:
            return folded
        quantized: torch.Tensor = self.bias_quantizer(folded)
        return quantized

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        """One number for each output channel in a shape that goes with the weight."""
        shape = [1] * self.weight.dim()
        shape[self.operation.channel_axis] = -1
        return values.reshape(shape)

    def _normalized(self, y: torch.Tensor) -> torch.Tensor:
        """The batch norm of y; what rounding does to the folded bias goes into beta, which costs no pass over y."""
        norm = self.batch_norm
        if self.bias_quantizer is None:
            normalized: torch.Tensor = norm(y)
            return normalized
        folded = self.folded_bias(self.statistics)
        shift = self._quantized_bias(folded) - folded
        if isinstance(norm, nn.SyncBatchNorm):
            return torch.as_tensor(norm(y)) + shift.reshape(1, -1, *[1] * (y.dim() - 2))
        return functional.batch_norm(
            y,
            norm.running_mean,
            norm.running_var,
            norm.weight,
            shift if norm.bias is None else norm.bias + shift,
            training=True,
            momentum=self._momentum(),
            eps=norm.eps,
        )

    def _momentum(self) -> float:
        """The weight of this batch in the running statistics, counted as the batch norm counts."""
        norm = self.batch_norm
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        if norm.momentum is not None:
            return float(norm.momentum)
        assert norm.num_batches_tracked is not None
        return 1.0 / float(norm.num_batches_tracked)


def _is_run_again() -> bool:
    """That a backward pass is under way, which gradient checkpointing runs forward passes in."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
