"""Top-1 and top-5 accuracy, counted batch by batch.

Equal scores stand in the order of numpy's plain `argsort`, as in most evaluation scripts, so that figures can be
compared with theirs: quantized outputs often tie. A NaN is the lowest score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.errors import InvalidValueError

Array = NDArray[Any]
TOP = 5


@dataclass(frozen=True)
class Accuracy:
    """Shares of `count` samples, as fractions. With fewer than six classes, top-5 is always 1."""

    count: int
    top1: float
    top5: float


def ranked(scores: Array) -> NDArray[np.int64]:
    """The numbers of the five best classes of each row, best first.

    >>> ranked(np.array([[0.1, 0.7, 0.5]])).tolist()
    [[1, 2, 0]]
    """
    order: NDArray[np.int64] = np.argsort(-scores, axis=1)[:, :TOP]
    return order


@dataclass
class AccuracyMeter:
    """Counts right answers.

    >>> meter = AccuracyMeter()
    >>> meter.add(np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1]))
    >>> meter.result()
    Accuracy(count=2, top1=0.5, top5=1.0)
    """

    count: int = 0
    right: int = 0
    right_in_five: int = 0

    def add(self, scores: Array, labels: Array) -> None:
        """A batch: scores [n, classes], and the right classes [n]."""
        if len(labels) and not 0 <= labels.min() <= labels.max() < scores.shape[1]:
            raise InvalidValueError(
                f"label {labels.max() if labels.max() >= scores.shape[1] else labels.min()}: the model has "
                f"{scores.shape[1]} classes, counted from 0; are these folders the classes that it was trained on?"
            )
        order = ranked(scores)
        self.count += len(labels)
        self.right += int((order[:, 0] == labels).sum())
        self.right_in_five += int((order == labels[:, None]).any(axis=1).sum())

    def result(self) -> Accuracy:
        if not self.count:
            raise InvalidValueError("no samples: there is no accuracy of nothing")
        return Accuracy(self.count, self.right / self.count, self.right_in_five / self.count)
