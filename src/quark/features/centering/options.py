"""The options of centering."""

from __future__ import annotations

from dataclasses import dataclass

from quark.errors import InvalidValueError
from quark.features.feature import Feature, setting


@dataclass(frozen=True)
class CenteringOptions:
    """`sample_limit` is the largest number of calibration samples that are used, evenly spaced; means need few."""

    sample_limit: int = setting("CenteringSamples", 16, "how many calibration samples means are taken of at most")

    def __post_init__(self) -> None:
        if self.sample_limit < 1:
            raise InvalidValueError(f"CenteringSamples {self.sample_limit}: expected an integer of at least 1")


FEATURE = Feature(
    "centering",
    switch="Centering",
    doc="convolutions read channels that hardly vary around their mean without it, which their bias adds again; "
    "for floats and blocks, which round large numbers more coarsely than small ones",
    options=CenteringOptions,
    nouns={"centering": "layer"},
    data_use="centering takes the means of channels from it",
)
