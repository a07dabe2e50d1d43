"""The options of cross-layer equalization."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quark.errors import InvalidValueError
from quark.features.feature import Feature

FEATURE = Feature("equalization", nouns={"cross-layer equalization": "region"})

CLIP_SAMPLES = 32  # enough samples to show the limits of the channels before a Clip


class ClipTreatment(str, Enum):
    """The treatment of a Clip(0, 6) whose channels are rescaled. Relu and similar operators need none."""

    PER_CHANNEL = "per_channel"  # a bound for each channel: exact, but a Min node, which an NPU may refuse
    CALIBRATED = "calibrated"  # it stays; channels that reach the bound on calibration data are left as they are
    SKIP = "skip"  # nothing is rescaled through it


@dataclass(frozen=True)
class CrossLayerOptions:
    """`steps` -1 goes on until the mean change of the scales is below `settled_at`. A channel whose ranges before and
    behind add up to less than `weight_threshold` stays as it is (0: none does). `has_appended_bias`: the bias counts in
    the range of its channel. `has_bias_absorption`: what a channel always has on top moves from its bias into the
    biases behind it. More than one step evens out weights at the cost of activations, which are rescaled along."""

    steps: int = 1
    has_appended_bias: bool = True
    settled_at: float = 1.9e-7
    weight_threshold: float = 0.5
    clip: ClipTreatment = ClipTreatment.PER_CHANNEL
    has_bias_absorption: bool = False

    @property
    def sample_use(self) -> int:
        """The number of samples that it needs."""
        return CLIP_SAMPLES if self.clip is ClipTreatment.CALIBRATED or self.has_bias_absorption else 0

    def __post_init__(self) -> None:
        if self.steps < -1:
            raise InvalidValueError(f"CLESteps = {self.steps}: expected a number of passes, or -1 until it settles")
