"""The training loop: epochs of steps, an evaluation on held-out data after each, and the best network at the end.

Epoch 0 is the network before training, which is returned if training only makes it worse. Randomness depends only on
the seed, the epoch and the rank, so that a resumed run ends, on the CPU, with the same bits as an uninterrupted one.

With torchrun, every process calls this with its own part of the data; the first writes the files.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quark.errors import InvalidValueError, QuarkError
from quark.onnx.progress import Advance, track
from quark.vision.tensor_file import BEST, LAST, load_checkpoint, save_checkpoint
from quark.vision.training.evaluation import HeldOutData, Scores, TrainingData, evaluate_module
from quark.vision.training.processes import Processes
from quark.vision.training.step import StepTaker, TrainingOptions, freeze_batch_norms, rate_factor

EVERY_STEPS = 20
DISTILLATION = 0.9  # the share of the loss, if a teacher is given and no share
_NONE = 1 << 60


@dataclass(frozen=True)
class EpochResult:
    """Accuracies as fractions; `loss` is the mean of the epoch, None before the first."""

    epoch: int
    top1: float
    top5: float
    loss: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class TrainingResult:
    """`history` begins with epoch 0; `is_stopped_early` is True if patience ran out."""

    history: tuple[EpochResult, ...]
    is_stopped_early: bool = False

    @property
    def best(self) -> EpochResult:
        """The first epoch with the best top-1."""
        return max(self.history, key=lambda result: result.top1)


class DivergedError(QuarkError, ArithmeticError):
    """The loss became infinite or NaN; the best earlier network is kept."""


class LossWatch:
    """The losses of an epoch: their mean, and the first NaN or infinity.

    The step of the first bad loss is stored on the device and fetched every few steps, so that training does not wait
    for the device at every step. All processes fetch at the same steps, and so stop together.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._first = torch.full((), _NONE, dtype=torch.int64, device=processes.device)
        self._sum = torch.zeros((), dtype=torch.float64, device=processes.device)
        self._steps = 0

    def see(self, loss: Tensor) -> None:
        """Add the loss of the next step."""
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
        """Return the step, from 0, of the first NaN or infinity in any process, if there is one."""
        first = min(self._processes.gathered(int(self._first)))
        return None if first == _NONE else first

    def mean(self) -> float:
        """Return the mean over all steps and processes."""
        total, steps = self._processes.sums([float(self._sum), float(self._steps)])
        return total / max(steps, 1)


