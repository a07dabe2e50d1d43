"""All of the data but its outermost parts, which would cost the rest its resolution.

As ONNX Runtime means it: asymmetric codes leave out (100 - p) / 2 percent at each end, symmetric ones the (100 - p)
percent of the largest |x|. The quantiles come from a histogram and are right to within a bin, 1/4096 of the range.
"""

from __future__ import annotations

from dataclasses import dataclass

from quark.errors import InvalidValueError
from quark.formats.spec import IntFormat
from quark.ranges.histogram import Histogram, HistogramObserver
from quark.ranges.method import Observer, RangeMethod, TensorRange


def check_percentile(percentile: float) -> None:
    if not 50 < percentile <= 100:
        raise InvalidValueError(f"percentile {percentile}: expected more than 50, at most 100, such as 99.999")


@dataclass(frozen=True)
class Percentile(RangeMethod):
    """The range of that percentage of the data."""

    percentile: float = 99.999

    def __post_init__(self) -> None:
        check_percentile(self.percentile)

    def observer(self, integer: IntFormat, is_symmetric: bool) -> Observer:
        return PercentileObserver(self.percentile, is_symmetric)

    def __str__(self) -> str:
        return f"Percentile {self.percentile:.10g}"


def percentile_range(histogram: Histogram, percentile: float, is_symmetric: bool) -> TensorRange:
    """The range of that percentage, within the data's; a symmetric one needs an even histogram."""
    if is_symmetric:
        reach = histogram.magnitudes.quantile(percentile / 100)
        return histogram.clip(-reach, reach)
    cut = (1 - percentile / 100) / 2
    return histogram.clip(histogram.quantile(cut), histogram.quantile(1 - cut))


class PercentileObserver(HistogramObserver):
    def __init__(self, percentile: float, is_symmetric: bool) -> None:
        super().__init__(is_even=is_symmetric)
        self._percentile = percentile
        self._is_symmetric = is_symmetric

    def range_of_histogram(self, histogram: Histogram) -> TensorRange:
        return percentile_range(histogram, self._percentile, self._is_symmetric)
