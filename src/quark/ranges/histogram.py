"""A tensor's distribution as counts of evenly spaced bins, gathered in a second pass over the range of the first.

The bins are fixed before anything is counted, so that counts of parts add up to those of the whole whatever the order
and the size of the parts. Between its edges a bin counts as uniform, which is what `quantile` and the expected error of
`histogram_error` assume.

An *even* histogram spans -a..a with a = max|x|: its two halves fold into the distribution of |x|.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from quark.errors import InvalidValueError
from quark.ranges.method import Observer, TensorRange
from quark.ranges.min_max import Extremes, mismatch
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
        """The distribution of |x|, of an even histogram."""
        half = len(self.counts) // 2
        folded = self.counts[half:] + self.counts[:half][::-1]
        return Histogram(0.0, max(-self.lowest, self.highest), self.edges[half:], folded)

    def quantile(self, fraction: float) -> float:
        """Where that fraction of the data lies below, to within a bin."""
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
        """That range, confined to what the data reach."""
        return TensorRange(min(max(lowest, self.lowest), self.highest), max(min(highest, self.highest), self.lowest))


class HistogramObserver(Observer):
    """Extremes in the first pass, a histogram over them in the second; subclasses read the range off it.

    Data of a single value, or none, have that range without a histogram.
    """

    needs_second_pass = True

    def __init__(self, is_even: bool) -> None:
        self._is_even = is_even
        self._extremes = Extremes()
        self._counts: Counts | None = None

    @abstractmethod
    def range_of_histogram(self, histogram: Histogram) -> TensorRange:
        """The range for data of at least two values."""

    def observe(self, x: Any) -> None:
        if self._counts is not None:
            raise InvalidValueError("the second pass has begun, and the bins are fixed: use observe_again")
        self._extremes.add(extremes(as_float32(x)))

    def observe_again(self, x: Any) -> None:
        if self._counts is None:
            self._counts = np.zeros(BINS, np.int64)
        add_to_histogram(as_float32(x), *self._span(), self._counts)

    def merge(self, other: Observer) -> None:
        if type(other) is not type(self) or not isinstance(other, HistogramObserver):
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
        return replace(self.range_of_histogram(self.histogram), observed=(lowest, highest))

    @property
    def histogram(self) -> Histogram:
        """What was counted, for data of at least two values."""
        if self._counts is None:
            raise InvalidValueError("this method needs the data twice: call observe_again with all of it")
        edges = np.linspace(*self._span(), BINS + 1)
        return Histogram(self._extremes.lowest, self._extremes.highest, edges, self._counts)

    def _span(self) -> tuple[float, float]:
        lowest, highest = self._extremes.lowest, self._extremes.highest
        reach = max(-lowest, highest)
        return (-reach, reach) if self._is_even else (lowest, highest)
