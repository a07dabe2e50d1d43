"""The options of refitting."""

from __future__ import annotations

from dataclasses import dataclass

from quark.errors import InvalidValueError
from quark.features.feature import Feature, setting


@dataclass(frozen=True)
class RefittingOptions:
    """`sample_limit` is the largest number of calibration samples that are used, evenly spaced."""

    sample_limit: int = setting("RefitSamples", 64, "how many calibration samples are used at most")

    def __post_init__(self) -> None:
        if self.sample_limit < 1:
            raise InvalidValueError(f"RefitSamples {self.sample_limit}: expected an integer of at least 1")


FEATURE = Feature(
    "refitting",
    switch="Refit",
    doc="weights and biases are fitted again by least squares, layer by layer, to what the quantized network hands them",
    options=RefittingOptions,
    nouns={"refitting": "layer"},
    data_use="refitting compares the inputs of layers in the quantized and in the float network",
)
