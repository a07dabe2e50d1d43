"""What every calibration method is: a value that makes observers.

    method     a frozen dataclass of the method's own settings; its text is the name that reports print
    observer   gathers what the method needs of one tensor, batch by batch, and gives a range in the end

An observer sees the data once (`observe`) or twice (then `observe_again`, all of it once more). It holds a few numbers
or a histogram, never the data. Two observers of two halves of the data merge into what one observer of all would be:
merge after the first pass, go on with deep copies of the merged one, and merge those after the second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from quark.errors import InvalidValueError
from quark.formats.spec import IntFormat


@dataclass(frozen=True)
class TensorRange:
    """The numbers that a tensor's codes should cover, lowest <= highest, within what was observed. `position` comes
    with the power-of-two methods: the scale is 2^-position. `method` names the method where it is another than the
    one that was asked for, and `observed` are the extremes of the data where a method has seen them."""

    lowest: float
    highest: float
    position: int | None = None
    method: str = field(default="", repr=False, compare=False)
    observed: tuple[float, float] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.lowest <= self.highest:
            raise InvalidValueError(f"range {self.lowest}..{self.highest}: expected two numbers in order")


class Observer(ABC):
    """The statistics of one tensor. Nothing observed gives the range 0..0."""

    needs_second_pass: bool = False
    is_mergeable: bool = True  # False where the order of samples matters

    @abstractmethod
    def observe(self, x: Any) -> None:
        """Take in a piece of the data, an array of any shape; NaN and Inf are refused."""

    def end_of_sample(self) -> None:  # noqa: B027 - most methods do not care where a sample ends
        """What was observed since the last call was one sample."""

    def observe_again(self, x: Any) -> None:
        """The second pass over the same data."""
        raise InvalidValueError(f"{type(self).__name__} sees the data once: needs_second_pass is False")

    @abstractmethod
    def merge(self, other: Observer) -> None:
        """Take in what another observer of the same settings has gathered."""

    @abstractmethod
    def result(self) -> TensorRange:
        """The range, once all data were observed as often as needed."""


class RangeMethod(ABC):
    """A way to find the range of a tensor from its values. Subclasses are frozen dataclasses."""

    @abstractmethod
    def observer(self, integer: IntFormat, is_symmetric: bool) -> Observer:
        """A new observer for codes of that format; `is_symmetric`: the range will be made even about zero."""

    @abstractmethod
    def __str__(self) -> str: ...
