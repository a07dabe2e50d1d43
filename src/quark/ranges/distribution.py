"""As wide as a normal distribution of the data's mean and deviation would want it.

    range = mean -+ k * deviation,  within the extremes;      k by the number of bits: 2.51 for 4, 3.92 for 8

k balances, for normally distributed data, the error of rounding (2k)^2 / 12 / 4^bits against that of clipping,
2 * ((1 + k^2) * Q(k) - k * phi(k)), Q being the tail beyond k and phi the density there.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from quark.formats.spec import IntFormat
from quark.ranges.histogram import Histogram, HistogramObserver
from quark.ranges.method import Observer, RangeMethod, TensorRange


@dataclass(frozen=True)
class Distribution(RangeMethod):
    """Mean and deviation, times what suits the number of bits. Outliers hardly matter; skewed data fit badly."""

    def observer(self, integer: IntFormat, is_symmetric: bool) -> Observer:
        return DistributionObserver(integer.bits, is_symmetric)

    def __str__(self) -> str:
        return "Distribution"


class DistributionObserver(HistogramObserver):
    def __init__(self, bits: int, is_symmetric: bool) -> None:
        super().__init__(is_even=is_symmetric)
        self._bits = bits
        self._is_symmetric = is_symmetric

    def range_of_histogram(self, histogram: Histogram) -> TensorRange:
        mean, deviation = histogram.moments()
        reach = normal_reach(self._bits) * deviation
        if self._is_symmetric:
            reach += abs(mean)
            mean = 0.0
        return histogram.clip(mean - reach, mean + reach)


@functools.cache
def normal_reach(bits: int) -> float:
    """The k with the least squared error for a normal distribution, to within 0.01."""
    candidates = [0.5 + 0.01 * i for i in range(1000)]
    return min(candidates, key=lambda k: _normal_error(k, bits))


def _normal_error(k: float, bits: int) -> float:
    tail = math.erfc(k / math.sqrt(2)) / 2
    density = math.exp(-k * k / 2) / math.sqrt(2 * math.pi)
    return (2 * k) ** 2 / 12 / float(4**bits) + 2 * ((1 + k * k) * tail - k * density)
