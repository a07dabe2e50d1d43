"""How a network is trained."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quark.errors import InvalidValueError


class OptimizerName(str, Enum):
    """The optimizers that the training loop has."""

    SGD = "sgd"
    ADAM = "adam"


class Autocast(str, Enum):
    """The type that products are computed in while training."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True)
class TrainingOptions:
    """A run of `epochs`; the defaults suit a trained network that was quantized: equalizing left its weights of very
    different sizes, where one learning rate is too high for some and only Adam's steps do not mind, and the statistics
    of small batches would only disturb.

    threshold_learning_rate   of what quantizers learn; None: 0.01 for logarithms of thresholds (TQT), and
                              `learning_rate` for steps (LSQ)
    warmup                    the share of all steps in which the learning rate grows to its full size
    distillation              the share of the loss that compares with the float network instead of the labels
    average_decay             of a running average of the weights, which is then what is judged and kept
    batch_norm_share          the share of all epochs in which batch norms learn; after it they stay as they are
    patience                  epochs without a better top-1 before training stops
    clip_norm                 gradients longer than this are shortened to it
    """

    epochs: int = 3
    learning_rate: float = 1e-5
    threshold_learning_rate: float | None = None
    optimizer: OptimizerName = OptimizerName.ADAM
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup: float = 0.02
    label_smoothing: float = 0.0
    distillation: float = 0.0
    temperature: float = 1.0
    average_decay: float | None = None
    batch_norm_share: float = 0.0
    patience: int | None = None
    clip_norm: float | None = None
    autocast: Autocast | None = None
    compiles: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "learning_rate", "temperature"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
        for name in ("momentum", "warmup", "label_smoothing", "distillation", "batch_norm_share"):
            _check(0 <= getattr(self, name) <= 1, name, getattr(self, name), "from 0 to 1")
        _check(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        for name in ("threshold_learning_rate", "patience", "clip_norm"):
            value = getattr(self, name)
            _check(value is None or value > 0, name, value, "more than 0")
        decay = self.average_decay
        _check(decay is None or 0 < decay < 1, "average_decay", decay, "between 0 and 1")


def _check(is_possible: bool, name: str, value: object, expected: str) -> None:
    if not is_possible:
        raise InvalidValueError(f"{name} {value}: expected {expected}")
