"""The rows of a problem on the device that trains, and how far a layer's outputs are from their targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quark.reconstruction.problem import Activation, Bounds, Problem, Rows
from quark.reconstruction.quantizers import Quantizer, quantizer_of

_PART = 4096  # rows that are looked at together


class Tensors:
    """`quantized` and `float` are [groups, rows, k], `targets` [groups, rows, outputs]: behind the activation."""

    def __init__(self, problem: Problem, rows: Rows, device: torch.device, has_output_rounding: bool) -> None:
        groups, outputs, _ = problem.layout.matrices
        self._groups, self._outputs = groups, outputs
        self.count = len(rows)
        self.quantized = _grouped(rows.quantized, device)
        self.float = None if rows.float is None else _grouped(rows.float, device)
        self._activation = _on_device(problem.activation, groups, outputs, device)
        before = _grouped(rows.targets.reshape(len(rows), groups, outputs), device)
        self.targets = self._activated(before)
        choice = problem.output_choice if has_output_rounding else None
        shape = (max(1, len(rows)), groups * outputs)
        self._rounding: Quantizer | None = None if choice is None else quantizer_of(choice, shape, device)

    @property
    def is_linear(self) -> bool:
        return self._activation is None and self._rounding is None

    def error(self, outputs: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the outputs are off behind the activation, and the slope from there back to the outputs."""
        behind, slope = self._behind(outputs)
        if self._rounding is not None:
            flat = behind.transpose(0, 1).reshape(behind.shape[1], -1)
            passes = self._rounding.passes(flat)
            behind = self._ungroup(self._rounding.values(flat))
            if passes is not None:
                mask = self._ungroup(passes)
                slope = mask if slope is None else slope * mask
        return behind - self.targets[:, part], slope

    def output_errors(self, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """The mean squared error of each output over all rows: [groups, outputs] in float64."""
        return self.squared_errors(weight, bias) / max(1, self.count)

    def squared_errors(self, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """The sum of squared errors over all rows, for each output: [groups, outputs] in float64."""
        total = torch.zeros(self._groups, self._outputs, dtype=torch.float64, device=weight.device)
        for start in range(0, self.count, _PART):
            part = slice(start, start + _PART)
            error, _ = self.error(outputs_of(self.quantized[:, part], weight, bias), part)
            total += error.square().sum(1, dtype=torch.float64)
        return total

    def power(self) -> float:
        """The mean over rows of the squared targets, summed over outputs."""
        return float(self.targets.square().sum(dtype=torch.float64)) / max(1, self.count)

    def _behind(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        activation = self._activation
        if activation is None:
            return outputs, None
        if isinstance(activation, _TensorBounds):
            return activation.apply(outputs)
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            behind = activation(leaf)
            (slope,) = torch.autograd.grad(behind.sum(), leaf)
        return behind.detach(), slope

    def _activated(self, outputs: torch.Tensor) -> torch.Tensor:
        return self._behind(outputs)[0]

    def _ungroup(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.reshape(flat.shape[0], self._groups, self._outputs).transpose(0, 1)


def outputs_of(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """[groups, rows, k] times [groups, outputs, k], plus the bias: [groups, rows, outputs]."""
    if weight.shape[1] > 1:
        return torch.baddbmm(bias.unsqueeze(1), inputs, weight.transpose(1, 2))
    # the other way around: for one output of many groups, four times as fast on a processor
    return torch.bmm(weight, inputs.transpose(1, 2)).transpose(1, 2) + bias.unsqueeze(1)


class _TensorBounds:
    def __init__(self, bounds: Bounds, groups: int, outputs: int, device: torch.device) -> None:
        self._low, self._high = (
            torch.from_numpy(np.broadcast_to(np.asarray(each, np.float32).reshape(-1), (groups * outputs,)).copy())
            .to(device)
            .reshape(groups, 1, outputs)
            for each in (bounds.lowest, bounds.highest)
        )

    def apply(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is within the bounds, and where the outputs were."""
        behind = torch.clamp(outputs, self._low, self._high)
        return behind, behind == outputs


def _on_device(activation: Activation, groups: int, outputs: int, device: torch.device) -> Any:
    return _TensorBounds(activation, groups, outputs, device) if isinstance(activation, Bounds) else activation


def _grouped(rows: NDArray[Any], device: torch.device) -> torch.Tensor:
    """[rows, groups, n] to [groups, rows, n], contiguous."""
    return torch.from_numpy(np.ascontiguousarray(rows.transpose(1, 0, 2), np.float32)).to(device)
