"""One step of training: options, loss, optimizers, and the average of the weights.

With several processes, DistributedDataParallel averages the gradients. The running statistics of batch norms, which
each process computes from its own images, are averaged here, so that all processes always have the same network.

Parameters are optimized by kind (`quark.torch.train.parameters`). Steps of LSQ have a rate of their own and the
optimizer of the weights; thresholds of TQT are always optimized by Adam.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from quark.errors import InvalidValueError
from quark.torch.train.parameters import LOG_THRESHOLD_RATE, sort_parameters
from quark.vision.training.evaluation import Batch
from quark.vision.training.processes import Processes

FULL_RATE = "full_rate"  # the key of a group's learning rate before the schedule
STATISTICS = ("running_mean", "running_var")
# buffers are synchronized here; the argument for that was renamed in torch 2.13
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_OWN_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers": False
}


class OptimizerName(str, Enum):
    """The optimizers of the training loop."""

    SGD = "sgd"
    ADAM = "adam"


class Autocast(str, Enum):
    """The type of products in mixed-precision training."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True)
class TrainingOptions:
    """How a network is trained. The defaults suit a trained network that was quantized.

    After equalization its weights have very different sizes, for which only Adam's steps suit all, and the statistics
    of small batches would do harm.

    threshold_learning_rate   of the quantizers; None is 0.01 for logarithms of thresholds (TQT), and `learning_rate`
                              for steps (LSQ)
    warmup                    share of all steps in which the learning rate grows to its full size
    distillation              share of the loss that compares with the float network instead of the labels
    average_decay             decay of a running average of the weights, which is then evaluated and kept
    batch_norm_share          share of all epochs in which batch norms learn; then they are frozen
    patience                  epochs without a better top-1 before training stops
    clip_norm                 gradients are clipped to this norm
    """

    epochs: int = 3
    learning_rate: float = 1e-5
    threshold_learning_rate: float | None = None
    optimizer: OptimizerName = OptimizerName.ADAM
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup: float = 0.02
    label_smoothing: float = 0.0
    distillation: float = 0.0
    temperature: float = 1.0
    average_decay: float | None = None
    batch_norm_share: float = 0.0
    patience: int | None = None
    clip_norm: float | None = None
    autocast: Autocast | None = None
    compiles: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "learning_rate", "temperature"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
        for name in ("momentum", "warmup", "label_smoothing", "distillation", "batch_norm_share"):
            _check(0 <= getattr(self, name) <= 1, name, getattr(self, name), "from 0 to 1")
        _check(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        for name in ("threshold_learning_rate", "patience", "clip_norm"):
            value = getattr(self, name)
            _check(value is None or value > 0, name, value, "more than 0")
        decay = self.average_decay
        _check(decay is None or 0 < decay < 1, "average_decay", decay, "between 0 and 1")


def _check(is_valid: bool, name: str, value: object, expected: str) -> None:
    if not is_valid:
        raise InvalidValueError(f"{name} {value}: expected {expected}")


AUTOCAST_TYPES = {Autocast.BFLOAT16: torch.bfloat16, Autocast.FLOAT16: torch.float16}


class StepTaker:
    """The network with its optimizers. Its state is that of a run between two steps.

    `teacher`, the float network for distillation, is in evaluation mode and on the device of the images.
    """

    def __init__(
        self, model: nn.Module, options: TrainingOptions, processes: Processes, teacher: nn.Module | None = None
    ) -> None:
        self.model = model
        self.average = None if options.average_decay is None else WeightAverage(model, options.average_decay)
        self._options, self._processes = options, processes
        self._teacher = teacher
        self._optimizers = make_optimizers(model, options)
        is_scaled = options.autocast is Autocast.FLOAT16
        self._scaler = torch.amp.GradScaler(processes.device.type, enabled=is_scaled)
        module = model
        if processes.are_many:
            places = [processes.device] if processes.device.type == "cuda" else None
            module = DistributedDataParallel(module, device_ids=places, **_OWN_BUFFERS)
        self._forward: Callable[[Tensor], Tensor] = torch.compile(module) if options.compiles else module

    def take(self, batch: Batch, rate_factor: float) -> Tensor:
        """Learn from a batch, and return the loss."""
        set_rates(self._optimizers, rate_factor)
        images, labels = (tensor.to(self._processes.device, non_blocking=True) for tensor in batch)
        kind = self._options.autocast
        dtype = None if kind is None else AUTOCAST_TYPES[kind]
        with torch.autocast(self._processes.device.type, dtype, enabled=kind is not None):
            loss = self._loss(self._forward(images), images, labels)
        torch.autograd.backward(self._scaler.scale(loss))
        for optimizer in self._optimizers:
            self._scaler.unscale_(optimizer)
        if self._options.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._options.clip_norm)
        for optimizer in self._optimizers:
            self._scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self._scaler.update()
        # SyncBatchNorm has the statistics of all processes already
        norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm) and module.training]
        own = [norm for norm in norms if not isinstance(norm, nn.SyncBatchNorm)]
        statistics = [buffer for norm in own for buffer in (norm.running_mean, norm.running_var) if buffer is not None]
        self._processes.average(statistics)
        if self.average is not None:
            self.average.update(self.model)
        return loss.detach()

    def saved(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
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

    def _loss(self, scores: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """Return (1 - d) CE(scores, labels) + d T^2 KL(softmax(teacher / T) || softmax(scores / T)).

        T^2 keeps the gradient of the second part from shrinking as T grows (arXiv 1503.02531).
        """
        options, scores = self._options, scores.float()
        share = options.distillation if self._teacher is not None else 0.0
        loss = torch.zeros((), device=scores.device)
        if share < 1:
            loss = (1 - share) * functional.cross_entropy(scores, labels, label_smoothing=options.label_smoothing)
        if share > 0:
            assert self._teacher is not None
            with torch.no_grad():
                wanted = functional.log_softmax(self._teacher(images).float() / options.temperature, dim=1)
            log_shares = functional.log_softmax(scores / options.temperature, dim=1)
            distance = functional.kl_div(log_shares, wanted, reduction="batchmean", log_target=True)
            loss = loss + share * (options.temperature**2 * distance)
        return loss


def freeze_batch_norms(model: nn.Module) -> None:
    """Keep the statistics of batch norms as they are until the next `train()`."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def make_optimizers(model: nn.Module, options: TrainingOptions) -> list[Optimizer]:
    """Return one or two optimizers. Every group also has its learning rate under `full_rate`, for the schedule."""
    kinds = sort_parameters(model)
    rate, own = options.learning_rate, options.threshold_learning_rate
    groups = [
        _group(kinds.weights, rate, options.weight_decay),
        _group(kinds.plain, rate),
        _group(kinds.steps, own or rate),
    ]
    groups = [group for group in groups if group["params"]]
    made: list[Optimizer] = []
    if groups and options.optimizer is OptimizerName.ADAM:
        made.append(torch.optim.AdamW(groups, rate))
    elif groups:
        made.append(torch.optim.SGD(groups, rate, options.momentum, nesterov=options.momentum > 0))
    if kinds.thresholds:
        made.append(torch.optim.Adam([_group(kinds.thresholds, own or LOG_THRESHOLD_RATE)]))
    return made


def set_rates(optimizers: Iterable[Optimizer], factor: float) -> None:
    """Set the learning rate of every group to a fraction of its full one."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group[FULL_RATE] * factor


def _group(parameters: list[nn.Parameter], rate: float, decay: float = 0.0) -> dict[str, Any]:
    return {"params": parameters, "lr": rate, FULL_RATE: rate, "weight_decay": decay}


class WeightAverage:
    """A running average of the parameters and the statistics of batch norms: average += (1 - decay) (state - average).

    The decay starts low, at 1/10, so that the first steps do not outweigh the rest. Other state is copied: there is no
    average of two power-of-two scales.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.steps = 0
        self.state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the state after a step of training."""
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
        """Give the model the averages, and afterwards its own state again."""
        own = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
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
        self.state = {name: state[name].to(tensor.device) for name, tensor in self.state.items()}


def rate_factor(step: int, steps: int, warmup: float) -> float:
    """Return the learning rate at `step`, counted from 0, as a fraction: linear warm-up, then half a cosine, never 0.

    >>> [round(rate_factor(step, 4, warmup=0.5), 2) for step in range(4)]
    [0.5, 1.0, 0.85, 0.15]
    """
    rising = min(round(steps * warmup), steps)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising + 0.5) / (steps - rising)))
