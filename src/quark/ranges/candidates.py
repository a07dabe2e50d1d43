"""Several ranges of one tensor from one histogram, for a choice by what they do to the network's output."""

from __future__ import annotations

from dataclasses import replace

from quark.formats.spec import IntFormat
from quark.ranges.entropy import Entropy
from quark.ranges.histogram import Histogram, HistogramObserver
from quark.ranges.method import TensorRange
from quark.ranges.min_max import MinMax
from quark.ranges.min_mse import MinMSE
from quark.ranges.percentile import Percentile

HISTOGRAM_METHODS = (Percentile(99.999), MinMSE(), Entropy())


class CandidateObserver(HistogramObserver):
    """Gathers a histogram, and reads off it the range that each method would give.

    Where `observed`, the extremes of the data, are known from an earlier pass, the second pass is the only one.
    """

    def __init__(self, integer: IntFormat, is_symmetric: bool, observed: tuple[float, float] | None = None) -> None:
        super().__init__(is_even=True)  # entropy needs it, and the others take any
        self._integer, self._is_symmetric = integer, is_symmetric
        self._extremes.add(observed)

    def range_of_histogram(self, histogram: Histogram) -> TensorRange:
        return TensorRange(histogram.lowest, histogram.highest)

    def candidates(self) -> dict[str, TensorRange]:
        """The range of each method, by the method's name; all the same for data of a single value."""
        whole = self.result()
        found = {str(MinMax()): whole}
        for method in HISTOGRAM_METHODS:
            observer = method.observer(self._integer, self._is_symmetric)
            assert isinstance(observer, HistogramObserver)
            found[str(method)] = whole if whole.lowest == whole.highest else observer.range_of_histogram(self.histogram)
        return {name: replace(each, method=name) for name, each in found.items()}
