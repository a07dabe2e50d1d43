"""Where a trained threshold starts from: three deviations, or the least divergence of Jeffreys.

    three_sigma      t = |mean(x + 1e-6)| + 3 * deviation(x)
    kl_j_threshold   the t at which the codes keep the distribution of |x| best (arXiv 1805.07941)

For the second, F is the cumulative distribution of |x| in fine bins, and G what the codes make of it when they reach up
to t: equal to F at the codes, straight between them, and 1 from t on, since what lies beyond counts in the last of
them. Zero is a code, so that zeros, of which there may be many, are no loss. The t with the least

    sum (F - G) * log(F / G)

over all bins is taken, of equals the largest. Both tails of the sum are finite without further care, which the
divergence of the densities is not: beyond t the codes have none. Where there are more levels than bins (16 bits),
nothing is gained by clipping, and t is max|x|.

As methods, `ThreeSigma` and `KLJ` watch a stream like all others. Their range is what of the data lies within -t..t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quark.formats.spec import IntFormat
from quark.ranges.histogram import Histogram, HistogramObserver
from quark.ranges.method import Observer, RangeMethod, TensorRange
from quark.ranges.statistics import Counts, Doubles, as_float32

_SIGMAS = 3
_MEAN_OFFSET = 1e-6
_MOST_CUTS = 256  # thresholds that are tried: a power of two follows from the one that is found


def three_sigma(x: Any) -> float:
    """The threshold of a whole array; 0 where there are no elements.

    >>> three_sigma(np.array([-1.0, 1.0], np.float32))
    3.000001
    """
    wide = as_float32(x).astype(np.float64)
    return _three_sigma(float(wide.mean()), float(wide.std())) if wide.size else 0.0


def _three_sigma(mean: float, deviation: float) -> float:
    return abs(mean + _MEAN_OFFSET) + _SIGMAS * deviation


def kl_j_threshold(counts: Counts, edges: Doubles, levels: int) -> float:
    """The threshold for so many levels, of |x| counted between `edges`, the first of which is 0."""
    bins = len(counts)
    if levels >= bins:
        return float(edges[-1])
    cuts = np.unique(np.linspace(levels, bins, min(_MOST_CUTS, bins - levels + 1)).astype(np.int64))
    found = jeffreys_divergences(counts, cuts, levels)
    return float(edges[cuts[len(found) - 1 - int(np.argmin(found[::-1]))]])


def jeffreys_divergences(counts: Counts, cuts: Counts, levels: int) -> Doubles:
    """The divergence when the codes reach up to bin number cuts[i]."""
    own = np.cumsum(counts) / counts.sum()
    first = int(np.argmax(own > 0))
    places = np.arange(len(counts))
    sums = np.empty(len(cuts))
    for i, cut in enumerate(cuts):
        codes = np.linspace(0, cut - 1, levels)
        at_codes = np.interp(codes, places, own)
        at_codes[-1] = 1.0
        kept = np.interp(places, codes, at_codes)  # 1 beyond the last code
        sums[i] = _jeffreys(own[first:], kept[first:])
    return sums


def _jeffreys(p: Doubles, q: Doubles) -> float:
    return float(((p - q) * np.log(p / q)).sum())


@dataclass(frozen=True)
class ThreeSigma(RangeMethod):
    """Mean and three deviations."""

    def observer(self, integer: IntFormat, is_symmetric: bool) -> Observer:
        return ThreeSigmaObserver()

    def __str__(self) -> str:
        return "ThreeSigma"


@dataclass(frozen=True)
class KLJ(RangeMethod):
    """The least divergence of Jeffreys between the cumulative distributions of data and codes."""

    def observer(self, integer: IntFormat, is_symmetric: bool) -> Observer:
        return KLJObserver(integer.bits - 1 if integer.signed or is_symmetric else integer.bits)

    def __str__(self) -> str:
        return "KLJ"


class ThreeSigmaObserver(HistogramObserver):
    """Mean and deviation are those of the histogram: sums would depend on the order of the data."""

    def __init__(self) -> None:
        super().__init__(is_even=True)

    def range_of_histogram(self, histogram: Histogram) -> TensorRange:
        reach = _three_sigma(*histogram.moments())
        return histogram.clip(-reach, reach)


class KLJObserver(HistogramObserver):
    def __init__(self, level_bits: int) -> None:
        super().__init__(is_even=True)
        self._levels = 1 << level_bits

    def range_of_histogram(self, histogram: Histogram) -> TensorRange:
        magnitudes = histogram.magnitudes
        reach = kl_j_threshold(magnitudes.counts, magnitudes.edges, self._levels)
        return histogram.clip(-reach, reach)
