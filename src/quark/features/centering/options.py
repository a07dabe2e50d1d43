"""The options of centering."""

from __future__ import annotations

from dataclasses import dataclass

from quark.features.feature import Feature


@dataclass(frozen=True)
class CenteringOptions:
    """`sample_limit` is the largest number of calibration samples that are used, evenly spaced; means need few."""

    sample_limit: int = 16


FEATURE = Feature(
    "centering",
    switch="Centering",
    doc="convolutions read nearly constant channels with the mean subtracted, and their bias adds it back; for floats "
    "and blocks, which round large numbers more coarsely than small ones",
    options=CenteringOptions,
    nouns={"centering": "layer"},
    data_use="centering takes the means of channels from it",
)
