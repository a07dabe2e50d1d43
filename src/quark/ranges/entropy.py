"""The range that loses the least information: the divergence of Kullback and Leibler between data and codes.

For a threshold t, P is the distribution of |x| in fine bins up to t, with everything beyond counted in the last of
them; Q is the same data spread evenly over the levels that the codes have for it, each level over those of its bins
where P is not empty. The threshold with the least

    sum P log(P / Q)

is taken; of equals the largest. All thresholds from as many bins as there are levels up to max|x| are tried. Within a
level Q is constant, so that cumulative sums give every level of every threshold without a loop over bins.

Where the last level is empty while data lie beyond, the divergence would be infinite, and a lone outlier could never be
cut off: such a level counts as half an element. Where the codes have more levels than the histogram bins (16 bits),
nothing is gained by clipping: the range is that of the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quark.formats.spec import IntFormat
from quark.ranges.histogram import Histogram, HistogramObserver
from quark.ranges.method import Observer, RangeMethod, TensorRange
from quark.ranges.statistics import Counts, Doubles

_EMPTY_LEVEL = 0.5


@dataclass(frozen=True)
class Entropy(RangeMethod):
    """The least divergence between the data and its codes."""

    def observer(self, integer: IntFormat, is_symmetric: bool) -> Observer:
        return EntropyObserver(integer.bits, is_symmetric)

    def __str__(self) -> str:
        return "Entropy"


class EntropyObserver(HistogramObserver):
    def __init__(self, bits: int, is_symmetric: bool) -> None:
        super().__init__(is_even=True)
        self._bits = bits
        self._is_symmetric = is_symmetric

    def range_of_histogram(self, histogram: Histogram) -> TensorRange:
        is_one_sided = histogram.lowest >= 0 or histogram.highest <= 0
        # asymmetric codes spend all of their levels on data of one sign
        levels = 1 << (self._bits if is_one_sided and not self._is_symmetric else self._bits - 1)
        magnitudes = histogram.magnitudes
        if levels >= len(magnitudes.counts):
            return TensorRange(histogram.lowest, histogram.highest)
        found = divergences(magnitudes.counts, levels)
        best = len(found) - 1 - int(np.argmin(found[::-1]))
        reach = float(magnitudes.edges[levels + best])
        return histogram.clip(-reach, reach)


def divergences(counts: Counts, levels: int) -> Doubles:
    """The divergence when cutting after bin number levels, levels + 1, ..., all bins."""
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
