"""Calibration methods that read the range off a histogram.

Percentile             all of the data but its outermost parts, which would cost the rest its resolution
LayerwisePercentile    the percentile, out of several, with the smallest squared error, or mean magnitude of the error
Entropy                the range that loses the least information (Kullback-Leibler divergence)
Distribution           the range that suits a normal distribution with the data's mean and deviation
MinMSE                 the range with the smallest squared error

`range_of` and `ranges_of_channels` find the ranges of an array in memory, such as a weight, by any method.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quark.errors import InvalidValueError
from quark.formats.affine import choose_affine, find_ranges
from quark.formats.spec import IntFormat
from quark.ranges.histogram import Histogram, HistogramMethod, HistogramObserver, expected_errors
from quark.ranges.method import MinMax, Observer, RangeMethod, TensorRange, mismatch
from quark.ranges.statistics import Counts, Doubles, Floats, as_float32


@dataclass(frozen=True)
class Percentile(HistogramMethod):
    """The range of that percentage of the data, as ONNX Runtime defines it.

    Asymmetric codes leave out (100 - p) / 2 percent at each end, symmetric ones the (100 - p) percent with the largest
    |x|. The quantiles are right to within a bin of the histogram, 1/4096 of the range.
    """

    percentile: float = 99.999

    def __post_init__(self) -> None:
        if not 50 < self.percentile <= 100:
            raise InvalidValueError(f"percentile {self.percentile}: expected more than 50, at most 100, such as 99.999")

    def range_of_histogram(self, histogram: Histogram, integer: IntFormat, is_symmetric: bool) -> TensorRange:
        if is_symmetric:
            reach = histogram.magnitudes.quantile(self.percentile / 100)
            return histogram.clip(-reach, reach)
        cut = (1 - self.percentile / 100) / 2
        return histogram.clip(histogram.quantile(cut), histogram.quantile(1 - cut))

    def __str__(self) -> str:
        return f"Percentile {self.percentile:.10g}"


@dataclass(frozen=True)
class LayerwisePercentile(HistogramMethod):
    """The percentile of `candidates` with the smallest error for each tensor; the largest of equals.

    The error is the mean of the squares, or of the magnitudes if not `is_squared`. The histogram predicts it; if
    `is_exact`, it is measured in a third pass over the data.
    """

    candidates: tuple[float, ...] = (99.99, 99.999, 99.9999)
    is_squared: bool = True
    is_exact: bool = False

    def __post_init__(self) -> None:
        if not self.candidates:
            raise InvalidValueError("candidates: expected at least one percentile, such as 99.999")
        for candidate in self.candidates:
            Percentile(candidate)

    def observer(self, integer: IntFormat, is_symmetric: bool) -> HistogramObserver:
        kind = ExactPercentileObserver if self.is_exact else HistogramObserver
        return kind(self, integer, is_symmetric)

    def range_of_histogram(self, histogram: Histogram, integer: IntFormat, is_symmetric: bool) -> TensorRange:
        ranges = self.ranges_of_histogram(histogram, integer, is_symmetric)
        lowest = np.array([candidate.lowest for candidate in ranges])
        highest = np.array([candidate.highest for candidate in ranges])
        errors = expected_errors(histogram, lowest, highest, integer, is_symmetric, is_squared=self.is_squared)
        return ranges[int(np.argmin(errors))]

    def ranges_of_histogram(self, histogram: Histogram, integer: IntFormat, is_symmetric: bool) -> list[TensorRange]:
        """The range of each candidate, largest first."""
        methods = [Percentile(candidate) for candidate in sorted(self.candidates, reverse=True)]
        return [method.range_of_histogram(histogram, integer, is_symmetric) for method in methods]

    def __str__(self) -> str:
        metric = ("" if self.is_squared else ", mean absolute error") + (", exact" if self.is_exact else "")
        return f"LayerwisePercentile of {', '.join(f'{candidate:.10g}' for candidate in self.candidates)}{metric}"


class ExactPercentileObserver(HistogramObserver):
    """Takes the candidates from the histogram, and sums up their errors over all data in a third pass."""

    needs_third_pass = True
    _method: LayerwisePercentile

    def __init__(self, method: LayerwisePercentile, integer: IntFormat, is_symmetric: bool) -> None:
        super().__init__(method, integer, is_symmetric)
        self._errors: Doubles | None = None

    def _ranges(self) -> list[TensorRange]:
        if self._extremes.lowest == self._extremes.highest:
            return [TensorRange(self._extremes.lowest, self._extremes.highest)]
        return self._method.ranges_of_histogram(self.histogram, self._integer, self._is_symmetric)

    def observe_finally(self, x: Any) -> None:
        """Add the errors of a piece of the data with each candidate."""
        row, ranges = as_float32(x).reshape(1, -1), self._ranges()
        if self._errors is None:
            self._errors = np.zeros(len(ranges))
        for index, candidate in enumerate(ranges if len(ranges) > 1 else ()):
            ends = np.array([candidate.lowest]), np.array([candidate.highest])
            self._errors[index] += _channel_errors(
                row, *ends, self._integer, self._is_symmetric, is_squared=self._method.is_squared
            )[0]

    def merge(self, other: Observer) -> None:
        """Add the sums of errors; before the third pass has begun, the histogram."""
        if not isinstance(other, ExactPercentileObserver):
            raise mismatch(self, other)
        if self._errors is None and other._errors is None:
            super().merge(other)
        elif self._errors is None or other._errors is None:
            self._errors = self._errors if other._errors is None else other._errors.copy()
        else:
            self._errors = self._errors + other._errors

    def result(self) -> TensorRange:
        """Return the range with the smallest error."""
        ranges = self._ranges()
        if len(ranges) == 1:
            return ranges[0]
        if self._errors is None:
            raise InvalidValueError("this method needs the data three times: call observe_finally with all of it")
        best = ranges[int(np.argmin(self._errors))]
        return replace(best, observed=(self._extremes.lowest, self._extremes.highest))


_EMPTY_LEVEL = 0.5


@dataclass(frozen=True)
class Entropy(HistogramMethod):
    """The smallest Kullback-Leibler divergence between the data and its codes.

    For a threshold t, P is the distribution of |x| in fine bins up to t, with everything beyond counted in the last
    bin. Q is the same data spread evenly over the levels that the codes have for it, each level over those of its bins
    where P is not empty. The threshold with the smallest

        sum P log(P / Q)

    wins, the largest of equals. All thresholds are tried, from as many bins as there are levels up to max|x|.

    If the last level is empty while data lie beyond it, the divergence would be infinite, and a single outlier could
    never be cut off: such a level counts as half an element. If the codes have more levels than the histogram has bins
    (16 bits), clipping gains nothing, and the range is that of the data.
    """

    needs_even = True

    def range_of_histogram(self, histogram: Histogram, integer: IntFormat, is_symmetric: bool) -> TensorRange:
        is_one_sided = histogram.lowest >= 0 or histogram.highest <= 0
        # asymmetric codes spend all of their levels on data of one sign
        levels = 1 << (integer.bits if is_one_sided and not is_symmetric else integer.bits - 1)
        magnitudes = histogram.magnitudes
        if levels >= len(magnitudes.counts):
            return TensorRange(histogram.lowest, histogram.highest)
        distances = divergences(magnitudes.counts, levels)
        best = len(distances) - 1 - int(np.argmin(distances[::-1]))
        reach = float(magnitudes.edges[levels + best])
        return histogram.clip(-reach, reach)


def divergences(counts: Counts, levels: int) -> Doubles:
    """The divergence when cutting after bin number levels, levels + 1, ..., all bins.

    Q is constant within a level, so cumulative sums cover every level of every threshold without a loop over bins.
    """
    bins = len(counts)
    cuts = np.arange(levels, bins + 1)
    mass = np.concatenate(([0], np.cumsum(counts)))
    filled = np.concatenate(([0], np.cumsum(counts > 0)))
    total = mass[-1]
    beyond = total - mass[cuts]
    last = counts[cuts - 1]
    edges = np.arange(levels + 1) * cuts[:, None] // levels
    level_mass = np.diff(mass[edges], axis=1).astype(np.float64)
    level_bins = np.diff(filled[edges], axis=1)
    level_bins[:, -1] += (last == 0) & (beyond > 0)
    level_mass[:, -1] += np.where((level_mass[:, -1] == 0) & (beyond > 0), _EMPTY_LEVEL, 0.0)
    log_q = np.log(np.maximum(level_mass, _EMPTY_LEVEL) / np.maximum(level_bins, 1))
    cross = (np.diff(mass[edges], axis=1) * log_q).sum(axis=1) + beyond * log_q[:, -1]
    own = np.cumsum(_x_log_x(counts))[cuts - 1] - _x_log_x(last) + _x_log_x(last + beyond)
    return np.asarray((own - cross) / total + np.log(level_mass.sum(axis=1) / total))


def _x_log_x(x: Counts) -> Doubles:
    return np.asarray(x * np.log(np.maximum(x, 1)))


@dataclass(frozen=True)
class Distribution(HistogramMethod):
    """mean -+ k * deviation, within the extremes; k depends on the number of bits: 2.51 for 4, 3.92 for 8.

    Outliers hardly matter; skewed data fit badly.
    """

    def range_of_histogram(self, histogram: Histogram, integer: IntFormat, is_symmetric: bool) -> TensorRange:
        mean, deviation = histogram.moments()
        reach = normal_reach(integer.bits) * deviation
        if is_symmetric:
            reach += abs(mean)
            mean = 0.0
        return histogram.clip(mean - reach, mean + reach)


@functools.cache
def normal_reach(bits: int) -> float:
    """The k with the smallest squared error for normally distributed data, to within 0.01.

    The error is that of rounding, (2k)^2 / 12 / 4^bits, plus that of clipping, 2 * ((1 + k^2) * Q(k) - k * phi(k)),
    where Q is the tail beyond k and phi the density there.
    """

    def error(k: float) -> float:
        tail = math.erfc(k / math.sqrt(2)) / 2
        density = math.exp(-k * k / 2) / math.sqrt(2 * math.pi)
        return (2 * k) ** 2 / 12 / float(4**bits) + 2 * ((1 + k * k) * tail - k * density)

    return min((0.5 + 0.01 * i for i in range(1000)), key=error)


COARSE = 2.0 ** (-np.arange(41) / 4)
_FINE_STEPS = 9
_MAX_TURNS = 3


@dataclass(frozen=True)
class MinMSE(HistogramMethod):
    """The range with the smallest squared error, as the histogram predicts it, for arbitrary scales.

    The extremes are reduced by factors 2^(-i/4), then in finer steps around the best of them. Symmetric codes have one
    such limit. Asymmetric codes have two, which are searched in turns until neither moves. Of equal errors the wider
    range wins.

    If `is_exact`, the errors of an array in memory, such as a weight, are those of its values instead of the
    histogram's.
    """

    is_exact: bool = False

    def range_of_histogram(self, histogram: Histogram, integer: IntFormat, is_symmetric: bool) -> TensorRange:
        def errors(lowest: Doubles, highest: Doubles) -> Doubles:
            return expected_errors(histogram, lowest, highest, integer, is_symmetric)

        if is_symmetric:
            reach = max(-histogram.lowest, histogram.highest)
            best = reach * best_factor(lambda f: errors(-reach * f, reach * f))
            return histogram.clip(-best, best)
        low, high = min(histogram.lowest, 0.0), max(histogram.highest, 0.0)
        lowest, highest = low, high
        for _ in range(_MAX_TURNS):
            before = lowest, highest
            if high > 0:
                highest = high * best_factor(lambda f: errors(lowest + 0 * f, high * f))  # noqa: B023
            if low < 0:
                lowest = low * best_factor(lambda f: errors(low * f, highest + 0 * f))  # noqa: B023
            if (lowest, highest) == before or not low < 0 < high:
                break
        return histogram.clip(lowest, highest)


def best_factor(errors_of: Callable[[Doubles], Doubles]) -> float:
    """The factor, at most 1, with the smallest error."""
    best = int(np.argmin(errors_of(COARSE)))
    first, last = COARSE[max(best - 1, 0)], COARSE[min(best + 1, len(COARSE) - 1)]
    fine = np.concatenate(([COARSE[best]], np.geomspace(first, last, 2 * _FINE_STEPS + 1)))
    return float(fine[int(np.argmin(errors_of(fine)))])


CANDIDATES: tuple[HistogramMethod, ...] = (Percentile(99.999), MinMSE(), Entropy())


class CandidateObserver(HistogramObserver):
    """Collects one histogram and derives the ranges of several methods from it.

    If the extremes of the data are known from an earlier pass (`observed`), only the second pass is needed.
    """

    def __init__(self, integer: IntFormat, is_symmetric: bool, observed: tuple[float, float] | None = None) -> None:
        super().__init__(Entropy(), integer, is_symmetric)  # Entropy needs an even histogram; the others take any
        self._extremes.add(observed)

    def candidates(self) -> dict[str, TensorRange]:
        """The range of each method, by the method's name; all the same for data of a single value."""
        lowest, highest = self._extremes.lowest, self._extremes.highest
        if lowest == highest:
            ranges = {str(method): TensorRange(lowest, highest) for method in (MinMax(), *CANDIDATES)}
        else:
            ranges = {str(MinMax()): TensorRange(lowest, highest, observed=(lowest, highest))}
            for method in CANDIDATES:
                ranges[str(method)] = method.range_of_histogram(self.histogram, self._integer, self._is_symmetric)
        return {name: replace(candidate, method=name) for name, candidate in ranges.items()}


