"""Fit one layer on the processor by compiled code (csrc/formats/row_training.h).

Whole spans of iterations run without Python, on one thread for each part of the layer. Matrices have one column for
each output, [groups, k, outputs]; in a layer with one output for each group, such as a depthwise convolution, all
groups are columns of one matrix, [1, k, groups].

Weights that are rounded to integers, or to one of two neighbours, are rounded by the compiled code. Others, of blocks
and small floats, are rounded in between, one iteration after the other.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quark.features.finetuning.options import Algorithm, FitOptions
from quark.features.finetuning.problem import Array, Bounds, Fitted, Part, Problem, Rows, WeightLayout
from quark.features.finetuning.training import (
    BIAS_SHARE,
    LEAST_GAIN,
    MEAN_DECAY,
    SHIFT,
    SQUARE_DECAY,
    STRETCH,
    UNDECIDED,
    affine_numbers,
    are_outputs_separate,
    batch_starts,
    beta,
    fading,
    learning_rate,
    neighbours,
    parts_of,
    side_by_side,
    train,
)
from quark.formats.native import ROW_ITERATION, NativeFinetuning, RowTraining, StepKind, WeightStep, native_finetuning
from quark.onnx.calibrate.runner import processor_count
from quark.plan import AffineChoice, BlockChoice, Choice, FloatChoice
from quark.rounded import rounded
from quark.text import get_logger

_LOG = get_logger(__name__)

PART_WORK = 1 << 19  # products of an iteration of a part
OWN_PART_WORK = 1 << 16  # the same where columns have inputs of their own, which take long to read
SMALLEST_PART = 32  # outputs: two vectors
LOUDNESS_ROWS = 2048  # rows that say how much error an output has: they are shuffled
LONGEST_CALL = 1 << 34  # products without Python: a fraction of a second, so that a run can be interrupted
CHUNK = 256  # rows whose errors are computed together
_FLOATS = np.dtype(np.float32).itemsize


def is_compiled(problem: Problem, options: FitOptions) -> bool:
    """True if the compiled code is there and can fit the layer."""
    is_mixed = options.drop_ratio < 1 and problem.training.float is not None
    is_rounded = options.has_output_rounding and problem.output_choice is not None
    is_bounded = problem.activation is None or isinstance(problem.activation, Bounds)
    is_here = options.device == "cpu" and native_finetuning() is not None
    return is_here and is_bounded and not is_mixed and not is_rounded


def fit_compiled(problem: Problem, options: FitOptions) -> Fitted:
    """Find the weights that come closest to the targets; None if those that are there are better."""
    native = native_finetuning()
    assert native is not None
    return _Fit(native, problem, options).run()


@dataclass(frozen=True)
class _Columns:
    """The columns of a layer's matrices [groups, outputs, k]."""

    layout: WeightLayout
    are_groups: bool  # each column is a group, with inputs of its own

    def of(self, tensor: Array) -> Array:
        """A tensor of the model as a copy [groups, k, outputs]."""
        matrices = self.layout.to_matrices(np.asarray(tensor, np.float32))
        columns: Array = matrices.transpose(1, 2, 0) if self.are_groups else matrices.transpose(0, 2, 1)
        return np.array(columns, order="C")

    def tensor(self, columns: Array) -> Array:
        """The tensor of the model."""
        matrices = columns.transpose(2, 0, 1) if self.are_groups else columns.transpose(0, 2, 1)
        tensor: Array = self.layout.from_matrices(np.ascontiguousarray(matrices))
        return tensor

    def lines(self, numbers: Array | float) -> Array:
        """One number for each output, [groups, outputs]."""
        groups, outputs, _ = self.layout.matrices
        flat = np.broadcast_to(np.asarray(numbers, np.float32).reshape(-1), (groups * outputs,))
        lines: Array = flat.reshape((1, groups) if self.are_groups else (groups, outputs)).copy()
        return lines

    def span(self, part: Part) -> tuple[int, slice]:
        """The axis and the columns of a part, of arrays [groups, ..., outputs]."""
        return (0, part.groups) if not self.are_groups and part.groups != slice(None) else (-1, self._columns(part))

    def _columns(self, part: Part) -> slice:
        return part.groups if self.are_groups else part.outputs


