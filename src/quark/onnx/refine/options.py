"""The options of refining: what is corrected once every scale is known."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CorrectionInputs(str, Enum):
    """Which network's activations go into a layer when its mean error is measured."""

    FLOAT = "float"  # the float network's: only the layer's own rounding counts; never seen to run away
    QUANTIZED = "quantized"  # the quantized network's, layer by layer: runs away on residual networks, hence guarded


@dataclass(frozen=True)
class BiasCorrectionOptions:
    """`sample_limit`: as many of the calibration samples are looked at, evenly spaced; means need few."""

    inputs: CorrectionInputs = CorrectionInputs.FLOAT
    sample_limit: int = 16


@dataclass(frozen=True)
class RefineOptions:
    """None: that algorithm is off."""

    bias_correction: BiasCorrectionOptions | None = None
