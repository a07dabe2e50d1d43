"""One step of training: forward, backward, and every optimizer once.

Under several processes DistributedDataParallel averages the gradients; the running statistics of batch norms, which
each process finds on its own images, are averaged here, so that all processes always have the same network.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from quark.vision.training.averaging import WeightAverage
from quark.vision.training.data import Batch
from quark.vision.training.groups import make_optimizers, set_rates
from quark.vision.training.objective import Objective
from quark.vision.training.options import Autocast, TrainingOptions
from quark.vision.training.processes import Processes

# buffers are sent by us; how to ask for that was renamed in torch 2.13
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_OWN_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers": False
}
AUTOCAST_TYPES = {Autocast.BFLOAT16: torch.bfloat16, Autocast.FLOAT16: torch.float16}


class StepTaker:
    """The optimizers of a network, and what they need; its state is that of a run between two steps."""

    def __init__(
        self, model: nn.Module, options: TrainingOptions, processes: Processes, teacher: nn.Module | None = None
    ) -> None:
        self.model = model
        self.average = None if options.average_decay is None else WeightAverage(model, options.average_decay)
        self._options, self._processes = options, processes
        self._objective = Objective.of(options, teacher)
        self._optimizers = make_optimizers(model, options)
        is_scaled = options.autocast is Autocast.FLOAT16
        self._scaler = torch.amp.GradScaler(processes.device.type, enabled=is_scaled)
        self._forward = self._wrapped()

    def take(self, batch: Batch, rate_factor: float) -> Tensor:
        """Learn from a batch; the loss."""
        set_rates(self._optimizers, rate_factor)
        images, labels = (each.to(self._processes.device, non_blocking=True) for each in batch)
        kind = self._options.autocast
        dtype = None if kind is None else AUTOCAST_TYPES[kind]
        with torch.autocast(self._processes.device.type, dtype, enabled=kind is not None):
            loss = self._objective.loss(self._forward(images), images, labels)
        torch.autograd.backward(self._scaler.scale(loss))
        self._update()
        self._processes.average(_statistics(self.model))
        if self.average is not None:
            self.average.update(self.model)
        return loss.detach()

    def saved(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizers": [each.state_dict() for each in self._optimizers],
            "scaler": self._scaler.state_dict(),
            "average": None if self.average is None else self.average.saved(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self._optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(saved["scaler"])
        if self.average is not None:
            self.average.restore(saved["average"])

    def _update(self) -> None:
        for optimizer in self._optimizers:
            self._scaler.unscale_(optimizer)
        if self._options.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._options.clip_norm)
        for optimizer in self._optimizers:
            self._scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self._scaler.update()

    def _wrapped(self) -> Callable[[Tensor], Tensor]:
        module: nn.Module = self.model
        if self._processes.are_many:
            device = self._processes.device
            places = [device] if device.type == "cuda" else None
            module = DistributedDataParallel(module, device_ids=places, **_OWN_BUFFERS)
        compiled: Callable[[Tensor], Tensor] = torch.compile(module) if self._options.compiles else module
        return compiled


def freeze_batch_norms(model: nn.Module) -> None:
    """Their statistics stay as they are until the next `train()`."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def _statistics(model: nn.Module) -> list[Tensor]:
    """Of all batch norms that learn; SyncBatchNorm has those of all processes already."""
    norms = [each for each in model.modules() if isinstance(each, _BatchNorm) and each.training]
    own = [each for each in norms if not isinstance(each, nn.SyncBatchNorm)]
    return [buffer for each in own for buffer in (each.running_mean, each.running_var) if buffer is not None]
