"""Top-1 and top-5 of a torch module, ranked as `quark.evaluate` ranks the scores of an ONNX file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from quark.errors import InvalidValueError
from quark.evaluate.accuracy import Accuracy, ranked
from quark.evaluate.comparison import Pair
from quark.vision.training.data import Batch
from quark.vision.training.processes import Processes

Array = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Scores:
    """The best classes of every sample, best first [n, 5], and the right ones [n], in the order of the data."""

    best: Array
    labels: Array

    @property
    def accuracy(self) -> Accuracy:
        is_right = self.best == self.labels[:, None]
        return Accuracy(len(self.labels), float(is_right[:, 0].mean()), float(is_right.any(axis=1).mean()))

    def paired_with(self, other: Scores) -> Pair:
        """How the samples moved from these scores to the others, of the same samples."""
        was_right, is_right = self.best[:, 0] == self.labels, other.best[:, 0] == other.labels
        gained, lost = int(np.sum(is_right & ~was_right)), int(np.sum(was_right & ~is_right))
        return Pair(self.accuracy, other.accuracy, gained, lost)

    def agreement(self, other: Scores) -> float:
        """The share of samples with the same best class."""
        return float(np.mean(self.best[:, 0] == other.best[:, 0]))


def evaluate_module(model: nn.Module, data: Iterable[Batch], processes: Processes | None = None) -> Scores:
    """Every process runs its part; all get the scores of the whole. The model is left in its mode of before."""
    processes = processes or Processes()
    was_training = model.training
    model.eval()
    parts = [_run(model, images, labels, processes) for images, labels in data]
    model.train(was_training)
    columns = [np.concatenate(each) for each in zip(*parts, strict=True)] if parts else None
    everyones = [each for each in processes.gathered(columns) if each is not None]
    if not everyones:
        raise InvalidValueError("no held-out samples: there is no accuracy of nothing")
    best, labels = (_interleaved([each[column] for each in everyones]) for column in range(2))
    return Scores(best, labels)


@torch.no_grad()
def _run(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, processes: Processes) -> tuple[Array, Array]:
    scores = model(images.to(processes.device, non_blocking=True)).float().cpu().numpy()
    right: Array = labels.cpu().numpy().astype(np.int64)
    if len(right) and not 0 <= right.min() <= right.max() < scores.shape[1]:
        raise InvalidValueError(
            f"label {right.max() if right.max() >= scores.shape[1] else right.min()}: the model has {scores.shape[1]} "
            f"classes, counted from 0; are these the classes that it was trained on?"
        )
    return ranked(scores), right


def _interleaved(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """The parts of all processes in the order of the data: process r of n has samples r, r + n, r + 2n ..."""
    whole = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole
