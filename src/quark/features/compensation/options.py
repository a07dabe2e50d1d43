"""The options of compensation."""

from __future__ import annotations

from dataclasses import dataclass

from quark.errors import InvalidValueError
from quark.features.feature import Feature, setting


@dataclass(frozen=True)
class CompensationOptions:
    """`sample_limit` is the largest number of calibration samples that are used, evenly spaced."""

    damping: float = setting(
        "CompensationDamping", 0.01, "what is added to the diagonal of a layer's Gram matrix, as a share of its mean"
    )
    has_activation_order: bool = setting(
        "CompensationActOrder", False, "weights of the largest inputs are rounded first, as long as blocks allow it"
    )
    sample_limit: int = setting("CompensationSamples", 128, "how many calibration samples are used at most")

    def __post_init__(self) -> None:
        if not 0 < self.damping <= 1:
            raise InvalidValueError(
                f"CompensationDamping {self.damping} (GPTQParams.PercDamp): expected a number above 0, up to 1"
            )
        if self.sample_limit < 1:
            raise InvalidValueError(f"CompensationSamples {self.sample_limit}: expected an integer of at least 1")


FEATURE = Feature(
    "compensation",
    switch="Compensation",
    doc="weights make up for each other's rounding, by how the inputs of their layer vary together (GPTQ)",
    options=CompensationOptions,
    nouns={"compensation": "layer"},
)
