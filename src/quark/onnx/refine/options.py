"""The options of refining: what is corrected once every scale is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from quark.reconstruction.options import TRAINED_OP_TYPES, FitOptions

MOST_ROWS = 32768  # of a layer, over all samples
SMALLEST_MEMORY = 256 << 20  # for rows, however little is allowed


class CorrectionInputs(str, Enum):
    """Which network's activations go into a layer when its mean error is measured."""

    FLOAT = "float"  # the float network's: only the layer's own rounding counts; never seen to run away
    QUANTIZED = "quantized"  # the quantized network's, layer by layer: runs away on residual networks, hence guarded


@dataclass(frozen=True)
class BiasCorrectionOptions:
    """`sample_limit`: as many of the calibration samples are looked at, evenly spaced; means need few."""

    inputs: CorrectionInputs = CorrectionInputs.FLOAT
    sample_limit: int = 16


class Reconstruction(str, Enum):
    """What is fitted together."""

    LAYER = "layer"  # each layer by itself
    BLOCK = "block"  # the layers between two places where the network narrows to one tensor, such as a residual block


@dataclass(frozen=True)
class FinetuneOptions:
    """`data_size`: as many samples are used at most. `memory_limit`: bytes that activations may take in memory, beyond
    which they go to a temporary file; rows are fewer where they would not fit. `is_selective`: a layer is only kept
    where the outputs of the whole network get no worse. `folder`: where finished layers are kept, so that a run that
    was interrupted goes on; None: in the user's own cache."""

    fit: FitOptions = field(default_factory=FitOptions)
    op_types: tuple[str, ...] = TRAINED_OP_TYPES
    data_size: int | None = None
    memory_limit: int = 2 << 30
    infer_device: str = "cpu"
    is_selective: bool = False
    folder: Path | None = None
    reconstruction: Reconstruction = Reconstruction.LAYER

    def rows_per_sample(self, row_numbers: int, samples: int) -> int:
        """How many rows of a layer are taken from each sample."""
        fitting = max(self.memory_limit, SMALLEST_MEMORY) // 4 // (4 * max(1, row_numbers))
        return max(1, min(MOST_ROWS, fitting) // max(1, samples))


@dataclass(frozen=True)
class RefineOptions:
    """None: that algorithm is off."""

    bias_correction: BiasCorrectionOptions | None = None
    finetune: FinetuneOptions | None = None

    @property
    def changes_biases(self) -> bool:
        """That layers without a bias should have one, to take what is found for it."""
        return self.bias_correction is not None or (self.finetune is not None and self.finetune.fit.has_bias)
