"""The loop: epochs of steps, a look at the held-out data after each, and the best of all in the end.

Epoch 0 is the network as it came: training that only makes things worse gives that back. What is random depends on
the seed, the epoch and the rank alone, so that a run that was resumed ends, on the CPU, bit for bit where an
uninterrupted one does.

Under torchrun every process calls this with its own part of the data; the first writes the files.
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
from torch import nn

from quark.errors import InvalidValueError
from quark.onnx.progress import Advance, track
from quark.vision.training.checkpoint import BEST, LAST, load_checkpoint, save_checkpoint
from quark.vision.training.data import HeldOutData, TrainingData
from quark.vision.training.divergence import DivergedError, LossWatch
from quark.vision.training.evaluation import Scores, evaluate_module
from quark.vision.training.options import TrainingOptions
from quark.vision.training.processes import Processes
from quark.vision.training.schedule import rate_factor
from quark.vision.training.step import StepTaker, freeze_batch_norms


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
    """`history` begins with epoch 0; `is_stopped_early` says that patience ran out."""

    history: tuple[EpochResult, ...]
    is_stopped_early: bool = False

    @property
    def best(self) -> EpochResult:
        """The first of the best."""
        return max(self.history, key=lambda each: each.top1)


class Trainer:
    """Trains `model` on the device of `processes`, and leaves in it what was best.

    `folder` gets best.pt and last.pt; `teacher` is the float network to learn from; `report` is told of each epoch.
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
        """`start` are the scores of the network as it is, where they are known already. `resumes` goes on after the
        last whole epoch of a run with the same options in the same folder."""
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
        _seed(self.options.seed, epoch, self.processes.rank)
        self.model.train()
        if epoch > self.options.batch_norm_share * self.options.epochs:
            freeze_batch_norms(self.model)
        losses = LossWatch(self.processes)
        with self._tracked(len(data), epoch) as advance:
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

    def _tracked(self, steps: int, epoch: int) -> AbstractContextManager[Advance]:
        if self.processes.is_first:
            return track(steps, f"epoch {epoch} of {self.options.epochs}")
        return nullcontext(lambda: None)

    def _accuracy(self, held_out: HeldOutData, known: Scores | None = None) -> tuple[float, float]:
        """Of the average of the weights where there is one."""
        if known is None:
            if self._steps.average is None:
                known = evaluate_module(self.model, held_out, self.processes)
            else:
                with self._steps.average.in_place(self.model):
                    known = evaluate_module(self.model, held_out, self.processes)
        return known.accuracy.top1, known.accuracy.top5

    def _record(self, result: EpochResult) -> None:
        is_best = all(result.top1 > each.top1 for each in self._history)
        self._history.append(result)
        if self.processes.is_first:
            if is_best:
                average = self._steps.average
                state = self.model.state_dict() if average is None else average.state
                save_checkpoint({"model": state, **asdict(result)}, self.folder / BEST)
            saved = {**self._steps.saved(), "history": [asdict(each) for each in self._history]}
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
                    f"options, or start anew"
                )
        try:
            self._steps.restore(saved)
        except (RuntimeError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidValueError(f"'{self.folder / LAST}' is of another network: {reason}") from error
        self._history = [EpochResult(**each) for each in saved["history"]]

    def _restore_best(self) -> None:
        self.model.load_state_dict(self._loaded(BEST)["model"])
        self.model.eval()

    def _loaded(self, name: str) -> dict[str, Any]:
        """Read by the process that wrote it: others may be on machines that do not see its disk."""
        return self.processes.of_first(load_checkpoint(self.folder / name) if self.processes.is_first else {})

    def _is_out_of_patience(self) -> bool:
        best = TrainingResult(tuple(self._history)).best.epoch
        patience = self.options.patience
        return patience is not None and len(self._history) - 1 - best >= patience

    def _check(self, losses: LossWatch, epoch: int) -> None:
        """Stop where a loss was no number, with the best network of before."""
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


def _seed(seed: int, epoch: int, rank: int) -> None:
    """Of all that torch draws in an epoch, such as what dropout leaves out."""
    torch.manual_seed(int(np.random.SeedSequence((seed, epoch, rank)).generate_state(1)[0]))


def _plain(options: TrainingOptions) -> dict[str, Any]:
    """Names and values that every file format has."""
    values = asdict(replace(options))
    return {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
