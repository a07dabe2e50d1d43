"""The options of calibrating."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CalibrationOptions:
    """`sample_limit` None takes all that the data has. `cache` None keeps no cache; a folder keeps the ranges there,
    keyed by model, data and settings. Models with more weights than `verdict_limit_bytes` do not run for the verdict;
    None goes by the memory there is."""

    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    sample_limit: int | None = None
    has_random_data: bool = False
    has_symmetric_ranges: bool = False  # every range widened to be even about zero
    memory_limit_bytes: int = 1 << 28  # of activations held at once; larger batches are cut up where the model allows
    verdict_limit_bytes: int | None = None
    cache: Path | None = None
    seed: int = 0
