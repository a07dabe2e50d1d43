"""The range with the least squared error, for scales that are any number.

The extremes are drawn in by factors 2^(-i/4), then finer around the best of them, and the error is that which the
histogram leads to expect. Symmetric codes have one such reach; asymmetric ones two, searched in turns until neither
moves. Of equal errors the wider range wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quark.formats.spec import IntFormat
from quark.ranges.histogram import Histogram, HistogramObserver
from quark.ranges.histogram_error import expected_errors
from quark.ranges.method import Observer, RangeMethod, TensorRange
from quark.ranges.statistics import Doubles

COARSE = 2.0 ** (-np.arange(41) / 4)
_FINE_STEPS = 9
_MAX_TURNS = 3


@dataclass(frozen=True)
class MinMSE(RangeMethod):
    """The range with the least squared error."""

    def observer(self, integer: IntFormat, is_symmetric: bool) -> Observer:
        return MinMSEObserver(integer, is_symmetric)

    def __str__(self) -> str:
        return "MinMSE"


class MinMSEObserver(HistogramObserver):
    def __init__(self, integer: IntFormat, is_symmetric: bool) -> None:
        super().__init__(is_even=is_symmetric)
        self._integer = integer
        self._is_symmetric = is_symmetric

    def range_of_histogram(self, histogram: Histogram) -> TensorRange:
        if self._is_symmetric:
            reach = max(-histogram.lowest, histogram.highest)
            best = reach * _best_factor(lambda f: self._errors(histogram, -reach * f, reach * f))
            return histogram.clip(-best, best)
        low, high = min(histogram.lowest, 0.0), max(histogram.highest, 0.0)
        lowest, highest = self._search_both_sides(histogram, low, high)
        return histogram.clip(lowest, highest)

    def _search_both_sides(self, histogram: Histogram, low: float, high: float) -> tuple[float, float]:
        lowest, highest = low, high
        for _ in range(_MAX_TURNS):
            before = lowest, highest
            fixed = lowest
            if high > 0:
                highest = high * _best_factor(lambda f: self._errors(histogram, fixed + 0 * f, high * f))  # noqa: B023
            fixed = highest
            if low < 0:
                lowest = low * _best_factor(lambda f: self._errors(histogram, low * f, fixed + 0 * f))  # noqa: B023
            if (lowest, highest) == before or not low < 0 < high:
                break
        return lowest, highest

    def _errors(self, histogram: Histogram, lowest: Doubles, highest: Doubles) -> Doubles:
        return expected_errors(histogram, lowest, highest, self._integer, self._is_symmetric)


def _best_factor(errors_of: Callable[[Doubles], Doubles]) -> float:
    """The factor at most 1 with the least error."""
    best = int(np.argmin(errors_of(COARSE)))
    first, last = COARSE[max(best - 1, 0)], COARSE[min(best + 1, len(COARSE) - 1)]
    fine = np.concatenate(([COARSE[best]], np.geomspace(first, last, 2 * _FINE_STEPS + 1)))
    return float(fine[int(np.argmin(errors_of(fine)))])
