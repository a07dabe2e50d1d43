"""Top-1 and top-5 accuracy of a torch module, ranked as in `quark.evaluate`, and the data that a trainer needs.

Each process of a run has its own part of the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quark.errors import InvalidValueError
from quark.evaluate.comparison import Pair
from quark.evaluate.evaluation import Accuracy, check_labels, ranked
from quark.vision.training.processes import Processes

Array = NDArray[np.int64]
Batch: TypeAlias = tuple[Tensor, Tensor]  # images [n, ...], classes [n]


class TrainingData(Protocol):
    """Batches whose order depends only on the number of the epoch, so that a resumed run sees the same."""

    def __len__(self) -> int:
        """Return the number of batches per epoch, the same for every process."""
        ...

    def epoch(self, number: int) -> Iterator[Batch]: ...


class HeldOutData(Protocol):
    """Batches of this process's part: of all samples in order, every `count`-th, starting at its rank."""

    def __iter__(self) -> Iterator[Batch]: ...


@dataclass(frozen=True, eq=False)
class Scores:
    """The best classes of every sample, best first [n, 5], and the labels [n], in the order of the data."""

    best: Array
    labels: Array

    @property
    def accuracy(self) -> Accuracy:
        is_right = self.best == self.labels[:, None]
        return Accuracy(len(self.labels), float(is_right[:, 0].mean()), float(is_right.any(axis=1).mean()))

    def paired_with(self, other: Scores) -> Pair:
        """Compare with the scores of another network on the same samples."""
        was_right, is_right = self.best[:, 0] == self.labels, other.best[:, 0] == other.labels
        gained, lost = int(np.sum(is_right & ~was_right)), int(np.sum(was_right & ~is_right))
        return Pair(self.accuracy, other.accuracy, gained, lost)

    def agreement(self, other: Scores) -> float:
        """Return the share of samples with the same best class."""
        return float(np.mean(self.best[:, 0] == other.best[:, 0]))


def evaluate_module(model: nn.Module, data: Iterable[Batch], processes: Processes | None = None) -> Scores:
    """Run the model on all processes; each runs its part and gets all scores. The model keeps its training mode."""
    processes = processes or Processes()
    was_training = model.training
    model.eval()
    parts: list[tuple[Array, Array]] = []
    for images, classes in data:
        with torch.no_grad():
            scores = model(images.to(processes.device, non_blocking=True)).float().cpu().numpy()
        right = classes.cpu().numpy().astype(np.int64)
        check_labels(right, scores.shape[1])
        parts.append((ranked(scores), right))
    model.train(was_training)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else None
    everyones = [part for part in processes.gathered(columns) if part is not None]
    if not everyones:
        raise InvalidValueError("no held-out samples: accuracy is undefined")
    best, labels = (_interleaved([best_and_labels[column] for best_and_labels in everyones]) for column in range(2))
    return Scores(best, labels)


def _interleaved(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Return the parts of all processes in the order of the data: process r of n has samples r, r + n, r + 2n ..."""
    whole = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole
