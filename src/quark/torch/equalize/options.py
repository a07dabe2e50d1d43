"""What can be said about equalizing."""

from __future__ import annotations

from dataclasses import dataclass

from quark.errors import InvalidValueError


@dataclass(frozen=True)
class CrossLayerOptions:
    """`steps` sweeps over all pairs of layers; -1: until they settle. More than one evens out weights at the cost of
    activations, which are rescaled along."""

    steps: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or (self.steps < 1 and self.steps != -1):
            raise InvalidValueError(f"steps {self.steps!r}: expected 1 or more, or -1 to go on until they settle")
