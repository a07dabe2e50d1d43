"""The options of compensation."""

from __future__ import annotations

import sys
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


@dataclass(frozen=True)
class LanguageCompensationOptions(CompensationOptions):
    """What else there is for language models.

    `float_share` is the share of the difference between the float network's inputs and those that a layer gets
    which its weights make up for: 0 is the GPTQ of the paper, 1 Qronos, GPTAQ is in between.
    `is_damping_of_largest`: damping is a share of the largest eigenvalue instead. `block_size` columns are rounded
    before others are updated. Without `has_static_groups` the scale of a group is found when its turn comes.
    `searches_scales`: scales are searched for the least error. Without `has_compensation` nothing else is done.
    `sweeps` improve the result column by column. `modules` are paths in a layer, all if empty; `decoder_layers` is
    the path of the list of layers, if it is not to be found.
    """

    sample_limit: int = sys.maxsize
    float_share: float = 0.0
    is_damping_of_largest: bool = False
    block_size: int = 128
    has_static_groups: bool = True
    searches_scales: bool = True
    has_compensation: bool = True
    sweeps: int = 1
    modules: tuple[str, ...] = ()
    decoder_layers: str = ""

    @property
    def needs_exact_inputs(self) -> bool:
        """True if the float network has to be followed."""
        return self.float_share > 0


FEATURE = Feature(
    "compensation",
    switch="Compensation",
    doc="weights make up for each other's rounding, by how the inputs of their layer vary together (GPTQ)",
    options=CompensationOptions,
    nouns={"compensation": "layer"},
    data_use="GPTQ rounds weights by how the inputs of their layer vary together",
)
