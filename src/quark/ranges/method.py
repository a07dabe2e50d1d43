"""The interface of calibration methods, and the simplest one, MinMax.

    method     a frozen dataclass of the method's settings; its text is the name that reports print
    observer   collects what the method needs of one tensor, batch by batch, and returns a range at the end

An observer sees the data once (`observe`), twice (then `observe_again`, all of it once more) or three times (then
`observe_finally`). It stores a few numbers or a histogram, never the data. Observers of two halves of the data merge
into what one observer of all of it would be: merge after each pass, and begin the next one with deep copies of the
merged observer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from quark.errors import InvalidValueError
from quark.formats.spec import IntFormat
from quark.ranges.statistics import as_float32, extremes


@dataclass(frozen=True)
class TensorRange:
    """The numbers that a tensor's codes should cover, lowest <= highest, within the observed data. The power-of-two
    methods also set `position`: the scale is 2^-position. `method` is set if it is not the method that was asked for,
    and `observed` holds the extremes of the data if the method saw them."""

    lowest: float
    highest: float
    position: int | None = None
    method: str = field(default="", repr=False, compare=False)
    observed: tuple[float, float] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.lowest <= self.highest:
            raise InvalidValueError(f"range {self.lowest}..{self.highest}: expected two numbers in order")


class Observer(ABC):
    """The statistics of one tensor. Without any data the range is 0..0."""

    needs_second_pass: bool = False
    needs_third_pass: bool = False  # only after a second one
    is_mergeable: bool = True  # False if merging is not exact, since the order of samples matters

    @abstractmethod
    def observe(self, x: Any) -> None:
        """Add a piece of the data, an array of any shape. NaN and Inf are refused."""

    def end_of_sample(self) -> None:  # noqa: B027 - most methods do not care where a sample ends
        """Mark the end of a sample: everything observed since the last call."""

    def observe_again(self, x: Any) -> None:
        """Add a piece of the data in the second pass."""
        raise InvalidValueError(f"{type(self).__name__} sees the data once: needs_second_pass is False")

    def observe_finally(self, x: Any) -> None:
        """Add a piece of the data in the third pass."""
        raise InvalidValueError(f"{type(self).__name__} sees the data at most twice: needs_third_pass is False")

    @abstractmethod
    def merge(self, other: Observer) -> None:
        """Add what another observer with the same settings has collected."""

    @abstractmethod
    def result(self) -> TensorRange:
        """Return the range, after all passes over the data."""

    def __str__(self) -> str:
        return type(self).__name__


class RangeMethod(ABC):
    """A way to find the range of a tensor from its values. Subclasses are frozen dataclasses."""

    @abstractmethod
    def observer(self, integer: IntFormat, is_symmetric: bool) -> Observer:
        """Return a new observer for codes of that format. `is_symmetric`: the range will be made even about zero."""

    def __str__(self) -> str:
        return type(self).__name__


MOVING_AVERAGE_CONSTANT = 0.01
LEAST_AVERAGED_SIZE = 4_000


@dataclass
class Extremes:
    """The smallest and largest number so far; None before the first."""

    range: tuple[float, float] | None = None

    def add(self, new: tuple[float, float] | None) -> None:
        if new is not None:
            old = self.range or new
            self.range = (min(old[0], new[0]), max(old[1], new[1]))

    @property
    def lowest(self) -> float:
        return self.range[0] if self.range else 0.0

    @property
    def highest(self) -> float:
        return self.range[1] if self.range else 0.0


@dataclass(frozen=True)
class MinMax(RangeMethod):
    """The smallest and largest value; or with `moving_average`, usually 0.01, an average of the samples' ranges:

        range = (1 - c) * range + c * range of the n-th sample,        c = max(moving_average, 1/n)

    1/n makes the first samples count equally; a constant c from the start would keep the range close to that of the
    first sample. The average suppresses outliers of single samples. It depends on their order, so that two halves merge
    into nearly, but not exactly, what one observer of all would be. The extreme of n values lies near the quantile
    1 - 1/n, so about one value in n is clipped. With samples of fewer than LEAST_AVERAGED_SIZE values that is too many,
    and the whole range is used.
    """

    moving_average: float | None = None

    def __post_init__(self) -> None:
        if self.moving_average is not None and not 0 < self.moving_average <= 1:
            raise InvalidValueError(f"moving_average {self.moving_average}: expected more than 0, at most 1")

    def observer(self, integer: IntFormat, is_symmetric: bool) -> Observer:
        return MinMaxObserver() if self.moving_average is None else MovingAverageObserver(self.moving_average)

    def __str__(self) -> str:
        return "MinMax" if self.moving_average is None else f"MinMax, moving average {self.moving_average:g}"


class MinMaxObserver(Observer):
    """The extremes of all data."""

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
    """The moving average of the samples' extremes."""

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
        """Average both, by their numbers of samples. Up to 1/c samples that is the average of all of them, in any
        order; beyond, later samples of each half count for more."""
        if not isinstance(other, MovingAverageObserver):
            raise mismatch(self, other)
        self.end_of_sample()
        other.end_of_sample()
        if not other._count:
            return
        total = self._count + other._count
        low, high = (
            (self._count * own + other._count * more) / total
            for own, more in zip(self._average, other._average, strict=True)
        )
        self._least = min(self._least or other._least, other._least)
        self._average, self._count = (low, high), total
        self._all.add(other._all.range)

    def result(self) -> TensorRange:
        self.end_of_sample()  # in case the caller did not
        has_enough = self._least >= LEAST_AVERAGED_SIZE
        lowest, highest = self._average if has_enough else (self._all.lowest, self._all.highest)
        return TensorRange(lowest, highest, observed=self._all.range)


def mismatch(observer: Observer, other: Observer) -> InvalidValueError:
    """The error for merging observers of different kinds."""
    return InvalidValueError(f"{other} cannot be merged into {observer}")
