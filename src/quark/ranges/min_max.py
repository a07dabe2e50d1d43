"""The whole range of the data; or a moving average of the samples' ranges.

    range = (1 - c) * range + c * range of the n-th sample,        c = max(constant, 1/n)

so that the first samples, 100 with the usual constant of 0.01, count alike, where a constant c from the start would
leave the range at what the first sample has. The average forgets outliers of single samples, and depends on their
order: such observers do not merge. The extreme of n values lies near the quantile 1 - 1/n, so that about one value in n
is clipped; where samples have fewer than 4000, that is too much, and the range is the whole one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quark.errors import InvalidValueError
from quark.formats.spec import IntFormat
from quark.ranges.method import Observer, RangeMethod, TensorRange
from quark.ranges.statistics import as_float32, extremes

MOVING_AVERAGE_CONSTANT = 0.01
LEAST_AVERAGED_SIZE = 4_000


@dataclass
class Extremes:
    """The least and greatest number so far; None before the first."""

    range: tuple[float, float] | None = field(default=None)

    def add(self, found: tuple[float, float] | None) -> None:
        if found is None:
            return
        old = self.range or found
        self.range = (min(old[0], found[0]), max(old[1], found[1]))

    @property
    def lowest(self) -> float:
        return self.range[0] if self.range else 0.0

    @property
    def highest(self) -> float:
        return self.range[1] if self.range else 0.0


@dataclass(frozen=True)
class MinMax(RangeMethod):
    """The least and greatest value; with `moving_average` a constant c of the formula above, 0.01 being usual."""

    moving_average: float | None = None

    def __post_init__(self) -> None:
        if self.moving_average is not None and not 0 < self.moving_average <= 1:
            raise InvalidValueError(f"moving_average {self.moving_average}: expected more than 0, at most 1")

    def observer(self, integer: IntFormat, is_symmetric: bool) -> Observer:
        return MinMaxObserver() if self.moving_average is None else MovingAverageObserver(self.moving_average)

    def __str__(self) -> str:
        return "MinMax" if self.moving_average is None else f"MinMax, moving average {self.moving_average:g}"


class MinMaxObserver(Observer):
    def __init__(self) -> None:
        self.extremes = Extremes()

    def observe(self, x: Any) -> None:
        self.extremes.add(extremes(as_float32(x)))

    def merge(self, other: Observer) -> None:
        if not isinstance(other, MinMaxObserver):
            raise mismatch(self, other)
        self.extremes.add(other.extremes.range)

    def result(self) -> TensorRange:
        return TensorRange(self.extremes.lowest, self.extremes.highest, observed=self.extremes.range)


class MovingAverageObserver(Observer):
    is_mergeable = False

    def __init__(self, constant: float) -> None:
        self._constant = constant
        self._average = (0.0, 0.0)
        self._count = 0
        self._sample = Extremes()
        self._all = Extremes()
        self._pending = self._least = 0

    def observe(self, x: Any) -> None:
        values = as_float32(x)
        self._sample.add(extremes(values))
        self._pending += values.size

    def end_of_sample(self) -> None:
        new, self._sample = self._sample.range, Extremes()
        if new is None:
            return
        self._all.add(new)
        self._least = min(self._least or self._pending, self._pending)
        self._pending = 0
        self._count += 1
        c, old = max(self._constant, 1 / self._count), self._average
        self._average = ((1 - c) * old[0] + c * new[0], (1 - c) * old[1] + c * new[1])

    def merge(self, other: Observer) -> None:
        raise InvalidValueError("a moving average depends on the order of samples: observe them one after the other")

    def result(self) -> TensorRange:
        self.end_of_sample()  # of what was observed without an end
        has_enough = self._least >= LEAST_AVERAGED_SIZE
        lowest, highest = self._average if has_enough else (self._all.lowest, self._all.highest)
        return TensorRange(lowest, highest, observed=self._all.range)


def mismatch(observer: Observer, other: Observer) -> InvalidValueError:
    return InvalidValueError(f"{type(other).__name__} cannot be merged into {type(observer).__name__}")
