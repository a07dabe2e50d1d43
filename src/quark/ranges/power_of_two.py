"""Ranges for power-of-two scales: a position for each tensor, scale = 2^-position.

    NonOverflow         the largest position at which nothing is clipped
    PowerOfTwoMinMSE    that position or one of the next four, whichever has the smallest sum of squared errors
    PowerOfTwoRange     the largest position at which nothing of the range of another method is clipped
    PowerOfTwoPercentile  PowerOfTwoMinMSE of the data without its outermost part

The rule and the candidates are `NON_OVERFLOW` of `quark.formats.power_of_two`; over all data the position is the one
that `min_mse_position` finds.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quark.errors import InvalidValueError
from quark.formats.power_of_two import NON_OVERFLOW, position_of_range
from quark.formats.spec import IntFormat
from quark.ranges.histogram import Histogram, HistogramMethod, HistogramObserver
from quark.ranges.method import Extremes, MinMaxObserver, Observer, RangeMethod, TensorRange, mismatch
from quark.ranges.statistics import as_float32, extremes, squared_errors

_SUM_TOLERANCE = 1e-9  # far above the rounding of a sum of float64


@dataclass(frozen=True)
class NonOverflow(RangeMethod):
    """The largest position at which nothing is clipped."""

    def observer(self, integer: IntFormat, is_symmetric: bool) -> Observer:
        return NonOverflowObserver(integer.bits)


@dataclass(frozen=True)
class PowerOfTwoMinMSE(RangeMethod):
    """The position with the smallest squared error over all data.

    With `has_most_common`, each piece of data that is observed votes for its own best position, in a single pass. The
    majority wins, the smaller position of equals; all-zero pieces abstain. The result then depends on how the data are
    split.
    """

    has_most_common: bool = False

    def observer(self, integer: IntFormat, is_symmetric: bool) -> Observer:
        return MostCommonObserver(integer.bits) if self.has_most_common else LeastErrorObserver(integer.bits)

    def __str__(self) -> str:
        return "PowerOfTwoMinMSE, most common" if self.has_most_common else "PowerOfTwoMinMSE"


@dataclass(frozen=True)
class PowerOfTwoRange(RangeMethod):
    """The range that another method finds, at the largest position at which nothing of it is clipped."""

    method: RangeMethod

    def observer(self, integer: IntFormat, is_symmetric: bool) -> Observer:
        return PositionedObserver(self.method.observer(integer, is_symmetric), integer.bits)

    def __str__(self) -> str:
        return f"PowerOfTwoRange of {self.method}"


@dataclass(frozen=True)
class PowerOfTwoPercentile(HistogramMethod):
    """The position with the smallest squared error for the data without the (100 - percentile) percent with the largest
    |x|, as the histogram predicts it."""

    percentile: float = 99.999
    needs_even = True

    def range_of_histogram(self, histogram: Histogram, integer: IntFormat, is_symmetric: bool) -> TensorRange:
        reach = histogram.magnitudes.quantile(self.percentile / 100)
        centres = (histogram.edges[1:] + histogram.edges[:-1]) / 2
        inside = np.abs(centres) <= reach
        centres, counts = centres[inside], histogram.counts[inside]
        seen = Extremes((max(-reach, histogram.lowest), min(reach, histogram.highest)))
        half = 1 << (integer.bits - 1)

        def error(position: int) -> float:
            step = math.ldexp(1.0, -position)
            off = np.clip(np.rint(centres / step), -half, half - 1) * step - centres
            return float(counts @ (off * off))

        return _range_at(seen, integer.bits, min(_candidates(seen, integer.bits), key=error))

    def __str__(self) -> str:
        return f"PowerOfTwoPercentile {self.percentile:.10g}"


class PositionedObserver(Observer):
    """An observer of another method, whose range gets a position."""

    def __init__(self, inner: Observer, bits: int) -> None:
        self.inner, self._bits = inner, bits
        self.needs_second_pass, self.needs_third_pass = inner.needs_second_pass, inner.needs_third_pass
        self.is_mergeable = inner.is_mergeable

    def observe(self, x: Any) -> None:
        self.inner.observe(x)

    def end_of_sample(self) -> None:
        """Mark the end of a sample."""
        self.inner.end_of_sample()

    def observe_again(self, x: Any) -> None:
        """Add a piece of the data in the second pass."""
        self.inner.observe_again(x)

    def observe_finally(self, x: Any) -> None:
        """Add a piece of the data in the third pass."""
        self.inner.observe_finally(x)

    def merge(self, other: Observer) -> None:
        if not isinstance(other, PositionedObserver) or other._bits != self._bits:
            raise mismatch(self, other)
        self.inner.merge(other.inner)

    def result(self) -> TensorRange:
        inner = self.inner.result()
        return replace(inner, position=range_with_position(inner.lowest, inner.highest, self._bits).position)


def histogram_observer(observer: Observer) -> HistogramObserver | None:
    """The observer that fills a histogram: this one or its inner one; None if there is none."""
    inner = observer.inner if isinstance(observer, PositionedObserver) else observer
    return inner if isinstance(inner, HistogramObserver) else None


POSITION_METHODS = (NonOverflow, PowerOfTwoMinMSE, PowerOfTwoRange, PowerOfTwoPercentile)


def range_with_position(lowest: float, highest: float, bits: int) -> TensorRange:
    """That range, at the largest position that does not clip it."""
    return TensorRange(lowest, highest, _candidates(Extremes((lowest, highest)), bits)[0])


def range_at(position: int, bits: int) -> TensorRange:
    """The range of codes of that many bits at a position."""
    step, half = math.ldexp(1.0, -position), 1 << (bits - 1)
    return TensorRange(-half * step, (half - 1) * step, position)


class NonOverflowObserver(MinMaxObserver):
    """The extremes of all data, and the position that covers them."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self._bits = bits

    def result(self) -> TensorRange:
        return _range_at(self.extremes, self._bits, _candidates(self.extremes, self._bits)[0])


