"""Methods that initialize trained quantizers: thresholds for TQT, the step for LSQ.

    ThreeSigma       t = |mean(x + 1e-6)| + 3 * deviation(x)
    KLJ              the t at which the codes best preserve the distribution of |x| (arXiv 1805.07941)
    LeastErrorStep   the step with the least squared error

The range of a threshold t is the part of the data within -t..t; the range of a step is what its codes reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quark.formats.spec import IntFormat
from quark.ranges.histogram import Histogram, HistogramMethod, expected_errors
from quark.ranges.histogram_methods import best_factor
from quark.ranges.method import TensorRange
from quark.ranges.statistics import Counts, Doubles, as_float32

_SIGMAS = 3
_MEAN_OFFSET = 1e-6
_MOST_CUTS = 256  # number of thresholds tried: enough, because the result is rounded to a power of two


@dataclass(frozen=True)
class ThreeSigma(HistogramMethod):
    """Mean and three deviations, both of the histogram: sums over the data would depend on its order."""

    needs_even = True

    def range_of_histogram(self, histogram: Histogram, integer: IntFormat, is_symmetric: bool) -> TensorRange:
        reach = _three_sigma(*histogram.moments())
        return histogram.clip(-reach, reach)


def three_sigma(x: Any) -> float:
    """The threshold of a whole array; 0 if it has no elements.

    >>> three_sigma(np.array([-1.0, 1.0], np.float32))
    3.000001
    """
    wide = as_float32(x).astype(np.float64)
    return _three_sigma(float(wide.mean()), float(wide.std())) if wide.size else 0.0


def _three_sigma(mean: float, deviation: float) -> float:
    return abs(mean + _MEAN_OFFSET) + _SIGMAS * deviation


@dataclass(frozen=True)
class KLJ(HistogramMethod):
    """The smallest Jeffreys divergence between the cumulative distributions of data and codes."""

    needs_even = True

    def range_of_histogram(self, histogram: Histogram, integer: IntFormat, is_symmetric: bool) -> TensorRange:
        levels = 1 << (integer.bits - 1 if integer.signed or is_symmetric else integer.bits)
        reach = kl_j_threshold(histogram.magnitudes.counts, histogram.magnitudes.edges, levels)
        return histogram.clip(-reach, reach)


def kl_j_threshold(counts: Counts, edges: Doubles, levels: int) -> float:
    """The KL-J threshold for that many levels, of |x| counted between `edges`, the first of which is 0.

    F is the cumulative distribution of |x| in fine bins. G is what codes that reach up to t make of it: equal to F at
    the codes, linear between them, and 1 from t on, since everything beyond counts in the last code. Zero is a code, so
    zeros, of which there may be many, are no loss. The t with the smallest

        sum (F - G) * log(F / G)

    over all bins wins, the largest of equals. The sum is always finite; that of the densities is not, because the codes
    have none beyond t. If there are more levels than bins (16 bits), clipping gains nothing, and t is max|x|.
    """
    bins = len(counts)
    if levels >= bins:
        return float(edges[-1])
    cuts = np.unique(np.linspace(levels, bins, min(_MOST_CUTS, bins - levels + 1)).astype(np.int64))
    divergences = jeffreys_divergences(counts, cuts, levels)
    return float(edges[cuts[len(divergences) - 1 - int(np.argmin(divergences[::-1]))]])


def jeffreys_divergences(counts: Counts, cuts: Counts, levels: int) -> Doubles:
    """The divergence if the codes reach up to bin number cuts[i]."""
    cumulative = np.cumsum(counts) / counts.sum()
    first = int(np.argmax(cumulative > 0))
    places = np.arange(len(counts))
    sums = np.empty(len(cuts))
    for i, cut in enumerate(cuts):
        codes = np.linspace(0, cut - 1, levels)
        at_codes = np.interp(codes, places, cumulative)
        at_codes[-1] = 1.0
        p, q = cumulative[first:], np.interp(places, codes, at_codes)[first:]  # q is 1 beyond the last code
        sums[i] = ((p - q) * np.log(p / q)).sum()
    return sums


@dataclass(frozen=True)
class LeastErrorStep(HistogramMethod):
    """The step with the least squared error, as the histogram predicts it, times the highest code.

    Signed codes reach as far below zero; unsigned codes start at the lowest value seen.
    """

    def range_of_histogram(self, histogram: Histogram, integer: IntFormat, is_symmetric: bool) -> TensorRange:
        low, high = (min(histogram.lowest, 0.0), max(histogram.highest, 0.0))
        reach = max(-low, high) if integer.signed else high

        def errors(factors: Doubles) -> Doubles:
            lowest = -reach * factors if integer.signed else 0.0 * factors
            return expected_errors(histogram, lowest, reach * factors, integer, integer.signed)

        best = reach * best_factor(errors) if reach > 0 else 0.0
        return TensorRange(-best if integer.signed else low, best, observed=(histogram.lowest, histogram.highest))