class _Rows:
    """Rows in the memory order of the compiled code: inputs are [groups, rows, k], or [1, rows, k, groups] where each
    column has its own, and targets, before the bounds, [groups, rows, outputs]."""

    def __init__(self, problem: Problem, rows: Rows, columns: _Columns) -> None:
        self.count = len(rows)
        groups, outputs, _ = problem.layout.matrices
        order = (0, 2, 1) if columns.are_groups else (1, 0, 2)
        inputs = np.ascontiguousarray(np.asarray(rows.quantized).transpose(order), np.float32)
        self.inputs = inputs[None] if columns.are_groups else inputs
        targets = np.asarray(rows.targets, np.float32)
        if columns.are_groups or groups == 1:
            self.targets = np.ascontiguousarray(targets)[None]
        else:
            self.targets = np.ascontiguousarray(targets.reshape(self.count, groups, outputs).transpose(1, 0, 2))
        self.bounds: tuple[Array, Array] | None = None
        if isinstance(problem.activation, Bounds):
            low, high = (columns.lines(bound) for bound in (problem.activation.lowest, problem.activation.highest))
            self.bounds = low, high

    def part(self, axis: int, span: slice) -> _Rows:
        """The same rows for some of the columns, in the same memory."""
        other = object.__new__(_Rows)
        other.count = self.count
        has_own = self.inputs.ndim == 4
        other.inputs = _taken(self.inputs, axis, span) if has_own or axis == 0 else self.inputs
        other.targets = _taken(self.targets, axis, span)
        other.bounds = None
        if self.bounds is not None:
            low, high = (np.ascontiguousarray(_taken(bound, axis, span)) for bound in self.bounds)
            other.bounds = low, high
        return other

    def power(self) -> float:
        """The mean over rows of the squared targets behind the bounds, summed over outputs."""
        total = 0.0
        for start in range(0, self.count, CHUNK):
            targets = self.targets[:, start : start + CHUNK]
            if self.bounds is not None:
                targets = np.minimum(np.maximum(targets, self.bounds[0][:, None]), self.bounds[1][:, None])
            total += float(np.einsum("gro,gro->", targets, targets))  # few numbers, so a float32 sum is exact enough
        return total / max(1, self.count)


def _taken(array: Array, axis: int, span: slice) -> Array:
    return array[span] if axis == 0 else array[..., span]


class _Rounding:
    """The rounding of numbers; `numbers` are scale, lowest and highest level if the compiled code supports it."""

    def __init__(self, choice: Choice, columns: _Columns) -> None:
        self._choice, self._columns = choice, columns
        self.numbers: tuple[Array, ...] | None = None
        if isinstance(choice, AffineChoice):
            shape = columns.layout.shape
            self.numbers = tuple(columns.of(np.broadcast_to(number, shape)) for number in affine_numbers(choice, shape))

    @property
    def can_narrow(self) -> bool:
        """True if columns can be rounded without the others."""
        return not isinstance(self._choice, FloatChoice) or self._choice.axis is None

    def part(self, part: Part) -> _Rounding:
        """The rounding of some columns."""
        other = object.__new__(_Rounding)
        other._choice, other.numbers = self._choice, None
        other._columns = replace(self._columns, layout=self._columns.layout.narrowed(part))
        if self.numbers is not None:
            span = self._columns.span(part)
            other.numbers = tuple(np.ascontiguousarray(_taken(number, *span)) for number in self.numbers)
        return other

    def values(self, x: Array) -> Array:
        """The numbers that the quantized network computes with."""
        if self.numbers is None:
            return self._columns.of(rounded(self._columns.tensor(x), self._choice))
        scale, lowest, highest = self.numbers
        levels = np.rint(x / scale)
        values: Array = np.minimum(np.maximum(levels, lowest), highest) * scale
        return values


