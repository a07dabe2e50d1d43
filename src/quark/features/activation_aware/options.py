"""The options of AWQ."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from quark.errors import InvalidValueError
from quark.features.feature import Feature, setting


@dataclass(frozen=True)
class ActivationAwareOptions:
    """`sample_limit` is the largest number of calibration samples that are used, evenly spaced."""

    has_scales: bool = setting(
        "AWQScales", True, "channels of inputs are rescaled, so that weights of large inputs are rounded more finely"
    )
    has_clipping: bool = setting(
        "AWQClip", True, "scales of weights are searched for the least error of the layer's outputs"
    )
    sample_limit: int = setting("AWQSamples", 128, "how many calibration samples are used at most")

    def __post_init__(self) -> None:
        if self.sample_limit < 1:
            raise InvalidValueError(f"AWQSamples {self.sample_limit}: expected an integer of at least 1")


@dataclass(frozen=True)
class LanguageScalingOptions(ActivationAwareOptions):
    """Further options for language models: groups of layers by name (if empty, all groups of the model), and the path
    of the list of layers, if it should not be detected. See `quark.torch.language.named_groups.NamedGroup`."""

    sample_limit: int = sys.maxsize
    groups: tuple[Any, ...] = ()
    decoder_layers: str = ""


FEATURE = Feature(
    "activation_aware",
    switch="AWQ",
    doc="weights of large inputs are scaled up before they are rounded, and scales are searched (AWQ)",
    options=ActivationAwareOptions,
    nouns={"AWQ": "group", "AWQ ranges": "layer"},
    data_use="AWQ scales weights by the size of their layer's inputs",
)
