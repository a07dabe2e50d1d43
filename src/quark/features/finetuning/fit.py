"""Fit one layer, and take the result back if it is not better.

The error of rows that training does not see is looked at now and then (AdaRound: at the end, when its weights are
decided), and what was best there is kept: for each output of the layer by itself, since its weights are its own. An
output that never beats the weights as they stood, rounded to the nearest, stays as it was; a layer without any that
did is rolled back. A sum over all outputs would let the loud ones hide what becomes of the quiet ones.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from quark.features.finetuning.descent import descent
from quark.features.finetuning.learned_weights import (
    UNDECIDED,
    LearnedWeights,
    RoundedWeights,
    TrainedWeights,
    learning_rate,
)
from quark.features.finetuning.objectives import GramObjective, Objective, RowObjective, Tensors
from quark.features.finetuning.options import Algorithm, FitOptions
from quark.features.finetuning.problem import Fitted, Part, Problem, WeightLayout
from quark.features.finetuning.quantizers import neighbours, quantizer_of, tensor_of
from quark.formats.native import instruction_set
from quark.onnx.calibrate.runner import processor_count
from quark.plan import BlockChoice, Choice
from quark.text import get_logger

_LOG = get_logger(__name__)

LITTLE_WORK = 1 << 25  # products of an iteration
PART_WORK = 1 << 22  # products of an iteration of a part; below, threads would wait for Python's lock
SMALLEST_PART = 48  # outputs; products of narrower matrices are slow
MOST_PARTS = 8
LOOKS = 20  # how often held-out rows are looked at
LEAST_GAIN = 1e-4  # what counts as an improvement
PATIENCE = 5  # looks without an improvement, after which training stops early
BIAS_SHARE = 1e-3  # AdaRound's learning rate of the bias, relative to the outputs' RMS


def fit(problem: Problem, options: FitOptions) -> Fitted:
    """Find the weights that come closest to the targets; None if those that are there are better."""
    if not len(problem.training) or not len(problem.held_out):
        return Fitted(None, None, 0.0, 0.0, 0, 0.0, "has too few rows")
    with torch.no_grad(), threads_kept():
        return _Fit(problem, options).run()


def arithmetic() -> str:
    """What the bytes of a result depend on beside the problem."""
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {instruction_set()} instructions"


@contextlib.contextmanager
def threads_kept() -> Iterator[None]:
    """Restore torch's number of threads afterwards. If an iteration is little work, one thread is faster: threads would
    spend their time waiting for each other, the more so if other programs use the processors too."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(
    options: FitOptions,
    advance: Callable[[int, int], None],
    look: Callable[[], bool],
    is_decided: Callable[[], bool] | None,
) -> int:
    """Call `advance` for one span of iterations after the other, from a number up to another; returns how many there
    were in all.

    `look` compares with the best so far, and returns whether it got better: now and then or, with `is_decided`, at the
    end. With early stopping, training ends when it gets no better any more, or when `is_decided` returns True.
    """
    has_stops = is_decided is None or options.has_early_stop
    period, idle, done = max(1, options.iterations // LOOKS) if has_stops else options.iterations, 0, 0
    while done < options.iterations:
        start, done = done, min(done + period, options.iterations)
        advance(start, done)
        if is_decided is None:
            idle = 0 if look() else idle + 1
            if options.has_early_stop and idle >= PATIENCE:
                return done
        elif options.has_early_stop and is_decided():
            break
    if is_decided is not None:
        look()
    return done


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
            isinstance(each, BlockChoice) for each in joined
        )
        is_mixed = options.drop_ratio < 1 and problem.training.float is not None
        # a choice of inputs at random is the same for all outputs, and rounding may join them
        can_split = self.is_separate and not is_mixed and not options.has_output_rounding and self.layout.can_narrow
        is_on_cpu = device.type == "cpu"
        self._parts = parts_of(self.layout.matrices, options.batch_rows) if can_split and is_on_cpu else [Part()]
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
        return tuple(self.layout.to_matrices(tensor_of(each, self.start.device)) for each in pair)

    def run(self) -> Fitted:
        with side_by_side(len(self._parts)) as each_of:
            parts = each_of(lambda part: _PartFit(self, part), self._parts)
            power = self.held_out.power() or 1.0
            before = sum(part.best.total for part in parts) / power
            rate = learning_rate(self.options, before, self.start, self.quantizer)
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
        found = bias.reshape(-1).cpu().numpy() if self.has_bias else None
        return Fitted(self.layout.from_matrices(weight).cpu().numpy(), found, before, after, iterations, rate)


