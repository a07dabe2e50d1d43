"""Samples of a block, batch by batch.

Several samples make a batch where the block computes each by itself, as nearly all do; a block with the shape of one
sample written into it does not, and then a batch is computed one sample after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quark.plan import Choice
from quark.reconstruction.block_problem import BlockProblem, Weights
from quark.reconstruction.options import ROWS_OF_A_SAMPLE, FitOptions
from quark.reconstruction.problem import Array
from quark.reconstruction.quantizers import Quantizer, quantizer_of
from quark.reconstruction.straight_through import straight_through

TOGETHER = 8  # samples that are looked at together
_SAME = 0.01  # relative: a batch that differs so little only rounds differently here and there


@dataclass(frozen=True, eq=False)
class Batch:
    """`count` samples; `floats` are their inputs in the float network, where they are wanted."""

    inputs: torch.Tensor
    targets: torch.Tensor
    floats: torch.Tensor | None
    count: int


class BlockSamples:
    """The samples on the device that trains, batch by batch, and how far the block's outputs are from their targets."""

    def __init__(self, problem: BlockProblem, device: torch.device, *, has_output_rounding: bool) -> None:
        self._problem, self._device = problem, device
        self._choice = problem.output_choice if has_output_rounding else None
        self._roundings: dict[torch.Size, Quantizer] = {}
        self._can_stack = False

    def find_batching(self, weights: Weights) -> None:
        """Try whether two samples can be computed as one batch."""
        numbers = self._problem.training[:2]
        if len(numbers) < 2:
            return
        first, second = (self._tensor(self._problem.inputs[number]) for number in numbers)
        if first.shape != second.shape or first.dim() < 2:
            return
        alone = [self._problem.network(each, weights)[0] for each in (first, second)]
        try:
            both = self._problem.network(torch.cat([first, second]), weights)[0]
        except RuntimeError:  # a shape of one sample does not fit two
            return
        expected = torch.cat(alone)
        if both.shape == expected.shape and both.dim() >= 2:
            self._can_stack = float((both - expected).norm()) <= _SAME * float(expected.norm())

    def batches(self, numbers: Sequence[int], size: int, *, has_float: bool = False) -> Iterator[Batch]:
        """Up to `size` samples at once."""
        step = size if self._can_stack else 1
        for start in range(0, len(numbers), step):
            some = numbers[start : start + step]
            inputs = [self._problem.inputs[number] for number in some]
            if all(array.shape == inputs[0].shape for array in inputs):
                yield self._batch(some, inputs, has_float)
            else:
                yield from (
                    self._batch([number], [array], has_float) for number, array in zip(some, inputs, strict=True)
                )

    def _batch(self, numbers: Sequence[int], inputs: Sequence[Array], has_float: bool) -> Batch:
        targets = self._stacked([self._problem.outputs[number] for number in numbers])
        floats = self._problem.float_inputs if has_float else None
        mixed = None if floats is None else self._stacked([floats[number] for number in numbers])
        return Batch(self._stacked(inputs), targets, mixed, len(numbers))

    def error(self, inputs: torch.Tensor, targets: torch.Tensor, weights: Weights) -> torch.Tensor:
        """What the output is off, number by number."""
        outputs = self._problem.network(inputs, weights)[0]
        if self._choice is not None:
            outputs = straight_through(outputs, self._rounding(self._choice, outputs.shape))
        return outputs - targets

    def squared(self, numbers: Sequence[int], weights: Weights) -> tuple[float, float, int]:
        """Sums over these samples: of the squared error, of the squared targets, and how many numbers that are."""
        total, power, count = 0.0, 0.0, 0
        for batch in self.batches(numbers, TOGETHER):
            total += float(self.error(batch.inputs, batch.targets, weights).square().sum(dtype=torch.float64))
            power += float(batch.targets.square().sum(dtype=torch.float64))
            count += batch.targets.numel()
        return total, power, count

    def given(self, weights: Weights) -> list[torch.Tensor]:
        """What each layer gives for one sample."""
        inputs = self._tensor(self._problem.inputs[self._problem.training[0]])
        return self._problem.network(inputs, weights)[1]

    def _rounding(self, choice: Choice, shape: torch.Size) -> Quantizer:
        if shape not in self._roundings:
            self._roundings[shape] = quantizer_of(choice, tuple(shape), self._device)
        return self._roundings[shape]

    def _stacked(self, arrays: Sequence[Array]) -> torch.Tensor:
        return self._tensor(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(array, np.float32)).to(self._device)


class Batches:
    """The samples of each iteration: all of them in an order that the seed decides, then again in another."""

    def __init__(self, problem: BlockProblem, samples: BlockSamples, options: FitOptions, device: torch.device) -> None:
        self._numbers, self._samples = problem.training, samples
        self._size = max(1, min(options.batch_rows // ROWS_OF_A_SAMPLE, len(self._numbers)))
        wanted = len(self._numbers) if options.batches <= 0 else self._size * options.batches
        self._wanted = min(wanted, len(self._numbers))
        self._order: list[int] = []
        self._shuffle = np.random.default_rng(options.seed)
        self._drop_ratio = options.drop_ratio if problem.float_inputs is not None else 1.0
        self._chance = torch.Generator(device=device).manual_seed(options.seed)

    def descend(self, leaves: Weights) -> torch.Tensor:
        """Give the leaves the gradient of the mean squared error of the next samples, which is returned."""
        numbers = self._next()
        total = torch.zeros((), device=leaves[0][0].device)
        for batch in self._samples.batches(numbers, self._size, has_float=self._drop_ratio < 1):
            with torch.enable_grad():
                error = self._samples.error(self._mixed(batch), batch.targets, leaves)
                loss = error.square().mean() * (batch.count / len(numbers))
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _next(self) -> list[int]:
        while len(self._order) < self._wanted:
            self._order += [self._numbers[i] for i in self._shuffle.permutation(len(self._numbers))]
        found, self._order = self._order[: self._wanted], self._order[self._wanted :]
        return found

    def _mixed(self, batch: Batch) -> torch.Tensor:
        if batch.floats is None:
            return batch.inputs
        chance = torch.rand(batch.inputs.shape, generator=self._chance, device=batch.inputs.device)
        return torch.where(chance < self._drop_ratio, batch.inputs, batch.floats)
