"""How long a model takes, measured so that a busy machine disturbs least: the best of several runs.

Noise only ever makes a run slower, so the best is nearest to what the model costs. The first run, which allocates, is
not counted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from quark.evaluate.network import Network

REPEATS = 10
MOST_SECONDS = 2.0


@dataclass(frozen=True)
class Speed:
    """Of the best of `repeats` runs, for one sample of a batch of `batch_size`."""

    ms_per_sample: float
    batch_size: int
    repeats: int


def measure_speed(
    network: Network, inputs: dict[str, NDArray[Any]], repeats: int = REPEATS, most_seconds: float = MOST_SECONDS
) -> Speed:
    """Time a batch: once at least, then as often as asked for and the time allows."""
    network.run(inputs)
    best, done = float("inf"), 0
    end = time.perf_counter() + most_seconds
    while done < max(repeats, 1):
        start = time.perf_counter()
        network.run(inputs)
        stop = time.perf_counter()
        best, done = min(best, stop - start), done + 1
        if stop > end:
            break
    batch_size = len(next(iter(inputs.values())))
    return Speed(1000 * best / max(batch_size, 1), batch_size, done)