class _PartFit:
    """Some outputs of the layer, as matrices."""

    def __init__(self, whole: _Fit, part: Part) -> None:
        self._whole, self.part = whole, part
        is_whole = part == Part()
        layout = whole.layout
        self._training, self._held_out = (
            each if is_whole else each.part(part) for each in (whole.training, whole.held_out)
        )
        standing, self._start = (part.of(layout.to_matrices(each)) for each in (whole.weight, whole.start))
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
            lower, upper = (self.part.of(each) for each in whole.neighbours)
            self._state = RoundedWeights(self._start, lower, upper, loudness, options)
        self._descent = descent(self._state, self._bias if whole.has_bias else None, rates)
        self._objective: Objective
        if whole.gram is not None:
            self._objective = whole.gram.part(self.part)
        else:
            settings = (options.batch_rows, options.batches, options.drop_ratio, options.seed)
            self._objective = RowObjective(self._training, *settings)

    def advance(self, start: int, end: int) -> None:
        """Train from one iteration up to another."""
        options = self._whole.options
        has_log = _LOG.isEnabledFor(logging.DEBUG)
        for iteration in range(start, end):
            has_loss = has_log and (iteration + 1) % options.log_period == 0
            found = self._objective.gradient(iteration, self._descent.soft(), self._rounded_bias, has_loss=has_loss)
            if found.loss is not None:
                _LOG.debug("%s: iteration %d, loss %.6g", self._whole.problem.name, iteration + 1, float(found.loss))
            self._descent.step(found.weight, found.bias, iteration / options.iterations)

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


def parts_of(matrices: tuple[int, int, int], batch_rows: int) -> list[Part]:
    """Cut the outputs of a layer into parts of so much work that threads are worth it: 1, 2, 4 or 8. The sizes of the
    layer alone decide, so that the result is the same on any number of processors."""
    groups, outputs, _ = matrices
    length = groups if groups > 1 else outputs
    most = min(batch_rows * math.prod(matrices) // PART_WORK, length // SMALLEST_PART, MOST_PARTS)
    count = 1 << max(0, most.bit_length() - 1)
    spans = [slice(length * i // count, length * (i + 1) // count) for i in range(count)]
    if count == 1:
        return [Part()]
    return [Part(groups=span) if groups > 1 else Part(outputs=span) for span in spans]


@contextlib.contextmanager
def side_by_side(count: int) -> Iterator[Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]]:
    """A function that calls another for each of `count` parts, and waits for all of them. Each part has a thread, up to
    the number of processors. They share nothing, so that a thread that the system holds up holds up no other."""
    if count == 1:
        yield lambda function, parts: [function(part) for part in parts]
        return

    def quietly(function: Callable[[Any], Any], part: Any) -> Any:
        torch.set_num_threads(1)  # torch keeps this, and whether there are gradients, for each thread
        with torch.no_grad():
            return function(part)

    with ThreadPoolExecutor(min(count, processor_count())) as pool:
        yield lambda function, parts: list(pool.map(functools.partial(quietly, function), parts))


def are_outputs_separate(layout: WeightLayout, choice: Choice) -> bool:
    """True if no two outputs share a block or a scale that follows the weights, so that the weights of one can change
    without the others."""
    if not isinstance(choice, BlockChoice):
        return True
    if choice.quantizer.format.has_tensor_scale and choice.quantizer.tensor_scale is None:
        return False
    groups, outputs, _ = layout.matrices
    owner = np.broadcast_to(np.arange(groups * outputs).reshape(groups, outputs, 1), layout.matrices)
    owners = layout.from_matrices(np.ascontiguousarray(owner))
    axis = choice.axis if owners.ndim > 1 else 0
    return bool((owners == np.take(owners, [0], axis)).all())
