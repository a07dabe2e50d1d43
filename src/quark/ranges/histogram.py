"""A tensor's distribution as counts in evenly spaced bins: extremes in a first pass, counts in a second.

The bins are fixed before anything is counted, so counts of parts add up to those of the whole, whatever the order and
size of the parts. Within a bin the data count as uniformly distributed.

An *even* histogram spans -a..a with a = max|x|: its two halves fold into the distribution of |x|.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from quark.errors import InvalidValueError
from quark.formats.affine import choose_affine
from quark.formats.spec import IntFormat
from quark.ranges.method import Extremes, Observer, RangeMethod, TensorRange, mismatch
from quark.ranges.statistics import Counts, Doubles, add_to_histogram, as_float32, extremes

BINS = 4096


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts between `edges[i]` and `edges[i + 1]`; `lowest` and `highest` are the extremes of the data."""

    lowest: float
    highest: float
    edges: Doubles
    counts: Counts

    @cached_property
    def total(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def magnitudes(self) -> Histogram:
        """The distribution of |x|; only for an even histogram."""
        half = len(self.counts) // 2
        folded = self.counts[half:] + self.counts[:half][::-1]
        return Histogram(0.0, max(-self.lowest, self.highest), self.edges[half:], folded)

    def quantile(self, fraction: float) -> float:
        """The value that this fraction of the data lies below, to within a bin."""
        cumulative = np.concatenate(([0], np.cumsum(self.counts)))
        target = fraction * self.total
        index = int(np.clip(np.searchsorted(cumulative, target) - 1, 0, len(self.counts) - 1))
        within = (target - cumulative[index]) / max(1, self.counts[index])
        value = float(self.edges[index] + min(1.0, within) * (self.edges[index + 1] - self.edges[index]))
        return min(max(value, self.lowest), self.highest)

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation."""
        centres = (self.edges[1:] + self.edges[:-1]) / 2
        mean = float(centres @ self.counts) / self.total
        return mean, float(np.sqrt(((centres - mean) ** 2) @ self.counts / self.total))

    def clip(self, lowest: float, highest: float) -> TensorRange:
        """Clip that range to the range of the data."""
        return TensorRange(min(max(lowest, self.lowest), self.highest), max(min(highest, self.highest), self.lowest))


def expected_errors(
    histogram: Histogram,
    lowest: Doubles,
    highest: Doubles,
    integer: IntFormat,
    is_symmetric: bool,
    *,
    is_squared: bool = True,
) -> Doubles:
    """The mean squared error, or the mean magnitude of the error, of quantizing the data to each of the ranges
    lowest[i]..highest[i].

    With step s and t = x / s, the error of x is s * (t - n), where n is t rounded and clipped to the codes. Its square
    has the integral s^3 * (n / 12 + (t - n)^3 / 3), its magnitude s^2 * (n / 4 + (t - n) |t - n| / 2); they are exact
    on both sides of the clipping. So a bin of uniform density needs only its two edges, however coarse or fine the
    steps are compared to the bins.
    """
    scale, zero_point = choose_affine(lowest, highest, integer, symmetric=is_symmetric)
    zero = zero_point.astype(np.float64)
    steps = histogram.edges / scale[:, None]
    levels = np.clip(np.rint(steps), (integer.qmin - zero)[:, None], (integer.qmax - zero)[:, None])
    steps -= levels
    integral = levels
    if is_squared:
        integral /= 12
        integral += steps * steps * steps / 3
    else:
        integral /= 4
        integral += steps * np.abs(steps) / 2
    density = histogram.counts / (np.diff(histogram.edges) * histogram.total)
    return np.asarray(np.diff(integral, axis=1) @ density * scale ** (3 if is_squared else 2))


class HistogramMethod(RangeMethod):
    """A method that reads the range off a histogram, which is even if `is_symmetric` or `needs_even`."""

    needs_even: ClassVar[bool] = False

    def observer(self, integer: IntFormat, is_symmetric: bool) -> HistogramObserver:
        return HistogramObserver(self, integer, is_symmetric)

    @abstractmethod
    def range_of_histogram(self, histogram: Histogram, integer: IntFormat, is_symmetric: bool) -> TensorRange:
        """Return the range for data with at least two different values."""


class HistogramObserver(Observer):
    """Finds the extremes in the first pass and a histogram in the second, which the method turns into a range.

    Data of a single value, or none, need no histogram.
    """

    needs_second_pass = True

    def __init__(self, method: HistogramMethod, integer: IntFormat, is_symmetric: bool) -> None:
        self._method, self._integer, self._is_symmetric = method, integer, is_symmetric
        self._is_even = is_symmetric or method.needs_even
        self._extremes = Extremes()
        self._counts: Counts | None = None
        self._bins = BINS

    def set_bins(self, bins: int) -> None:
        """Count in that many bins, or one more if the number is odd: a histogram has two halves."""
        if bins < 2 or self._counts is not None:
            raise InvalidValueError(f"{bins} bins: expected at least 2, set before the data are counted")
        self._bins = bins + bins % 2

    def observe(self, x: Any) -> None:
        if self._counts is not None:
            raise InvalidValueError("the second pass has begun, and the bins are fixed: use observe_again")
        self._extremes.add(extremes(as_float32(x)))

    def observe_again(self, x: Any) -> None:
        if self._counts is None:
            self._counts = np.zeros(self._bins, np.int64)
        add_to_histogram(as_float32(x), *self._span(), self._counts)

    def merge(self, other: Observer) -> None:
        if not isinstance(other, type(self)) or type(other._method) is not type(self._method):
            raise mismatch(self, other)
        has_begun = self._counts is not None or other._counts is not None
        if has_begun and (self._extremes != other._extremes or self._is_even != other._is_even):
            raise InvalidValueError("histograms over different ranges: merge after the first pass, then count both")
        self._extremes.add(other._extremes.range)
        if other._counts is not None:
            self._counts = other._counts.copy() if self._counts is None else self._counts + other._counts

    def result(self) -> TensorRange:
        lowest, highest = self._extremes.lowest, self._extremes.highest
        if lowest == highest:
            return TensorRange(lowest, highest)
        clipped = self._method.range_of_histogram(self.histogram, self._integer, self._is_symmetric)
        return replace(clipped, observed=(lowest, highest))

    @property
    def has_histogram(self) -> bool:
        """True after the second pass over data with at least two different values."""
        return self._counts is not None and self._extremes.lowest != self._extremes.highest

    @property
    def histogram(self) -> Histogram:
        """The histogram of data with at least two different values."""
        if self._counts is None:
            raise InvalidValueError("this method needs the data twice: call observe_again with all of it")
        edges = np.linspace(*self._span(), self._bins + 1)
        return Histogram(self._extremes.lowest, self._extremes.highest, edges, self._counts)

    def _span(self) -> tuple[float, float]:
        lowest, highest = self._extremes.lowest, self._extremes.highest
        reach = max(-lowest, highest)
        return (-reach, reach) if self._is_even else (lowest, highest)

    def __str__(self) -> str:
        return f"{type(self._method).__name__}Observer"
