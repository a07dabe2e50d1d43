"""A running average of everything that a network learns, which is steadier than its last state.

    average <- average + (1 - decay) (state - average)

The decay begins low, at 1/10, so that the first steps do not weigh as much as all that follow. Parameters and the
statistics of batch norms are averaged; all else is copied: between two scales that are powers of two, there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

STATISTICS = ("running_mean", "running_var")


class WeightAverage:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.steps = 0
        self.state = {name: each.detach().clone() for name, each in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """After each step of training."""
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        self.steps += 1
        parameters = {name for name, _ in model.named_parameters()}
        for name, value in model.state_dict().items():
            if name in parameters or name.endswith(STATISTICS):
                self.state[name].lerp_(value, 1 - decay)
            else:
                self.state[name].copy_(value)

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Within it, the model has the averages; after it, its own state again."""
        own = {name: each.detach().clone() for name, each in model.state_dict().items()}
        model.load_state_dict(self.state)
        try:
            yield
        finally:
            model.load_state_dict(own)

    def saved(self) -> dict[str, int | dict[str, Tensor]]:
        return {"steps": self.steps, "state": self.state}

    def restore(self, saved: dict[str, int | dict[str, Tensor]]) -> None:
        steps, state = saved["steps"], saved["state"]
        assert isinstance(steps, int)
        assert isinstance(state, dict)
        self.steps = steps
        self.state = {name: state[name].to(each.device) for name, each in self.state.items()}