class Trainer:
    """Trains `model` in place on the device of `processes`, and restores the best state at the end.

    best.pt and last.pt are written to `folder`; `teacher` is the float network for distillation, which makes up 0.9 of
    the loss unless the options say another share; `report` is called after each epoch.
    """

    def __init__(
        self,
        model: nn.Module,
        options: TrainingOptions,
        folder: Path,
        processes: Processes | None = None,
        teacher: nn.Module | None = None,
        report: Callable[[EpochResult], None] | None = None,
    ) -> None:
        if options.distillation and teacher is None:
            raise InvalidValueError(f"distillation {options.distillation} without a teacher: give the float network")
        if teacher is not None and not options.distillation:
            options = replace(options, distillation=DISTILLATION)
        self.model, self.options, self.folder = model, options, folder
        self.processes = processes or Processes()
        self._report = report or (lambda _: None)
        device = self.processes.device
        teacher = None if teacher is None else teacher.to(device).eval()
        self._steps = StepTaker(model.to(device), options, self.processes, teacher)
        self._history: list[EpochResult] = []

    def train(
        self, data: TrainingData, held_out: HeldOutData, start: Scores | None = None, resumes: bool = False
    ) -> TrainingResult:
        """Train the model. `start` are the scores of the network before training, if they are known.

        `resumes` continues after the last complete epoch of a run with the same options in the same folder.
        """
        if not len(data):
            raise InvalidValueError("no batch to train on: give more images, or a smaller batch size")
        if resumes:
            self._resume()
        else:
            self._record(EpochResult(0, *self._accuracy(held_out, start)))
        try:
            while len(self._history) <= self.options.epochs and not self._is_out_of_patience():
                self._train_epoch(data, held_out)
        except KeyboardInterrupt as interruption:
            last = self.folder / LAST
            raise KeyboardInterrupt(
                f"stopped after epoch {len(self._history) - 1}: {last} resumes it"
            ) from interruption
        self._restore_best()
        return TrainingResult(tuple(self._history), len(self._history) <= self.options.epochs)

    def _train_epoch(self, data: TrainingData, held_out: HeldOutData) -> None:
        epoch, began = len(self._history), time.perf_counter()
        seed = np.random.SeedSequence((self.options.seed, epoch, self.processes.rank))
        torch.manual_seed(int(seed.generate_state(1)[0]))
        self.model.train()
        if epoch > self.options.batch_norm_share * self.options.epochs:
            freeze_batch_norms(self.model)
        losses = LossWatch(self.processes)
        bar: AbstractContextManager[Advance] = nullcontext(lambda: None)
        if self.processes.is_first:
            bar = track(len(data), f"epoch {epoch} of {self.options.epochs}")
        with bar as advance:
            for number, batch in enumerate(data.epoch(epoch)):
                step = (epoch - 1) * len(data) + number
                factor = rate_factor(step, self.options.epochs * len(data), self.options.warmup)
                losses.see(self._steps.take(batch, factor))
                if losses.is_due:
                    self._check(losses, epoch)
                advance()
        self._check(losses, epoch)
        accuracy = self._accuracy(held_out)
        self._record(EpochResult(epoch, *accuracy, losses.mean(), time.perf_counter() - began))

    def _accuracy(self, held_out: HeldOutData, known: Scores | None = None) -> tuple[float, float]:
        """Return top-1 and top-5, of the average of the weights if there is one."""
        if known is None:
            if self._steps.average is None:
                known = evaluate_module(self.model, held_out, self.processes)
            else:
                with self._steps.average.in_place(self.model):
                    known = evaluate_module(self.model, held_out, self.processes)
        return known.accuracy.top1, known.accuracy.top5

    def _record(self, result: EpochResult) -> None:
        is_best = all(result.top1 > epoch.top1 for epoch in self._history)
        self._history.append(result)
        if self.processes.is_first:
            if is_best:
                average = self._steps.average
                state = self.model.state_dict() if average is None else average.state
                save_checkpoint({"model": state, **asdict(result)}, self.folder / BEST)
            saved = {**self._steps.saved(), "history": [asdict(epoch) for epoch in self._history]}
            save_checkpoint({**saved, "options": _plain(self.options)}, self.folder / LAST)
        self.processes.wait()
        self._report(result)

    def _resume(self) -> None:
        saved = self._loaded(LAST)
        for name, value in _plain(self.options).items():
            before = saved["options"].get(name)
            if before != value:
                raise InvalidValueError(
                    f"'{self.folder / LAST}' is of a run with {name} {before}, not {value}: resume with the same "
                    "options, or start again"
                )
        try:
            self._steps.restore(saved)
        except (RuntimeError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidValueError(f"'{self.folder / LAST}' is of another network: {reason}") from error
        self._history = [EpochResult(**epoch) for epoch in saved["history"]]

    def _restore_best(self) -> None:
        self.model.load_state_dict(self._loaded(BEST)["model"])
        self.model.eval()

    def _loaded(self, name: str) -> dict[str, Any]:
        """Read a file in the process that wrote it: others may be on machines without access to its disk."""
        return self.processes.of_first(load_checkpoint(self.folder / name) if self.processes.is_first else {})

    def _is_out_of_patience(self) -> bool:
        best = TrainingResult(tuple(self._history)).best.epoch
        patience = self.options.patience
        return patience is not None and len(self._history) - 1 - best >= patience

    def _check(self, losses: LossWatch, epoch: int) -> None:
        """Restore the best network and raise DivergedError if a loss was NaN or infinite."""
        step = losses.first_bad()
        if step is None:
            return
        self._restore_best()
        best = TrainingResult(tuple(self._history)).best
        raise DivergedError(
            f"the loss became NaN or infinite in epoch {epoch}, step {step + 1}. The best network so far, of epoch "
            f"{best.epoch} with top-1 {100 * best.top1:.2f} %, is kept in '{self.folder / BEST}'. Try a lower learning "
            f"rate (it was {self.options.learning_rate:g}), clip_norm 1, or no float16"
        )


def _plain(options: TrainingOptions) -> dict[str, Any]:
    """Return the options as plain values."""
    values = asdict(replace(options))
    return {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
