"""The learning rate over a run: up in a straight line, then down along half a cosine."""

from __future__ import annotations

import math


def rate_factor(step: int, steps: int, warmup: float) -> float:
    """The part of the full learning rate at `step`, counted from 0, of `steps`. Never 0: the last step counts too.

    >>> [round(rate_factor(step, 4, warmup=0.5), 2) for step in range(4)]
    [0.5, 1.0, 0.85, 0.15]
    """
    rising = min(round(steps * warmup), steps)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising + 0.5) / (steps - rising)))
