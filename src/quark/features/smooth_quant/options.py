"""The options of SmoothQuant."""

from __future__ import annotations

from dataclasses import dataclass

from quark.errors import InvalidValueError
from quark.features.feature import Feature

FEATURE = Feature("smooth_quant", nouns={"SmoothQuant": "group"})

SMOOTH_SAMPLES = 128  # of those given; an ONNX run spaces them evenly


@dataclass(frozen=True)
class SmoothOptions:
    """`alpha` is the share of the difficulty that moves from activations to weights, 0 to 1; None searches for the best
    one for each layer."""

    alpha: float | None = 0.5

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise InvalidValueError(f"SmoothAlpha = {self.alpha}: expected a number from 0 to 1, or 'auto'")
