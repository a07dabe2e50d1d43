"""The options of SmoothQuant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quark.errors import InvalidValueError
from quark.features.feature import Feature

OUTLIERS = "outlier channels in float"
FEATURE = Feature("smooth_quant", nouns={"SmoothQuant": "group", OUTLIERS: "group"})

SMOOTH_SAMPLES = 128  # from the given samples; an ONNX run spaces them evenly


@dataclass(frozen=True)
class SmoothOptions:
    """`alpha` is the share of the difficulty that moves from activations to weights, 0 to 1; None searches for the best
    one for each layer.

    The others are for language models. No scale is smaller than `least_scale`. `groups` are groups of layers by name
    (`quark.torch.language.named_groups`), all that are found if empty; `decoder_layers` is the path of the list of
    layers, if it is not to be found. `error_power` is that of the differences of outputs that the search minimizes.
    """

    alpha: float | None = 0.5
    least_scale: float = 1e-3
    groups: tuple[Any, ...] = ()
    decoder_layers: str = ""
    error_power: float = 2.0

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise InvalidValueError(f"SmoothAlpha = {self.alpha}: expected a number from 0 to 1, or 'auto'")
