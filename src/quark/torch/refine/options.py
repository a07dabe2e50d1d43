"""What can be said about correcting biases."""

from __future__ import annotations

from dataclasses import dataclass

from quark.errors import InvalidValueError


@dataclass(frozen=True)
class BiasCorrectionOptions:
    """`samples`: the most that are looked at, the first of the data; means need few."""

    samples: int = 64

    def __post_init__(self) -> None:
        if isinstance(self.samples, bool) or not isinstance(self.samples, int) or self.samples < 1:
            raise InvalidValueError(f"samples {self.samples!r}: expected an integer of at least 1")
