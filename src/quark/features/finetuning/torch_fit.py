"""Fit one layer by torch, on any device, whatever is behind its outputs."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from quark.features.finetuning.descent import TorchDescent, descent
from quark.features.finetuning.learned_weights import LearnedWeights, RoundedWeights, TrainedWeights
from quark.features.finetuning.objectives import GramObjective, Objective, RowObjective, Tensors
from quark.features.finetuning.options import Algorithm, FitOptions
from quark.features.finetuning.problem import Fitted, Part, Problem, WeightLayout
from quark.features.finetuning.quantizers import quantizer_of, rounding_change, tensor_of
from quark.features.finetuning.replay import REPLAYED_ON, Replay
from quark.features.finetuning.training import (
    BIAS_SHARE,
    LEAST_GAIN,
    UNDECIDED,
    are_outputs_separate,
    learning_rate,
    neighbours,
    parts_of,
    side_by_side,
    train,
)
from quark.plan import BlockChoice
from quark.text import get_logger

_LOG = get_logger(__name__)

LITTLE_WORK = 1 << 25  # products of an iteration
PART_WORK = 1 << 22  # products of an iteration of a part; below, threads would wait for Python's lock
SMALLEST_PART = 48  # outputs; products of narrower matrices are slow
MOST_PARTS = 8


def fit_by_torch(problem: Problem, options: FitOptions) -> Fitted:
    """Find the weights that come closest to the targets; None if those that are there are better."""
    with torch.no_grad(), threads_kept():
        return _Fit(problem, options).run()


@contextlib.contextmanager
def threads_kept() -> Iterator[None]:
    """Restore torch's number of threads afterwards. If an iteration is little work, one thread is faster: threads would
    spend their time waiting for each other, the more so if other programs use the processors too."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Best:
    """The best weights that were seen on held-out rows, output by output; at first those that stood there."""

    def __init__(self, errors: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, is_separate: bool) -> None:
        self.errors, self.weight, self.bias = errors, weight.clone(), bias.clone()
        self._is_separate = is_separate
        self.is_first = True

    def take(self, errors: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
        """Keep what is better."""
        is_less = errors < self.errors if self._is_separate else (errors.sum() < self.errors.sum()).expand_as(errors)
        if not bool(is_less.any()):
            return
        self.errors = torch.where(is_less, errors, self.errors)
        self.weight = torch.where(is_less.unsqueeze(-1), weight, self.weight)
        self.bias = torch.where(is_less, bias, self.bias)
        self.is_first = False

    @property
    def total(self) -> float:
        return float(self.errors.sum())


class _Fit:
    """The layer as a whole. Its parts are fitted side by side, without waiting for each other between two looks."""

    def __init__(self, problem: Problem, options: FitOptions) -> None:
        self.problem, self.options, self.layout = problem, options, problem.layout
        device = torch.device(options.device)
        joined = [problem.bias_choice, problem.output_choice if options.has_output_rounding else None]
        self.is_separate = are_outputs_separate(problem.layout, problem.weight_choice) and not any(
            isinstance(choice, BlockChoice) for choice in joined
        )
        is_mixed = options.drop_ratio < 1 and problem.training.float is not None
        # a random choice of inputs is the same for all outputs, and rounding may join them
        can_split = self.is_separate and not is_mixed and not options.has_output_rounding and self.layout.can_narrow
        is_on_cpu = device.type == "cpu"
        # the sizes of the layer alone decide, so that the result is the same on any number of processors
        work = options.batch_rows * math.prod(self.layout.matrices) // PART_WORK
        parts = parts_of(self.layout.matrices, work, SMALLEST_PART, MOST_PARTS)
        self._parts = parts if can_split and is_on_cpu else [Part()]
        if is_on_cpu and (len(self._parts) > 1 or options.batch_rows * math.prod(self.layout.matrices) < LITTLE_WORK):
            torch.set_num_threads(1)
        groups, outputs, length = self.layout.matrices
        self.training, self.held_out = (
            Tensors(problem, rows, device, options.has_output_rounding) for rows in (problem.training, problem.held_out)
        )
        self.weight = tensor_of(problem.weight, device)
        self.start = self.weight if problem.start is None else tensor_of(problem.start, device)
        bias = np.zeros(groups * outputs, np.float32) if problem.bias is None else problem.bias
        self.bias = tensor_of(bias, device).reshape(groups, outputs)
        self.quantizer = quantizer_of(problem.weight_choice, tuple(problem.weight.shape), device)
        self.bias_quantizer = None
        if problem.bias_choice is not None:
            self.bias_quantizer = quantizer_of(problem.bias_choice, tuple(bias.shape), device)
        self.has_bias = options.has_bias and problem.can_train_bias and problem.bias is not None
        self.gram: GramObjective | None = None
        rows = options.batch_rows * max(1, options.batches)
        if self.training.is_linear and not is_mixed and (length < 2 * rows or options.batches < 0):
            matrices = self.layout.to_matrices(self.start).contiguous()
            self.gram = GramObjective(self.training, matrices, self.bias)

    @functools.cached_property
    def neighbours(self) -> tuple[torch.Tensor, ...]:
        """The two numbers that each weight can be rounded to, as matrices."""
        pair = neighbours(self.start.cpu().numpy(), self.problem.weight_choice)
        return tuple(self.layout.to_matrices(tensor_of(array, self.start.device)) for array in pair)

    def run(self) -> Fitted:
        with side_by_side(len(self._parts)) as side:

            def each_of(function: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
                return side(functools.partial(_quietly, function) if len(parts) > 1 else function, parts)

            parts = each_of(lambda part: _PartFit(self, part), self._parts)
            power = self.held_out.power() or 1.0
            before = sum(part.best.total for part in parts) / power
            rate = learning_rate(self.options, before, lambda: rounding_change(self.start, self.quantizer))
            if not self.options.iterations or not math.isfinite(before):
                return Fitted(None, None, before, before, 0, rate, "" if math.isfinite(before) else "is not finite")
            spread = float(self.training.targets.square().mean().sqrt())
            bias_rate = rate if self.options.algorithm is Algorithm.ADAQUANT else BIAS_SHARE * (spread or 1.0)
            if self.options.algorithm is Algorithm.ADAROUND:
                _ = self.neighbours  # before parts want them at the same time
            each_of(lambda part: part.begin((rate, bias_rate)), parts)

            def look() -> bool:
                before = sum(part.best.total for part in parts)
                each_of(_PartFit.look, parts)
                return bool(sum(part.best.total for part in parts) < before * (1 - LEAST_GAIN))

            def advance(start: int, end: int) -> None:
                each_of(lambda part: part.advance(start, end), parts)

            def is_decided() -> bool:
                return bool(sum(part.undecided for part in parts) < UNDECIDED * self.weight.numel())

            is_adaquant = self.options.algorithm is Algorithm.ADAQUANT
            iterations = train(self.options, advance, look, None if is_adaquant else is_decided)
        return self._result(parts, before, sum(part.best.total for part in parts) / power, iterations, rate)

    def _result(self, parts: Sequence[_PartFit], before: float, after: float, iterations: int, rate: float) -> Fitted:
        if all(part.best.is_first for part in parts):
            return Fitted(None, None, before, after, iterations, rate)
        weight, bias = self.layout.to_matrices(self.weight).clone(), self.bias.clone()
        for part in parts:
            weight[part.part.groups, part.part.outputs] = part.best.weight
            bias[part.part.groups, part.part.outputs] = part.best.bias
        flat_bias = bias.reshape(-1).cpu().numpy() if self.has_bias else None
        return Fitted(self.layout.from_matrices(weight).cpu().numpy(), flat_bias, before, after, iterations, rate)


def _quietly(function: Callable[[Any], Any], part: Any) -> Any:
    """torch keeps its number of threads, and whether there are gradients, for each thread."""
    torch.set_num_threads(1)
    with torch.no_grad():
        return function(part)


class _PartFit:
    """Some outputs of the layer, as matrices."""

    def __init__(self, whole: _Fit, part: Part) -> None:
        self._whole, self.part = whole, part
        is_whole = part == Part()
        layout = whole.layout
        self._training, self._held_out = (
            rows if is_whole else rows.part(part) for rows in (whole.training, whole.held_out)
        )
        standing, self._start = (part.of(layout.to_matrices(weight)) for weight in (whole.weight, whole.start))
        self._bias: torch.Tensor = part.of(whole.bias).clone()
        self._quantizer = whole.quantizer.part(layout, part)
        lines = WeightLayout((whole.bias.numel(),), tuple(whole.bias.shape), (0, 1))
        quantizer = whole.bias_quantizer
        self._bias_quantizer = None if quantizer is None else quantizer.part(lines, part)
        errors = self._errors(self._quantizer.values(standing))
        self.best = _Best(errors, standing, self._bias, whole.is_separate)

    def begin(self, rates: tuple[float, float]) -> None:
        """Set up what training needs."""
        options, whole = self._whole.options, self._whole
        self._state: LearnedWeights
        if options.algorithm is Algorithm.ADAQUANT:
            self._state = TrainedWeights(self._start, self._quantizer)
        else:
            # the mean squared error of each output that rounding to the nearest leaves in the training rows: what
            # AdaRound's regularization is weighed against
            nearest = self._quantizer.values(self._start)
            loudness = self._training.output_errors(nearest, self._bias).float().unsqueeze(-1)
            lower, upper = (self.part.of(neighbour) for neighbour in whole.neighbours)
            self._state = RoundedWeights(self._start, lower, upper, loudness, options)
        self._descent = descent(self._state, self._bias if whole.has_bias else None, rates)
        self._objective: Objective
        if whole.gram is not None:
            self._objective = whole.gram.part(self.part)
        else:
            settings = (options.batch_rows, options.batches, options.drop_ratio, options.seed)
            self._objective = RowObjective(self._training, *settings)
        is_replayed = self._start.device.type in REPLAYED_ON and self._objective.can_replay
        # the loss is logged from ordinary iterations
        self._replay = Replay(self._iterate) if is_replayed and not _LOG.isEnabledFor(logging.DEBUG) else None

    def advance(self, start: int, end: int) -> None:
        """Train from one iteration up to another."""
        options = self._whole.options
        if self._replay is not None:
            assert isinstance(self._descent, TorchDescent)
            for iteration in range(start, end):
                self._objective.place(iteration)
                self._descent.pace(iteration / options.iterations)
                self._replay.run(self._descent.is_regularized)
            return
        has_log = _LOG.isEnabledFor(logging.DEBUG)
        for iteration in range(start, end):
            has_loss = has_log and (iteration + 1) % options.log_period == 0
            gradient = self._objective.gradient(iteration, self._descent.soft(), self._rounded_bias, has_loss=has_loss)
            if gradient.loss is not None:
                _LOG.debug("%s: iteration %d, loss %.6g", self._whole.problem.name, iteration + 1, float(gradient.loss))
            self._descent.step(gradient.weight, gradient.bias, iteration / options.iterations)

    def _iterate(self) -> None:
        """An iteration with the rows and the pace that were set."""
        assert isinstance(self._descent, TorchDescent)
        gradient = self._objective.gradient(None, self._descent.soft(), self._rounded_bias)
        self._descent.move(gradient.weight, gradient.bias)

    def look(self) -> None:
        """Keep what is better on held-out rows."""
        self.best.take(self._errors(self._state.rounded()), self._state.hard(), self._bias)

    @property
    def undecided(self) -> int:
        return self._state.undecided()

    @property
    def _rounded_bias(self) -> torch.Tensor:
        if self._bias_quantizer is None:
            return self._bias
        rounded: torch.Tensor = self._bias_quantizer.values(self._bias.unsqueeze(-1)).squeeze(-1)
        return rounded

    def _errors(self, weight: torch.Tensor) -> torch.Tensor:
        return self._held_out.output_errors(weight, self._rounded_bias)
