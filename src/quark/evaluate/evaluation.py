"""Top-1 and top-5 accuracy and speed of one model on labelled data.

Equal scores, which are common in quantized outputs, are ordered by numpy's plain `argsort`, as in most evaluation
scripts. A NaN is the lowest score. Speed is the best of several runs: noise only makes a run slower, so the best is
closest to the cost of the model. The first run, which allocates memory, is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.evaluate.datasets import Dataset
from quark.evaluate.network import Network
from quark.onnx.progress import track

DEFAULT_BATCH_SIZE = 10

Array = NDArray[Any]
TOP = 5
REPEATS = 10
MOST_SECONDS = 2.0
ROUNDS = 4
REPEATS_A_ROUND = 3
SECONDS_A_ROUND = 0.5


@dataclass(frozen=True)
class Accuracy:
    """Shares of `count` samples, as fractions. With fewer than six classes, top-5 is always 1."""

    count: int
    top1: float
    top5: float


def ranked(scores: Array) -> NDArray[np.int64]:
    """Return the numbers of the five best classes of each row, best first.

    >>> ranked(np.array([[0.1, 0.7, 0.5]])).tolist()
    [[1, 2, 0]]
    """
    order: NDArray[np.int64] = np.argsort(-scores, axis=1)[:, :TOP]
    return order


def check_labels(labels: Array, classes: int) -> None:
    """Refuse labels that are not numbers of classes."""
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise InvalidValueError(
            f"label {labels.max() if labels.max() >= classes else labels.min()}: the model has {classes} classes, "
            f"counted from 0; are these folders the classes that it was trained on?"
        )


@dataclass
class AccuracyMeter:
    """Counts correct predictions.

    >>> meter = AccuracyMeter()
    >>> meter.add(np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1]))
    >>> meter.result()
    Accuracy(count=2, top1=0.5, top5=1.0)
    """

    count: int = 0
    right: int = 0
    right_in_five: int = 0

    def add(self, scores: Array, labels: Array) -> None:
        """Add a batch: scores [n, classes], and labels [n]."""
        check_labels(labels, scores.shape[1])
        order = ranked(scores)
        self.count += len(labels)
        self.right += int((order[:, 0] == labels).sum())
        self.right_in_five += int((order == labels[:, None]).any(axis=1).sum())

    def result(self) -> Accuracy:
        if not self.count:
            raise InvalidValueError("no samples: accuracy is undefined")
        return Accuracy(self.count, self.right / self.count, self.right_in_five / self.count)


@dataclass(frozen=True)
class Speed:
    """Time per sample in the best of `repeats` runs, with batches of `batch_size`."""

    ms_per_sample: float
    batch_size: int
    repeats: int


def measure_speed(
    network: Network,
    inputs: dict[str, NDArray[Any]],
    repeats: int = REPEATS,
    most_seconds: float = MOST_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Speed:
    """Time a batch: at least once, then up to `repeats` times while the time allows.

    On a busy computer, `clock=time.thread_time` leaves out waiting; it counts networks of one thread only.
    """
    network.run(inputs)
    best, done = float("inf"), 0
    end = time.perf_counter() + most_seconds
    while done < max(repeats, 1):
        start = clock()
        network.run(inputs)
        best, done = min(best, clock() - start), done + 1
        if time.perf_counter() > end:
            break
    batch_size = len(next(iter(inputs.values())))
    return Speed(1000 * best / max(batch_size, 1), batch_size, done)


def measure_in_turns(
    networks: Sequence[Network],
    inputs: dict[str, NDArray[Any]],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Speed]:
    """Time networks on the same batch in turns, so that a temporary slowdown of the computer affects all of them."""
    rounds = [
        [measure_speed(network, inputs, REPEATS_A_ROUND, SECONDS_A_ROUND, clock) for network in networks]
        for _ in range(ROUNDS)
    ]
    return [
        replace(min(of_one, key=lambda speed: speed.ms_per_sample), repeats=sum(speed.repeats for speed in of_one))
        for of_one in zip(*rounds, strict=True)
    ]


@dataclass(frozen=True)
class Evaluation:
    """Result of one model on one dataset."""

    model: str
    data: str
    accuracy: Accuracy
    speed: Speed
    remarks: tuple[str, ...] = ()
    device: str = "cpu"

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON, with accuracies in percent."""
        return {
            "model": self.model,
            "data": self.data,
            "device": self.device,
            "samples": self.accuracy.count,
            "top1_percent": 100 * self.accuracy.top1,
            "top5_percent": 100 * self.accuracy.top5,
            **asdict(self.speed),
            "remarks": list(self.remarks),
        }


def evaluate(network: Network, data: Dataset, batch_size: int = DEFAULT_BATCH_SIZE) -> Evaluation:
    """Run the network on all data, batch by batch."""
    if not data.has_labels:
        raise InvalidValueError(
            f"data '{data.source}' has no labels: expected a folder for each class with images in it, a labels "
            f"file, or in an .npz an array 'labels'; 'quark compare' needs none"
        )
    meter, speed, classes = AccuracyMeter(), None, 0
    with track(data.count, f"evaluating {network.name}") as advance:
        for batch in data.batches(batch_size):
            scores = network.scores(batch.inputs)
            assert batch.labels is not None
            meter.add(scores, batch.labels)
            classes = scores.shape[1]
            if speed is None:
                speed = measure_speed(network, batch.inputs)
            for _ in batch.labels:
                advance()
    accuracy = meter.result()
    assert speed is not None
    return Evaluation(network.name, data.source, accuracy, speed, remarks_on(data, classes), network.device)


def remarks_on(data: Dataset, classes: int) -> tuple[str, ...]:
    """Return reasons to doubt an accuracy."""
    if data.classes is not None and data.classes != classes:
        doubt = f"the data has {data.classes} folders and the model {classes} classes"
        return (f"{doubt}: the first folder counts as class 0, the next as class 1, and so on",)
    return ()
