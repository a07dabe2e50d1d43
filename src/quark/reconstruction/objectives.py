"""The error of a layer's output and its gradient: from batches of rows, or from a Gram matrix of all of them.

With rows X, weights W0 where they stand, the error E0 that they leave, and D = V - W0, an output without an activation
has the error

    |E0 - X D^T|^2 = |E0|^2 - 2 <E0^T X, D> + <D G, D>,     G = X^T X

so that an iteration costs the same however many rows there are, and sees all of them. That is less work than a batch
where a row is shorter than two batches are long. A bias is one more column of ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from quark.reconstruction.tensors import Tensors, outputs_of


@dataclass(frozen=True)
class Gradient:
    """Of weights [g, o, k] and bias [g, o]; `loss` is the mean over rows of the squared error, as a tensor: to ask for
    its number waits for the device."""

    weight: torch.Tensor
    bias: torch.Tensor
    loss: torch.Tensor


class Objective(Protocol):
    def gradient(self, iteration: int, weight: torch.Tensor, bias: torch.Tensor) -> Gradient: ...


class RowObjective:
    """Batches are neighbours among rows that were shuffled beforehand. `batches` below 1: every iteration sees all."""

    def __init__(self, tensors: Tensors, batch_rows: int, batches: int, drop_ratio: float, seed: int) -> None:
        self._tensors = tensors
        self._rows = min(batch_rows, tensors.count)
        self._batches = batches
        self._stride = _coprime(self._rows, tensors.count - self._rows + 1)
        self._drop_ratio = drop_ratio if tensors.float is not None else 1.0
        self._generator = torch.Generator(device=tensors.quantized.device).manual_seed(seed)

    def gradient(self, iteration: int, weight: torch.Tensor, bias: torch.Tensor) -> Gradient:
        total: Gradient | None = None
        for part in self._parts(iteration):
            found = self._of_part(part, weight, bias)
            if total is None:
                total = found
            else:
                total = Gradient(total.weight + found.weight, total.bias + found.bias, total.loss + found.loss)
        assert total is not None
        return total

    def _parts(self, iteration: int) -> list[slice]:
        count, rows = self._tensors.count, self._rows
        if self._batches < 1:
            return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
        numbers = range(iteration * self._batches, (iteration + 1) * self._batches)
        starts = [number * self._stride % (count - rows + 1) for number in numbers]
        return [slice(start, start + rows) for start in starts]

    def _of_part(self, part: slice, weight: torch.Tensor, bias: torch.Tensor) -> Gradient:
        seen = self._tensors.count if self._batches < 1 else self._rows * self._batches  # rows of an iteration
        inputs = self._inputs(part)
        outputs = outputs_of(inputs, weight, bias)
        error, slope = self._tensors.error(outputs, part)
        flat = error.reshape(-1)
        loss = torch.dot(flat, flat) / seen
        error = error if slope is None else error.mul_(slope)
        of_weight = torch.bmm(error.transpose(1, 2), inputs).mul_(2 / seen)
        return Gradient(of_weight, error.sum(1).mul_(2 / seen), loss)

    def _inputs(self, part: slice) -> torch.Tensor:
        quantized = self._tensors.quantized[:, part]
        if self._drop_ratio >= 1:
            return quantized
        assert self._tensors.float is not None
        chance = torch.rand(quantized.shape, generator=self._generator, device=quantized.device)
        return torch.where(chance < self._drop_ratio, quantized, self._tensors.float[:, part])


def _coprime(step: int, count: int) -> int:
    """The next number from `step` on whose multiples, modulo `count`, are all numbers below it: no row is left out."""
    while math.gcd(step, count) != 1:
        step += 1
    return step


class GramObjective:
    """All rows at once; there is no activation behind the output."""

    def __init__(self, tensors: Tensors, weight: torch.Tensor, bias: torch.Tensor) -> None:
        count = tensors.count
        ones = torch.ones_like(tensors.quantized[:, :, :1])
        self._origin = torch.cat([weight, bias.unsqueeze(-1)], -1)
        self._gram: torch.Tensor | float = 0.0
        self._cross: torch.Tensor | float = 0.0
        self._square: torch.Tensor | float = 0.0
        for start in range(0, count, 4096):
            part = slice(start, start + 4096)
            rows = torch.cat([tensors.quantized[:, part], ones[:, part]], -1)
            error = tensors.targets[:, part] - torch.bmm(rows, self._origin.transpose(1, 2))
            self._gram = self._gram + torch.bmm(rows.transpose(1, 2), rows) / count
            self._cross = self._cross + torch.bmm(error.transpose(1, 2), rows) / count
            self._square = self._square + error.square().sum() / count

    def gradient(self, iteration: int, weight: torch.Tensor, bias: torch.Tensor) -> Gradient:
        moved = torch.cat([weight, bias.unsqueeze(-1)], -1).sub_(self._origin)
        product = torch.bmm(moved, self._gram)  # type: ignore[arg-type]
        loss = self._square + (moved * (product - 2 * self._cross)).sum()
        slope = product.sub_(self._cross).mul_(2)
        return Gradient(slope[..., :-1], slope[..., -1], torch.as_tensor(loss))
