"""The options of bias correction, for either road."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quark.errors import InvalidValueError
from quark.features.feature import Feature

FEATURE = Feature("bias_correction", nouns={"bias correction": "layer"})


class CorrectionInputs(str, Enum):
    """The network whose activations are a layer's input when its mean error is measured."""

    FLOAT = "float"  # the float network's: only the layer's own rounding counts; never seen to diverge
    QUANTIZED = "quantized"  # the quantized network's, layer by layer: diverges on residual networks, hence guarded


@dataclass(frozen=True)
class BiasCorrectionOptions:
    """`sample_limit` is the largest number of calibration samples that are used, evenly spaced; means need few."""

    inputs: CorrectionInputs = CorrectionInputs.FLOAT
    sample_limit: int = 16


@dataclass(frozen=True)
class TorchBiasCorrectionOptions:
    """`samples` is the largest number of samples that are used, the first of the data."""

    samples: int = 64

    def __post_init__(self) -> None:
        if isinstance(self.samples, bool) or not isinstance(self.samples, int) or self.samples < 1:
            raise InvalidValueError(f"samples {self.samples!r}: expected an integer of at least 1")