def range_of(array: Any, method: RangeMethod, integer: IntFormat, is_symmetric: bool) -> TensorRange:
    """The range of a whole array, which counts as one sample."""
    if isinstance(method, MinMSE) and method.is_exact:
        return _exact_range(as_float32(array).reshape(1, -1), integer, is_symmetric)
    observer = method.observer(integer, is_symmetric)
    observer.observe(array)
    observer.end_of_sample()
    if observer.needs_second_pass:
        observer.observe_again(array)
    if observer.needs_third_pass:
        observer.observe_finally(array)
    return observer.result()


def ranges_of_channels(
    array: Any, axis: int, method: RangeMethod, integer: IntFormat, is_symmetric: bool
) -> tuple[Floats, Floats]:
    """(lowest, highest) of each channel of that axis. A channel has few values, which are searched directly, without a
    histogram. Methods without a vectorised form here look at one channel after the other."""
    shape = tuple(array.shape)
    if not -len(shape) <= axis < len(shape):
        raise InvalidValueError(f"axis {axis} of an array of shape {shape}: expected {-len(shape)}..{len(shape) - 1}")
    rows = np.moveaxis(as_float32(array).reshape(shape), axis, 0).reshape(shape[axis], -1)
    if not np.isfinite(rows).all():
        channel = int(np.argmin(np.isfinite(rows).all(axis=1)))
        raise InvalidValueError(f"x: channel {channel} of axis {axis} holds NaN or Inf, which has no range")
    if isinstance(method, MinMax) or not rows.size:
        lowest, highest = find_ranges(rows, axis=0)
        return np.asarray(lowest), np.asarray(highest)
    if isinstance(method, Percentile) and is_symmetric:
        reach = np.percentile(np.abs(rows), method.percentile, axis=1).astype(np.float32)
        return np.maximum(rows.min(axis=1), -reach), np.minimum(rows.max(axis=1), reach)
    if isinstance(method, Percentile):
        cut = (100 - method.percentile) / 2
        lowest, highest = np.percentile(rows, [cut, 100 - cut], axis=1).astype(np.float32)
        return lowest, highest
    if isinstance(method, MinMSE):
        return _least_errors(rows, integer, is_symmetric)
    ranges = [range_of(row, method, integer, is_symmetric) for row in rows]
    lowest, highest = ([getattr(of_row, end) for of_row in ranges] for end in ("lowest", "highest"))
    return np.array(lowest, np.float32), np.array(highest, np.float32)


