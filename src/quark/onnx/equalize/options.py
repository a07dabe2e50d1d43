"""The options of equalizing: rescaling between layers that leaves the network's function as it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quark.errors import InvalidValueError


class ClipTreatment(str, Enum):
    """What happens to a Clip(0, 6) whose channels are rescaled; only Relu and its like scale along by themselves."""

    PER_CHANNEL = (
        "per_channel"  # its bound becomes one for each channel: exact, but a Min node, which an NPU may refuse
    )
    CALIBRATED = "calibrated"  # it stays; channels that reach the bound on calibration data are left as they are
    SKIP = "skip"  # nothing is rescaled through it


CLIP_SAMPLES = 32  # so many show where the channels before a Clip end


@dataclass(frozen=True)
class CrossLayerOptions:
    """Cross-layer equalization. `steps` -1 goes on until the mean change of the scales is below `settled_at`.
    A channel whose ranges before and behind add up to less than `weight_threshold` stays as it is (0: none does).
    `has_appended_bias`: the bias counts in the range of its channel. `has_bias_absorption`: what a channel always has
    on top moves from its bias into the biases behind it."""

    steps: int = 1
    has_appended_bias: bool = True
    settled_at: float = 1.9e-7
    weight_threshold: float = 0.5
    clip: ClipTreatment = ClipTreatment.PER_CHANNEL
    has_bias_absorption: bool = False

    @property
    def sample_use(self) -> int:
        """How many samples it has a use for."""
        return CLIP_SAMPLES if self.clip is ClipTreatment.CALIBRATED or self.has_bias_absorption else 0

    def __post_init__(self) -> None:
        if self.steps < -1:
            raise InvalidValueError(f"CLESteps = {self.steps}: expected a number of passes, or -1 until it settles")


@dataclass(frozen=True)
class SmoothOptions:
    """SmoothQuant: `alpha` is the share of the difficulty that moves from activations to weights, 0 to 1; None searches
    for the best one of each layer."""

    alpha: float | None = 0.5

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise InvalidValueError(f"SmoothAlpha = {self.alpha}: expected a number from 0 to 1, or 'auto'")


@dataclass(frozen=True)
class EqualizeOptions:
    """None: that algorithm is off."""

    cross_layer: CrossLayerOptions | None = None
    smooth: SmoothOptions | None = None