class _Best:
    """The best weights that were seen on held-out rows, output by output; at first those that stood there."""

    def __init__(self, errors: Array, weight: Array, bias: Array, is_separate: bool) -> None:
        self.errors, self.weight, self.bias = errors, weight.copy(), bias.copy()
        self._is_separate = is_separate
        self.is_first = True

    def take(self, errors: Array, weight: Array, bias: Array) -> None:
        """Keep what is better."""
        is_less = errors < self.errors if self._is_separate else np.full(errors.shape, errors.sum() < self.errors.sum())
        if not is_less.any():
            return
        self.errors = np.where(is_less, errors, self.errors)
        self.weight = np.where(is_less[:, None], weight, self.weight)
        self.bias = np.where(is_less, bias, self.bias)
        self.is_first = False


class _Fit:
    """The layer as a whole. Its parts are fitted side by side, without waiting for each other between two looks."""

    def __init__(self, native: NativeFinetuning, problem: Problem, options: FitOptions) -> None:
        self.native, self.problem, self.options = native, problem, options
        groups, outputs, length = problem.layout.matrices
        seen = options.batch_rows * max(1, options.batches)
        has_gram = problem.activation is None and (length < 2 * seen or options.batches < 0)
        self.columns = _Columns(problem.layout, are_groups=outputs == 1 and groups > 1 and not has_gram)
        self.training, self.held_out = (
            _Rows(problem, rows, self.columns) for rows in (problem.training, problem.held_out)
        )
        self.weight = self.columns.of(problem.weight)
        self.start = self.weight if problem.start is None else self.columns.of(problem.start)
        self.bias = self.columns.lines(0.0 if problem.bias is None else problem.bias)
        self.rounding = _Rounding(problem.weight_choice, self.columns)
        groups, outputs, length = problem.layout.matrices
        lines = WeightLayout((groups * outputs,), (groups, outputs), (0, 1))
        self.bias_rounding = None
        if problem.bias_choice is not None:
            self.bias_rounding = _Rounding(problem.bias_choice, replace(self.columns, layout=lines))
        self.has_bias = options.has_bias and problem.can_train_bias and problem.bias is not None
        is_separate = are_outputs_separate(problem.layout, problem.weight_choice)
        self.is_separate = is_separate and not isinstance(problem.bias_choice, BlockChoice)
        roundings = [rounding for rounding in (self.rounding, self.bias_rounding) if rounding is not None]
        can_split = (
            self.is_separate and problem.layout.can_narrow and all(rounding.can_narrow for rounding in roundings)
        )
        # every number comes from the same sums in any parts, so that they may follow the processors
        products = options.batch_rows * math.prod(problem.layout.matrices)
        work = products // (OWN_PART_WORK if self.columns.are_groups else PART_WORK)
        parts = parts_of(problem.layout.matrices, work, SMALLEST_PART, processor_count())
        self._parts = parts if can_split else [Part()]
        self.batch_rows = min(options.batch_rows, self.training.count)
        is_all = options.batches < 1
        self.batches = -(-self.training.count // self.batch_rows) if is_all else options.batches
        self.seen = self.training.count if is_all else self.batch_rows * self.batches  # rows of an iteration
        self.gram = self._gram() if has_gram else None

    def _gram(self) -> tuple[Array, Array, Array]:
        """The Gram matrix of all rows, weights and bias where they stand, and what their error has in common with the
        inputs. The bias is one more input, of ones."""
        groups, length, _ = self.start.shape
        gram = np.zeros((groups, length + 1, length + 1), np.float32)
        of_weights, of_bias = np.zeros_like(self.start), np.zeros_like(self.bias)
        training = self.described(self.training, self.start, self.bias)
        count = self.training.count
        self.native.gram(training.fields, count, gram.ctypes.data)
        self.native.gradient(training.fields, count, of_weights.ctypes.data, of_bias.ctypes.data)
        origin = np.concatenate([self.start, self.bias[:, None]], 1)
        cross = -np.concatenate([of_weights, of_bias[:, None]], 1)
        return gram / np.float32(count), origin, cross / np.float32(count)

    def described(self, rows: _Rows, weights: Array, bias: Array) -> _Described:
        """Rows with weights and bias for the compiled code, which adds the bias as it is."""
        groups, length, outputs = weights.shape
        return _Described(
            self.native,
            {"inputs": rows.inputs, "targets": rows.targets, "bias": bias},
            WeightStep(kind=StepKind.PLAIN, weights=weights.ctypes.data),
            rows.bounds,
            groups=groups,
            length=length,
            outputs=outputs,
            rows=min(CHUNK, rows.count),
            count=rows.count,
            batches=1,
            has_own_inputs=rows.inputs.ndim == 4,
        )

    def run(self) -> Fitted:
        options = self.options
        with side_by_side(len(self._parts)) as each_of:
            parts = each_of(lambda part: _PartFit(self, part), self._parts)
            power = self.held_out.power() or 1.0
            before = self._total(parts) / power
            rate = learning_rate(options, before, self._change)
            if not options.iterations or not math.isfinite(before):
                return Fitted(None, None, before, before, 0, rate, "" if math.isfinite(before) else "is not finite")
            spread = math.sqrt(self.training.power() / max(1, self.bias.size))
            is_adaquant = options.algorithm is Algorithm.ADAQUANT
            self.rates = rate, rate if is_adaquant else BIAS_SHARE * (spread or 1.0)
            if not is_adaquant:
                pair = neighbours(self.columns.tensor(self.start), self.problem.weight_choice)
                self.neighbours = tuple(self.columns.of(array) for array in pair)
            each_of(_PartFit.begin, parts)

            def look() -> bool:
                before = self._total(parts)
                each_of(_PartFit.look, parts)
                return self._total(parts) < before * (1 - LEAST_GAIN)

            def advance(start: int, end: int) -> None:
                schedule = self._schedule(range(start, end))
                each_of(lambda part: part.advance(start, *schedule), parts)

            def is_decided() -> bool:
                return bool(sum(part.undecided for part in parts) < UNDECIDED * self.weight.size)

            iterations = train(options, advance, look, None if is_adaquant else is_decided)
        return self._result(parts, before, self._total(parts) / power, iterations, rate)

    def _total(self, parts: Sequence[_PartFit]) -> float:
        """The error of all outputs, added up in an order that does not depend on the parts."""
        return float(np.concatenate([part.best.errors for part in parts], parts[0].span[0]).sum())

    def _change(self) -> float:
        """The RMS of what rounding to the nearest does to the weights."""
        change = self.rounding.values(self.start) - self.start
        return math.sqrt(float(np.square(change, dtype=np.float64).mean()))

    def _schedule(self, span: range) -> tuple[Array, Array]:
        """The parameters of each iteration for the compiled code, and the first rows of its batches."""
        options, numbers = self.options, []
        for iteration in span:
            progress = iteration / options.iterations
            factor = fading(options.algorithm, progress) / (1 - MEAN_DECAY ** (iteration + 1))
            power = beta(options, progress) if options.algorithm is Algorithm.ADAROUND else None
            regularization = -1.0, 0.0
            if power is not None:
                regularization = power - 1, 2 * options.regularization * power
            root = math.sqrt(1 - SQUARE_DECAY ** (iteration + 1))
            numbers.append((self.rates[0] * factor, self.rates[1] * factor, root, *regularization))
        starts = batch_starts(span, options.batches, self.batch_rows, self.training.count)
        return np.array(numbers, np.float32).reshape(-1, len(ROW_ITERATION)), np.array(starts, np.int64)

    def _result(self, parts: Sequence[_PartFit], before: float, after: float, iterations: int, rate: float) -> Fitted:
        if all(part.best.is_first for part in parts):
            return Fitted(None, None, before, after, iterations, rate)
        weight, bias = self.weight, self.bias
        for part in parts:
            _taken(weight, *part.span)[...] = part.best.weight
            _taken(bias, *part.span)[...] = part.best.bias
        flat_bias = bias.reshape(-1) if self.has_bias else None
        return Fitted(self.columns.tensor(weight), flat_bias, before, after, iterations, rate)


class _Described:
    """A RowTraining with the arrays that its addresses are of."""

    def __init__(
        self,
        native: NativeFinetuning,
        arrays: dict[str, Array],
        weights: WeightStep,
        bounds: tuple[Array, Array] | None,
        **sizes: Any,
    ) -> None:
        inputs, targets = arrays["inputs"], arrays.get("targets")
        if bounds is not None:
            arrays |= {"lowest": bounds[0], "highest": bounds[1]}
        self.fields = RowTraining(
            **sizes,
            input_group=inputs.strides[0] // _FLOATS,
            input_row=inputs.strides[1] // _FLOATS,
            input_column=inputs.strides[2] // _FLOATS,
            target_group=0 if targets is None else targets.strides[0] // _FLOATS,
            target_row=0 if targets is None else targets.strides[1] // _FLOATS,
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        self.fields.weights = weights
        workspace = np.empty(native.workspace(self.fields), np.float32)
        self.fields.workspace = workspace.ctypes.data
        self._held = [*arrays.values(), workspace]


class _PartFit:
    """Some columns of the layer."""

    def __init__(self, whole: _Fit, part: Part) -> None:
        self._whole = whole
        self.span = whole.columns.span(part)
        is_whole = part == Part()
        self._training, self._held_out = (
            rows if is_whole else rows.part(*self.span) for rows in (whole.training, whole.held_out)
        )
        self._start, standing, self._bias = (self._own(array) for array in (whole.start, whole.weight, whole.bias))
        self._rounding = whole.rounding if is_whole else whole.rounding.part(part)
        rounding = whole.bias_rounding
        self._bias_rounding = rounding if rounding is None or is_whole else rounding.part(part)
        errors = self._errors(self._held_out, self._rounding.values(standing), self._rounded_bias())
        self.best = _Best(errors, standing, self._bias, whole.is_separate)

    def _own(self, array: Array) -> Array:
        return np.array(_taken(array, *self.span), order="C")

    def begin(self) -> None:
        """Set up what training needs."""
        whole, start = self._whole, self._start
        if whole.options.algorithm is Algorithm.ADAQUANT:
            self._parameter = start.copy()
            self._weights = self._rounding.values(start)
            numbers = self._rounding.numbers or ()
            kind = StepKind.AFFINE if numbers else StepKind.PLAIN
        else:
            lower, self._upper = (self._own(neighbour) for neighbour in whole.neighbours)
            self._lower, self._width = lower, self._upper - lower
            # the mean squared error of each output that rounding to the nearest leaves in training rows: what
            # AdaRound's regularization is weighed against
            nearest = self._rounding.values(start)
            loudness = self._errors(self._training, nearest, self._bias, LOUDNESS_ROWS)[:, None]
            sharpness = self._width / np.maximum(loudness, 1e-30)
            sharpness = np.minimum(sharpness, np.finfo(np.float32).max).astype(np.float32)
            is_choice = self._width > 0
            distance = np.where(is_choice, start - lower, np.float32(0.5))
            share = (distance / np.where(is_choice, self._width, np.float32(1))).clip(0, 1)
            sigmoid = ((share - np.float32(SHIFT)) / np.float32(STRETCH)).clip(1e-6, 1 - 1e-6)
            self._parameter = np.log(sigmoid / (1 - sigmoid))
            self._weights = lower + self._share() * self._width
            numbers, kind = (lower, self._width, sharpness), StepKind.ADAROUND
        self._is_rounded_between = kind is StepKind.PLAIN
        self._training_of = self._described(kind, numbers)

    def _described(self, kind: StepKind, numbers: Sequence[Array]) -> _Described:
        whole, rounding = self._whole, self._bias_rounding
        self._moments = [np.zeros((2, *array.shape), np.float32) for array in (self._parameter, self._bias)]
        fixed = (*numbers, *[None] * 3)[:3]
        factor = 2.0 if whole.gram is not None else 2 / whole.seen
        weights = _step(kind, self._parameter, self._moments[0], factor)
        weights.weights = self._weights.ctypes.data
        weights.first, weights.second, weights.third = (None if array is None else array.ctypes.data for array in fixed)
        arrays = {"inputs": self._training.inputs, "targets": self._training.targets, "bias": self._bias}
        if whole.gram is not None:
            gram, origin, cross = whole.gram
            del arrays["targets"]
            arrays["inputs"] = _taken(gram, 0, self.span[1]) if self.span[0] == 0 else gram
            arrays |= {"origin": self._own(origin), "cross": self._own(cross)}
        self._added_bias = self._bias
        if rounding is not None and rounding.numbers is not None:
            names = ("bias_scale", "bias_lowest", "bias_highest")
            arrays |= {name: np.ascontiguousarray(number) for name, number in zip(names, rounding.numbers, strict=True)}
        elif rounding is not None:
            arrays["bias"] = self._added_bias = self._rounded_bias()
            self._is_rounded_between = True
        self._held = numbers
        groups, length, outputs = self._parameter.shape
        self._span = 1 if self._is_rounded_between else max(1, LONGEST_CALL // (self._parameter.size * whole.seen))
        described = _Described(
            whole.native,
            arrays,
            weights,
            self._training.bounds,
            groups=groups,
            length=length,
            outputs=outputs,
            rows=whole.batch_rows,
            count=self._training.count,
            batches=whole.batches,
            has_own_inputs=whole.columns.are_groups,
        )
        if whole.has_bias:
            described.fields.bias_step = _step(StepKind.PLAIN, self._bias, self._moments[1], factor)
        return described

    def advance(self, done: int, iterations: Array, starts: Array) -> None:
        """Train for some iterations behind those that are done."""
        fields, native, whole = self._training_of.fields, self._whole.native, self._whole
        period = whole.options.log_period if _LOG.isEnabledFor(logging.DEBUG) else None
        begin = 0
        while begin < len(iterations):
            count = min(self._span, len(iterations) - begin)
            if period is not None:
                count = min(count, period - (done + begin) % period)
            first = starts[begin * whole.batches :].ctypes.data
            native.train(fields, iterations[begin:].ctypes.data, first, count)
            begin += count
            if self._is_rounded_between and fields.weights.kind == StepKind.PLAIN:
                self._weights[...] = self._rounding.values(self._parameter)
            if self._added_bias is not self._bias:
                self._added_bias[...] = self._rounded_bias()
            if period is not None and (done + begin) % period == 0:
                loss = self._errors(self._training, self._weights, self._rounded_bias(), LOUDNESS_ROWS).sum()
                _LOG.debug("%s: iteration %d, loss %.6g", whole.problem.name, done + begin, loss)

    def look(self) -> None:
        """Keep what is better on held-out rows."""
        if self._whole.options.algorithm is Algorithm.ADAROUND:
            hard = weights = np.where(self._parameter >= 0, self._upper, self._lower)
        else:
            hard, weights = self._parameter, self._rounding.values(self._parameter)
        self.best.take(self._errors(self._held_out, weights, self._rounded_bias()), hard, self._bias)

    @property
    def undecided(self) -> int:
        """The number of weights that are between their neighbours."""
        share = self._share()
        return int(((share > 0.01) & (share < 0.99) & (self._width > 0)).sum())

    def _share(self) -> Array:
        """The position of AdaRound's weights between their neighbours."""
        with np.errstate(over="ignore"):
            stretched = np.float32(STRETCH) / (1 + np.exp(-self._parameter)) + np.float32(SHIFT)
        share: Array = stretched.clip(0, 1)
        return share

    def _rounded_bias(self) -> Array:
        if self._bias_rounding is None:
            return self._bias
        return self._bias_rounding.values(self._bias[:, None])[:, 0]

    def _errors(self, rows: _Rows, weights: Array, bias: Array, most: int | None = None) -> Array:
        """The mean squared error of each output over the first rows, by default all."""
        count = rows.count if most is None else min(rows.count, most)
        squares = np.zeros(bias.shape, np.float64)
        described = self._whole.described(rows, weights, bias)
        self._whole.native.errors(described.fields, count, squares.ctypes.data)
        return squares / max(1, count)


def _step(kind: StepKind, parameter: Array, moments: Array, factor: float) -> WeightStep:
    return WeightStep(
        kind=kind,
        count=parameter.size,
        parameter=parameter.ctypes.data,
        mean=moments[0].ctypes.data,
        square=moments[1].ctypes.data,
        factor=factor,
    )
