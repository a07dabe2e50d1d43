"""The options of fitting a layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# the operators whose weights can be fitted, by their names in ONNX
TRAINED_OP_TYPES = ("Conv", "ConvTranspose", "Gemm", "MatMul", "InstanceNormalization", "LayerNormalization")
ROWS_OF_A_SAMPLE = 128  # of a batch, for each sample that it is said to have


class Algorithm(str, Enum):
    ADAROUND = "adaround"
    ADAQUANT = "adaquant"


@dataclass(frozen=True)
class FitOptions:
    """`batch_rows` rows make a batch, `batches` of them an iteration. `learning_rate` None: found from the distance of
    the numbers that weights are rounded to. `drop_ratio`: the share of a layer's inputs that are those of the quantized
    network; the others are the float network's. `lr_adjust`: (error, rate), the rate for layers whose relative error is
    above that before training. The last four are AdaRound's own."""

    algorithm: Algorithm = Algorithm.ADAROUND
    iterations: int = 1000
    learning_rate: float | None = 0.1
    batch_rows: int = 128
    batches: int = 1
    has_early_stop: bool = False
    has_bias: bool = True
    has_output_rounding: bool = False
    drop_ratio: float = 1.0
    lr_adjust: tuple[float, float] | None = None
    log_period: int = 100
    device: str = "cpu"
    seed: int = 1705472343
    regularization: float = 0.01
    beta_range: tuple[float, float] = (20.0, 2.0)
    warm_start: float = 0.2
