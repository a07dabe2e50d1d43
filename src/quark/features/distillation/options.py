"""The options of distillation."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from quark.errors import InvalidValueError, MissingDependencyError
from quark.features.feature import Feature, setting


@dataclass(frozen=True)
class DistillationOptions:
    """`rate_share` is relative to what rounding changes the weights of the median layer by, so that similar numbers fit
    formats whose best learning rates differ a hundredfold. Every eighth of the samples says when to stop."""

    steps: int = setting("DistillationSteps", 1000, "how many batches the network is trained on")
    sample_limit: int = setting("DistillationSamples", 1000, "how many calibration samples are used at most")
    batch_size: int = setting("DistillationBatch", 48, "samples in a batch")
    rate_share: float = setting(
        "DistillationRate",
        0.005,
        "the learning rate, as a share of what rounding changes weights by (the median layer)",
    )
    feature_weight: float = setting(
        "DistillationFeatures", 0.1, "how much the relative error of residual sums counts beside that of the outputs"
    )
    mixed_share: float = setting(
        "DistillationMixing", 0.5, "the share of batches in which each sample is mixed with another one"
    )
    augmentation: str = setting(
        "DistillationAugmentation",
        "auto",
        "images: samples are cut, mirrored and recoloured at random; none; auto: where every input is a batch of "
        "colour images",
    )
    unrounded_share: float = setting(
        "DistillationUnrounded",
        0.0,
        "the share of the numbers of activations that a training step leaves unrounded, drawn at random",
    )
    device: str = setting("DistillationDevice", "cpu", "where it trains: cpu, cuda, cuda:1 ...")
    seed: int = setting("DistillationSeed", 1705472343, "decides which samples are in which batch, and how they mix")
    folder: str = setting(
        "DistillationFolder",
        "",
        "keeps the state of training, so that the same run goes on there; '': the user's cache",
    )

    def __post_init__(self) -> None:
        if find_spec("torch") is None:
            raise MissingDependencyError("Distillation trains with torch, which is not installed: pip install torch")
        for name, value, least in (
            ("Steps", self.steps, 1),
            ("Batch", self.batch_size, 1),
            ("Samples", self.sample_limit, 16),
        ):
            if value < least:
                raise InvalidValueError(f"Distillation{name} {value}: expected an integer of at least {least}")
        if not 0 < self.rate_share <= 1:
            raise InvalidValueError(f"DistillationRate {self.rate_share}: expected a number above 0, up to 1")
        if not 0 <= self.mixed_share <= 1:
            raise InvalidValueError(f"DistillationMixing {self.mixed_share}: expected a number from 0 to 1")
        if not 0 <= self.unrounded_share < 1:
            raise InvalidValueError(
                f"DistillationUnrounded {self.unrounded_share}: expected a number of at least 0, below 1"
            )
        if self.augmentation not in ("auto", "images", "none"):
            raise InvalidValueError(f"DistillationAugmentation '{self.augmentation}': expected auto, images or none")
        if self.feature_weight < 0:
            raise InvalidValueError(f"DistillationFeatures {self.feature_weight}: expected a number of at least 0")
        if self.folder and Path(self.folder).is_file():
            raise InvalidValueError(f"DistillationFolder '{self.folder}': it is a file, expected a folder")


FEATURE = Feature(
    "distillation",
    switch="Distillation",
    doc="all weights are trained together, with quantizers, so that the outputs are those of the float network",
    options=DistillationOptions,
    nouns={"distillation": "constant"},
    trains=True,
)
