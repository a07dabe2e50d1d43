"""Losses that are no numbers: noticed without waiting for the device at every step.

The step of the first one is remembered where the loss lies, and fetched every few steps. All processes ask at the
same steps, and so stop together: gradients are shared, a NaN of one is everyone's at the next step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quark.errors import QuarkError
from quark.vision.training.processes import Processes

EVERY_STEPS = 20
_NONE = 1 << 60


class DivergedError(QuarkError, ArithmeticError):
    """The loss became infinite or NaN; what was best before is kept."""


class LossWatch:
    """The losses of an epoch: their mean, and the first that is no number."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._first = torch.full((), _NONE, dtype=torch.int64, device=processes.device)
        self._sum = torch.zeros((), dtype=torch.float64, device=processes.device)
        self._steps = 0

    def see(self, loss: Tensor) -> None:
        """The next one."""
        seen = loss.detach()
        number = torch.full_like(self._first, self._steps)
        is_bad = ~torch.isfinite(seen) & (self._first == _NONE)
        self._first = torch.where(is_bad, number, self._first)
        self._sum += seen
        self._steps += 1

    @property
    def is_due(self) -> bool:
        return self._steps % EVERY_STEPS == 0

    def first_bad(self) -> int | None:
        """The step, from 0, of the first loss that is no number, in any process."""
        first = min(self._processes.gathered(int(self._first)))
        return None if first == _NONE else first

    def mean(self) -> float:
        """Over all steps and processes."""
        total, steps = self._processes.sums([float(self._sum), float(self._steps)])
        return total / max(steps, 1)
