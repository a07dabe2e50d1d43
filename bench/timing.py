"""Time things side by side on a noisy machine: the candidates take turns, and each keeps its best turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Worker threads of the candidate before spin for a while, waiting for more; let them go to sleep.
SETTLE_SECONDS = 0.005


@dataclass(frozen=True)
class Timing:
    """Seconds of one candidate over all its turns."""

    best: float
    median: float
    turns: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        return cls(min(seconds), statistics.median(seconds), len(seconds))

    @property
    def spread(self) -> float:
        """How far the median turn is above the best, as a fraction of the best."""
        return self.median / self.best - 1


def take_turns(candidates: dict[str, Callable[[], object]], turns: int = 7, seconds: float = 1.0) -> dict[str, Timing]:
    """Time all candidates, round after round: at least `turns` rounds, and until `seconds` have passed."""
    for run in candidates.values():
        run()  # first touches: pages, caches, lazy set-up
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    start = time.perf_counter()
    rounds = 0
    while rounds < turns or (time.perf_counter() - start < seconds and rounds < 20 * turns):
        for name, run in candidates.items():
            time.sleep(SETTLE_SECONDS)
            run()  # the caches and the processor's clock as they are in a running program
            begin = time.perf_counter()
            run()
            samples[name].append(time.perf_counter() - begin)
        rounds += 1
    return {name: Timing.of(times) for name, times in samples.items()}