class LeastErrorObserver(Observer):
    """The extremes of the first pass fix the candidates; the second pass sums up their errors.

    A candidate is dropped as soon as its sum exceeds the bound for NonOverflow's position, which is off by at most half
    a step for each of the elements that the first pass counted.
    """

    needs_second_pass = True

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._extremes = Extremes()
        self._elements = 0
        self._errors: dict[int, float] | None = None  # errors of the remaining candidates

    def observe(self, x: Any) -> None:
        if self._errors is not None:
            raise InvalidValueError("the second pass has begun, and the candidates are fixed: use observe_again")
        flat = as_float32(x)
        self._extremes.add(extremes(flat))
        self._elements += flat.size

    def observe_again(self, x: Any) -> None:
        if self._errors is None:
            self._errors = dict.fromkeys(_candidates(self._extremes, self._bits), 0.0)
        if len(self._errors) == 1:
            return
        positions = tuple(self._errors)
        added = squared_errors(as_float32(x), self._bits, positions)
        limit = self._elements * math.ldexp(1.0, -2 * positions[0] - 2) * (1 + _SUM_TOLERANCE)
        sums = {
            position: self._errors[position] + float(error) for position, error in zip(positions, added, strict=True)
        }
        self._errors = {
            position: total for position, total in sums.items() if position == positions[0] or total <= limit
        }

    def merge(self, other: Observer) -> None:
        if not isinstance(other, LeastErrorObserver) or other._bits != self._bits:
            raise mismatch(self, other)
        if self._errors is None and other._errors is None:
            self._extremes.add(other._extremes.range)
            self._elements += other._elements
            return
        if (self._extremes, self._elements) != (other._extremes, other._elements):
            raise InvalidValueError("errors at different positions: merge after the first pass, then sum both")
        mine, others = self._errors, other._errors
        if mine is not None and others is not None:
            self._errors = {
                position: total + others[position] for position, total in mine.items() if position in others
            }
        elif others is not None:
            self._errors = dict(others)

    def result(self) -> TensorRange:
        candidates = _candidates(self._extremes, self._bits)
        if len(set(candidates)) == 1:  # zeros, or the smallest numbers
            return _range_at(self._extremes, self._bits, candidates[0])
        if self._errors is None:
            raise InvalidValueError("this method needs the data twice: call observe_again with all of it")
        return _range_at(self._extremes, self._bits, min(self._errors, key=self._errors.__getitem__))


class MostCommonObserver(Observer):
    """Counts the best position of each piece of data."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._extremes = Extremes()
        self._votes: Counter[int] = Counter()

    def observe(self, x: Any) -> None:
        flat = as_float32(x)
        piece = Extremes(extremes(flat))
        self._extremes.add(piece.range)
        if piece.lowest == piece.highest == 0:
            return
        positions = _candidates(piece, self._bits)
        self._votes[positions[int(np.argmin(squared_errors(flat, self._bits, positions)))]] += 1

    def merge(self, other: Observer) -> None:
        if not isinstance(other, MostCommonObserver) or other._bits != self._bits:
            raise mismatch(self, other)
        self._extremes.add(other._extremes.range)
        self._votes += other._votes

    def result(self) -> TensorRange:
        if not self._votes:
            return _range_at(self._extremes, self._bits, NON_OVERFLOW.zero_position)
        return _range_at(
            self._extremes, self._bits, min(self._votes, key=lambda position: (-self._votes[position], position))
        )


def _candidates(seen: Extremes, bits: int) -> tuple[int, ...]:
    """The positions to try for data with these extremes, smallest first: the first is NonOverflow's."""
    start = int(position_of_range(np.float32(seen.lowest), np.float32(seen.highest), bits, NON_OVERFLOW))
    lowest, highest = NON_OVERFLOW.min_position, NON_OVERFLOW.max_position
    return tuple(min(max(start + offset, lowest), highest) for offset in NON_OVERFLOW.offsets)


def _range_at(seen: Extremes, bits: int, position: int) -> TensorRange:
    """The part of the data that the codes at that position reach."""
    reach = range_at(position, bits)
    lowest = min(max(seen.lowest, reach.lowest), reach.highest)
    return TensorRange(lowest, max(min(seen.highest, reach.highest), reach.lowest), position)
