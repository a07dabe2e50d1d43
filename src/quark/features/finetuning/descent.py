"""Move what is learned of a layer down its gradient, by Adam.

On the CPU, compiled code does an iteration in one pass over the weights: the gradient of what is learned, Adam, and the
weights that the next iteration computes with (csrc/formats/weight_step.h). On other devices, and without compiled code,
torch does the same, which takes some 25 passes. With AVX-512, Adam and AdaQuant are torch's to the last bit, except for
the last numbers of a tensor, fewer than 16. AdaRound's sigmoid and power differ from torch's in the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from quark.features.finetuning.learned_weights import LearnedWeights
from quark.features.finetuning.training import MEAN_DECAY, SQUARE_DECAY
from quark.formats.native import NativeFinetuning, StepKind, WeightStep, native_finetuning


class Descent(Protocol):
    """The weights of a layer, and its bias if that is learned; `rates` are their learning rates."""

    def soft(self) -> torch.Tensor:
        """The weights that the loss is computed with; they may change with the next step."""

    def step(self, of_weights: torch.Tensor, of_bias: torch.Tensor | None, progress: float) -> None:
        """Move by the gradients of the weights that `soft` returned and of the bias."""


def descent(state: LearnedWeights, bias: torch.Tensor | None, rates: Sequence[float]) -> Descent:
    """The fastest there is. The state's parameter and the bias change in place."""
    native = native_finetuning() if state.parameter.device.type == "cpu" else None
    if native is None:
        return TorchDescent(state, bias, rates)
    return NativeDescent(native, state, bias, rates)


class TorchDescent:
    """In torch's operations, on any device. On a GPU the numbers that change from iteration to iteration are tensors
    there, so that a CUDA graph of `move` reads those that `pace` has set last."""

    def __init__(self, state: LearnedWeights, bias: torch.Tensor | None, rates: Sequence[float]) -> None:
        self._state, self._rates = state, rates
        device = state.parameter.device
        self._on_device = device.type == "cuda"
        # seen as lines: a fused optimizer wants gradients that lie in memory as the parameters do
        self._lines = [parameter.view(-1) for parameter in (state.parameter, bias) if parameter is not None]
        groups = [
            {"params": [line], "lr": torch.tensor(rate, device=device) if self._on_device else rate}
            for line, rate in zip(self._lines, rates, strict=False)
        ]
        self._optimizer = torch.optim.Adam(groups, fused=True, capturable=self._on_device)
        self._beta: float | torch.Tensor | None = None
        self._device_beta = torch.zeros((), device=device)

    @property
    def is_regularized(self) -> bool:
        """False during AdaRound's warm start, and for AdaQuant."""
        return self._beta is not None

    def soft(self) -> torch.Tensor:
        return self._state.soft()

    def step(self, of_weights: torch.Tensor, of_bias: torch.Tensor | None, progress: float) -> None:
        self.pace(progress)
        self.move(of_weights, of_bias)

    def pace(self, progress: float) -> None:
        """Set the learning rates, and how AdaRound regularizes, for that share of the iterations."""
        fading, beta = self._state.fading(progress), self._state.beta(progress)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False):
            if self._on_device:
                group["lr"].fill_(rate * fading)
            else:
                group["lr"] = rate * fading
        self._beta = beta
        if beta is not None and self._on_device:
            self._beta = self._device_beta.fill_(beta)

    def move(self, of_weights: torch.Tensor, of_bias: torch.Tensor | None) -> None:
        """Move by the gradients, at the pace that was set."""
        gradients = [self._state.gradient(of_weights, self._beta), of_bias]
        for line, gradient in zip(self._lines, gradients, strict=False):
            assert gradient is not None
            line.grad = gradient.reshape(-1).contiguous()
        self._optimizer.step()


class NativeDescent:
    """In one pass of compiled code over the weights, and one over the bias."""

    def __init__(
        self, native: NativeFinetuning, state: LearnedWeights, bias: torch.Tensor | None, rates: Sequence[float]
    ) -> None:
        self._native, self._state, self._rates = native, state, rates
        self._weights = state.soft().contiguous()
        kind, numbers = state.fused()
        self._held = [state.parameter, self._weights, bias, *numbers]  # the addresses below are of these
        addresses = [number.data_ptr() for number in numbers] or [0, 0, 0]
        self._steps = [self._described(kind, state.parameter, self._weights.data_ptr(), addresses)]
        if bias is not None:
            self._steps.append(self._described(StepKind.PLAIN, bias, 0, [0, 0, 0]))
        self._iterations = 0

    def _described(self, kind: StepKind, parameter: torch.Tensor, weights: int, numbers: Sequence[int]) -> WeightStep:
        assert parameter.is_contiguous()
        assert parameter.dtype is torch.float32
        moments = torch.zeros(2, parameter.numel())
        self._held.append(moments)
        return WeightStep(
            kind=kind,
            count=parameter.numel(),
            parameter=parameter.data_ptr(),
            mean=moments[0].data_ptr(),
            square=moments[1].data_ptr(),
            weights=weights,
            first=numbers[0],
            second=numbers[1],
            third=numbers[2],
            factor=1.0,
        )

    def soft(self) -> torch.Tensor:
        return self._weights

    def step(self, of_weights: torch.Tensor, of_bias: torch.Tensor | None, progress: float) -> None:
        self._iterations += 1
        fading, beta = self._state.fading(progress), self._state.beta(progress)
        for step, rate, gradient in zip(self._steps, self._rates, (of_weights, of_bias), strict=False):
            assert gradient is not None
            line = gradient.contiguous()
            step.gradient = line.data_ptr()
            step.step_size = rate * fading / (1 - MEAN_DECAY**self._iterations)
            step.root = math.sqrt(1 - SQUARE_DECAY**self._iterations)
            step.exponent = -1.0 if beta is None else beta - 1
            step.regularization = 0.0 if beta is None else 2 * self._state.regularization * beta
            self._native.step(step)
        if self._steps[0].kind == StepKind.PLAIN:
            self._weights = self._state.soft()