def _least_errors(rows: Floats, integer: IntFormat, is_symmetric: bool) -> tuple[Floats, Floats]:
    """The extremes of each channel, reduced by the factor with the smallest squared error."""
    lowest, highest = (ends.astype(np.float64) for ends in find_ranges(rows, axis=0))
    best = np.ones(len(rows))
    least = _channel_errors(rows, lowest, highest, integer, is_symmetric)
    for factor in np.unique(np.concatenate((np.linspace(0.98, 0.3, 35), COARSE[8:21])))[::-1]:
        errors = _channel_errors(rows, lowest * factor, highest * factor, integer, is_symmetric)
        is_better = errors < least
        best[is_better], least[is_better] = factor, errors[is_better]
    return (lowest * best).astype(np.float32), (highest * best).astype(np.float32)


def _exact_range(row: Floats, integer: IntFormat, is_symmetric: bool) -> TensorRange:
    """The better one, by the values themselves, of the range that the histogram finds and of those tried one by one."""
    predicted = range_of(row, MinMSE(), integer, is_symmetric)
    if not row.size:
        return predicted
    (lowest,), (highest,) = ranges_of_channels(row, 0, MinMSE(), integer, is_symmetric)
    tried = TensorRange(float(lowest), float(highest), observed=predicted.observed)

    def error(candidate: TensorRange) -> float:
        ends = np.array([candidate.lowest]), np.array([candidate.highest])
        return float(_channel_errors(row, *ends, integer, is_symmetric)[0])

    return min((tried, predicted), key=error)


def _channel_errors(
    rows: Floats,
    lowest: Doubles,
    highest: Doubles,
    integer: IntFormat,
    is_symmetric: bool,
    *,
    is_squared: bool = True,
) -> Doubles:
    scale, zero_point = choose_affine(lowest, highest, integer, symmetric=is_symmetric)
    zero = zero_point.astype(np.float32)[:, None]
    step = scale.astype(np.float32)[:, None]
    error = np.clip(np.rint(rows / step), integer.qmin - zero, integer.qmax - zero) * step - rows
    if not is_squared:
        return np.asarray(np.abs(error).sum(axis=1, dtype=np.float64))
    return np.asarray(np.einsum("ij,ij->i", error, error, dtype=np.float64))
