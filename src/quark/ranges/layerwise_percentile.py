"""Of several percentiles the one that suits each tensor: the least squared error of the quantized histogram.

Of equals the largest percentile wins, that is the widest range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quark.errors import InvalidValueError
from quark.formats.spec import IntFormat
from quark.ranges.histogram import Histogram, HistogramObserver
from quark.ranges.histogram_error import expected_errors
from quark.ranges.method import Observer, RangeMethod, TensorRange
from quark.ranges.percentile import check_percentile, percentile_range


@dataclass(frozen=True)
class LayerwisePercentile(RangeMethod):
    """`candidates` are percentiles as `Percentile` has them."""

    candidates: tuple[float, ...] = (99.99, 99.999, 99.9999)

    def __post_init__(self) -> None:
        if not self.candidates:
            raise InvalidValueError("candidates: expected at least one percentile, such as 99.999")
        for candidate in self.candidates:
            check_percentile(candidate)

    def observer(self, integer: IntFormat, is_symmetric: bool) -> Observer:
        return LayerwisePercentileObserver(self.candidates, integer, is_symmetric)

    def __str__(self) -> str:
        return f"LayerwisePercentile of {', '.join(f'{each:.10g}' for each in self.candidates)}"


class LayerwisePercentileObserver(HistogramObserver):
    def __init__(self, candidates: tuple[float, ...], integer: IntFormat, is_symmetric: bool) -> None:
        super().__init__(is_even=is_symmetric)
        self._candidates = sorted(candidates, reverse=True)
        self._integer = integer
        self._is_symmetric = is_symmetric

    def range_of_histogram(self, histogram: Histogram) -> TensorRange:
        ranges = [percentile_range(histogram, each, self._is_symmetric) for each in self._candidates]
        lowest = np.array([each.lowest for each in ranges])
        highest = np.array([each.highest for each in ranges])
        errors = expected_errors(histogram, lowest, highest, self._integer, self._is_symmetric)
        return ranges[int(np.argmin(errors))]
