"""The error of a layer's output and its gradient: from batches of rows, or from a Gram matrix of all of them.

With rows X, weights W0 where they stand, the error E0 that they leave, and D = V - W0, an output without an activation
has the error

    |E0 - X D^T|^2 = |E0|^2 - 2 <E0^T X, D> + <D G, D>,     G = X^T X

so that an iteration costs the same however many rows there are, and sees all of them. That is less work than a batch
if a row is shorter than two batches are long. A bias is one more column of ones.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from quark.features.finetuning.problem import Bounds, Part, Problem, Rows
from quark.features.finetuning.quantizers import Quantizer, quantizer_of, tensor_of
from quark.features.finetuning.training import batch_starts

_PART = 4096  # rows that are looked at together


class Tensors:
    """The rows of a problem on the device that trains: `quantized` and `float` are [groups, rows, k], and `targets`,
    behind the activation, [groups, rows, outputs]."""

    def __init__(self, problem: Problem, rows: Rows, device: torch.device, has_output_rounding: bool) -> None:
        groups, outputs, _ = problem.layout.matrices
        self._groups, self._outputs = groups, outputs
        self.count = len(rows)
        self.quantized = _grouped(rows.quantized, device)
        self.float = None if rows.float is None else _grouped(rows.float, device)
        self._activation = problem.activation
        if isinstance(problem.activation, Bounds):
            shape = (groups, 1, outputs)
            self._low, self._high = (
                tensor_of(np.broadcast_to(np.asarray(bound).reshape(-1), (groups * outputs,)), device).reshape(shape)
                for bound in (problem.activation.lowest, problem.activation.highest)
            )
        before = _grouped(rows.targets.reshape(len(rows), groups, outputs), device)
        self.targets = self._behind(before)[0]
        choice = problem.output_choice if has_output_rounding else None
        flat = (max(1, len(rows)), groups * outputs)
        self._rounding: Quantizer | None = None if choice is None else quantizer_of(choice, flat, device)

    @property
    def is_linear(self) -> bool:
        return self._activation is None and self._rounding is None

    def part(self, part: Part) -> Tensors:
        """The same rows for some of the outputs, which must not be rounded together."""
        other = copy.copy(self)
        other.quantized = self.quantized[part.groups]
        other.float = None if self.float is None else self.float[part.groups]
        other.targets = self.targets[part.groups, :, part.outputs].contiguous()
        other._groups, _, other._outputs = other.targets.shape
        if isinstance(self._activation, Bounds):
            other._low, other._high = (
                bound[part.groups, :, part.outputs].contiguous() for bound in (self._low, self._high)
            )
        return other

    def error(self, outputs: torch.Tensor, part: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The error behind the activation, and the slope from there back to the outputs."""
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
        total = torch.zeros(self._groups, self._outputs, dtype=torch.float64, device=weight.device)
        for start in range(0, self.count, _PART):
            part = slice(start, start + _PART)
            error, _ = self.error(outputs_of(self.quantized[:, part], weight, bias), part)
            total += error.square().sum(1, dtype=torch.float64)
        return total / max(1, self.count)

    def power(self) -> float:
        """The mean over rows of the squared targets, summed over outputs."""
        return float(self.targets.square().sum(dtype=torch.float64)) / max(1, self.count)

    def _behind(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        activation = self._activation
        if activation is None:
            return outputs, None
        if isinstance(activation, Bounds):
            behind = torch.clamp(outputs, self._low, self._high)
            return behind, behind == outputs
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            behind = activation(leaf)
            (slope,) = torch.autograd.grad(behind.sum(), leaf)
        return behind.detach(), slope

    def _ungroup(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.reshape(flat.shape[0], self._groups, self._outputs).transpose(0, 1)


def outputs_of(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """[groups, rows, k] times [groups, outputs, k], plus the bias: [groups, rows, outputs], contiguous."""
    if weight.shape[1] > 1:
        return torch.baddbmm(bias.unsqueeze(1), inputs, weight.transpose(1, 2))
    # the other way around: for one output of many groups, four times as fast on a processor
    product = torch.bmm(weight, inputs.transpose(1, 2)).add_(bias.unsqueeze(1))
    return product.view(product.shape[0], product.shape[2], 1)


def _grouped(rows: Any, device: torch.device) -> torch.Tensor:
    """[rows, groups, n], an array or a tensor, to [groups, rows, n], contiguous."""
    if isinstance(rows, torch.Tensor):
        return rows.swapaxes(0, 1).to(device, torch.float32).contiguous()
    return torch.from_numpy(np.ascontiguousarray(rows.transpose(1, 0, 2), np.float32)).to(device)


@dataclass(frozen=True)
class Gradient:
    """The gradient of weights [g, o, k] and bias [g, o], which the next call may overwrite. `loss` is the mean over
    rows of the squared error if it was asked for, a tensor: converting it to a number would wait for the device."""

    weight: torch.Tensor
    bias: torch.Tensor
    loss: torch.Tensor | None = None


class Objective(Protocol):
    """What training minimizes: the gradient of the loss at each iteration, and the loss where it is asked for. Where
    `can_replay`, the gradient of iteration None is that of the rows that `place` chose last: a CUDA graph of it reads
    other rows at each replay."""

    @property
    def can_replay(self) -> bool: ...

    def place(self, iteration: int) -> None: ...

    def gradient(
        self, iteration: int | None, weight: torch.Tensor, bias: torch.Tensor, *, has_loss: bool = False
    ) -> Gradient: ...


class RowObjective:
    """Batches are neighbours among rows that were shuffled beforehand. `batches` below 1: every iteration sees all."""

    def __init__(self, tensors: Tensors, batch_rows: int, batches: int, drop_ratio: float, seed: int) -> None:
        self._tensors = tensors
        self._rows = min(batch_rows, tensors.count)
        self._batches = batches
        self._drop_ratio = drop_ratio if tensors.float is not None else 1.0
        self._generator = torch.Generator(device=tensors.quantized.device).manual_seed(seed)
        self._buffers: dict[tuple[int, ...], torch.Tensor] = {}
        self._placed: list[torch.Tensor] = []
        self.can_replay = batches > 0 and self._drop_ratio == 1

    def place(self, iteration: int) -> None:
        """Choose the rows of that iteration."""
        parts, device = self._parts(iteration), self._tensors.quantized.device
        if not self._placed:
            self._first_rows = torch.arange(self._rows, device=device)
            self._placed = [torch.empty_like(self._first_rows) for _ in parts]
        for part, placed in zip(parts, self._placed, strict=True):
            torch.add(self._first_rows, part.start, out=placed)

    def gradient(
        self, iteration: int | None, weight: torch.Tensor, bias: torch.Tensor, *, has_loss: bool = False
    ) -> Gradient:
        seen = self._tensors.count if self._batches < 1 else self._rows * self._batches  # rows of an iteration
        total: Gradient | None = None
        for part in self._placed if iteration is None else self._parts(iteration):
            inputs = self._tensors.quantized[:, part]
            if self._drop_ratio < 1:
                assert self._tensors.float is not None
                chance = torch.rand(inputs.shape, generator=self._generator, device=inputs.device)
                inputs = torch.where(chance < self._drop_ratio, inputs, self._tensors.float[:, part])
            loss = None
            if has_loss:  # apart from the gradient, whose last bits must not depend on what is logged
                loss = self._tensors.error(outputs_of(inputs, weight, bias), part)[0].square().sum()
            error, slope = self._tensors.error(outputs_of(inputs, weight, bias), part)
            error = error if slope is None else error.mul_(slope)
            of_weight = torch.bmm(error.transpose(1, 2), inputs, out=self._buffer(weight.shape))
            of_bias = error.sum(1).mul_(2 / seen)
            gradient = Gradient(of_weight.mul_(2 / seen), of_bias, None if loss is None else loss / seen)
            if total is None:
                total = gradient if self._batches == 1 else replace(gradient, weight=gradient.weight.clone())
            else:
                both = None if total.loss is None or gradient.loss is None else total.loss + gradient.loss
                total = Gradient(total.weight + gradient.weight, total.bias + gradient.bias, both)
        assert total is not None
        return total

    def _buffer(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Memory that is used again: fresh pages cost more than the numbers in them."""
        if shape not in self._buffers:
            self._buffers[shape] = torch.empty(shape, device=self._tensors.quantized.device)
        return self._buffers[shape]

    def _parts(self, iteration: int) -> list[slice]:
        count, rows = self._tensors.count, self._rows
        starts = batch_starts(range(iteration, iteration + 1), self._batches, rows, count)
        return [slice(start, min(start + rows, count)) for start in starts]


class GramObjective:
    """All rows at once; there is no activation behind the output."""

    can_replay = True

    def __init__(self, tensors: Tensors, weight: torch.Tensor, bias: torch.Tensor) -> None:
        count = tensors.count
        ones = torch.ones_like(tensors.quantized[:, :, :1])
        self._origin = torch.cat([weight, bias.unsqueeze(-1)], -1)
        groups, outputs, length = self._origin.shape
        device = weight.device
        self._gram = torch.zeros(groups, length, length, device=device)
        self._cross = torch.zeros(groups, outputs, length, device=device)
        self._square = torch.zeros(groups, outputs, device=device)
        for start in range(0, count, _PART):
            part = slice(start, start + _PART)
            rows = torch.cat([tensors.quantized[:, part], ones[:, part]], -1)
            error = tensors.targets[:, part] - torch.bmm(rows, self._origin.transpose(1, 2))
            self._gram += torch.bmm(rows.transpose(1, 2), rows) / count
            self._cross += torch.bmm(error.transpose(1, 2), rows) / count
            self._square += error.square().sum(1) / count

    def part(self, part: Part) -> GramObjective:
        """The same rows for some of the outputs."""
        other = copy.copy(self)
        other._gram = self._gram[part.groups]
        other._origin, other._cross, other._square = (
            part.of(matrix) for matrix in (self._origin, self._cross, self._square)
        )
        return other

    def place(self, iteration: int) -> None:
        """Every iteration is about all rows."""

    def gradient(
        self, iteration: int | None, weight: torch.Tensor, bias: torch.Tensor, *, has_loss: bool = False
    ) -> Gradient:
        moved = torch.cat([weight, bias.unsqueeze(-1)], -1).sub_(self._origin)
        product = torch.bmm(moved, self._gram)
        loss = self._square.sum() + (moved * (product - 2 * self._cross)).sum() if has_loss else None
        slope = product.sub_(self._cross).mul_(2)
        return Gradient(slope[..., :-1], slope[..., -1], loss)
