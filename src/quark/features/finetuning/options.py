"""The options of finetuning: how layers are fitted, which, on what samples, and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from quark.features.feature import Feature

FEATURE = Feature("finetuning", nouns={"AdaRound": "layer", "AdaQuant": "layer"}, trains=True)

# the operators whose weights can be fitted, by their names in ONNX
TRAINED_OP_TYPES = ("Conv", "ConvTranspose", "Gemm", "MatMul", "InstanceNormalization", "LayerNormalization")
ROWS_OF_A_SAMPLE = 128  # rows of a batch per sample of the batch
MOST_ROWS = 32768  # rows of a layer, over all samples
ENOUGH_ROWS = 8192  # if iterations are too few to see more
SMALLEST_MEMORY = 256 << 20  # memory for rows, even if the limit is lower


class Algorithm(str, Enum):
    """The way in which weights are learned."""

    ADAROUND = "adaround"
    ADAQUANT = "adaquant"


class Reconstruction(str, Enum):
    """The unit that is fitted together."""

    LAYER = "layer"  # each layer by itself
    BLOCK = "block"  # the layers between two places where the network narrows to one tensor, such as a residual block


@dataclass(frozen=True)
class FitOptions:
    """How a layer is fitted.

    `batch_rows` rows make a batch, and `batches` of them an iteration. If `learning_rate` is None, it is derived from
    the distance between the numbers that weights are rounded to. `drop_ratio` is the share of a layer's inputs that
    come from the quantized network; the others come from the float network. `lr_adjust` is (error, rate): the rate for
    layers whose relative error before training is above that error. The last three belong to AdaRound.
    """

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


@dataclass(frozen=True)
class FinetuneOptions:
    """What is finetuned.

    At most `data_size` samples are used. Activations beyond `memory_limit` bytes go to a temporary file, and fewer rows
    are used if they would not fit. With `is_selective`, a layer is only kept if the outputs of the whole network do not
    get worse. Finished layers are kept in `folder` (None: the user's cache), so that an interrupted run can go on.

    `output_index` is the output by which the network as a whole is judged; None: by all of them. `reference` is a file
    with the float network to come close to, instead of the one that is quantized. With `is_parallel`, layers see the
    quantized network as it was before finetuning, and know nothing of each other. With `is_largest_only`, only the
    layer that takes the most memory is finetuned, to see whether the memory suffices.
    """

    fit: FitOptions = field(default_factory=FitOptions)
    op_types: tuple[str, ...] = TRAINED_OP_TYPES
    data_size: int | None = None
    memory_limit: int = 2 << 30
    infer_device: str = "cpu"
    is_selective: bool = False
    folder: Path | None = None
    reconstruction: Reconstruction = Reconstruction.LAYER
    output_index: int | None = None
    reference: Path | None = None
    is_parallel: bool = False
    is_largest_only: bool = False

    def rows_per_sample(self, row_numbers: int, samples: int) -> int:
        """The number of rows of a layer that are taken from each sample."""
        fitting = max(self.memory_limit, SMALLEST_MEMORY) // 4 // (4 * max(1, row_numbers))
        seen = self.fit.iterations * self.fit.batch_rows * self.fit.batches if self.fit.batches > 0 else MOST_ROWS
        return max(1, min(MOST_ROWS, fitting, max(seen, ENOUGH_ROWS)) // max(1, samples))
