"""Two models on the same samples: what changes for whom.

The paired difference of accuracies is far surer than either accuracy: most samples are right, or wrong, for both. With
g samples won and l lost among n, the difference is (g - l)/n with the standard error sqrt(g + l - (g - l)^2/n)/n.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from quark.errors import ModelError
from quark.evaluate.accuracy import Accuracy, AccuracyMeter, Array, ranked
from quark.evaluate.datasets import Batch, Dataset
from quark.evaluate.evaluation import DEFAULT_BATCH_SIZE
from quark.evaluate.network import Network, as_scores
from quark.evaluate.speed import Speed, measure_speed
from quark.fidelity import FidelityMeter, OutputFidelity
from quark.onnx.progress import track


@dataclass(frozen=True)
class Pair:
    """The accuracies of both, and how the samples moved; `gained` are right for the second model alone."""

    first: Accuracy
    second: Accuracy
    gained: int
    lost: int

    @property
    def top1_difference(self) -> float:
        """Second less first, as a fraction; negative where the second is worse."""
        return self.second.top1 - self.first.top1

    @property
    def standard_error(self) -> float:
        count = self.first.count
        return math.sqrt(max(self.gained + self.lost - (self.gained - self.lost) ** 2 / count, 0.0)) / count


@dataclass(frozen=True)
class Comparison:
    """`outputs` tell how close the second model's outputs are to the first's; `accuracies` is None without labels."""

    first: str
    second: str
    data: str
    count: int
    outputs: tuple[OutputFidelity, ...]
    accuracies: Pair | None
    speeds: tuple[Speed, Speed]

    @property
    def agreement(self) -> float | None:
        """The share of samples with the same largest class, of the first output that has classes."""
        return next((each.agreement for each in self.outputs if each.agreement is not None), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "second": self.second,
            "data": self.data,
            "samples": self.count,
            "agreement_percent": None if self.agreement is None else 100 * self.agreement,
            "accuracy": None if self.accuracies is None else _accuracy_json(self.accuracies),
            "outputs": [_finite(asdict(each)) for each in self.outputs],
            "ms_per_sample": [each.ms_per_sample for each in self.speeds],
        }


def compare(first: Network, second: Network, data: Dataset, batch_size: int = DEFAULT_BATCH_SIZE) -> Comparison:
    """Run both networks over all of the data. Their outputs must have the same names or at least the same number."""
    if len(first.outputs) != len(second.outputs):
        raise ModelError(
            f"models '{first.path}' and '{second.path}' have {len(first.outputs)} and {len(second.outputs)} outputs: "
            f"expected as many in both"
        )
    gatherer = _Gatherer([FidelityMeter(name) for name in first.outputs], first, second)
    speeds: tuple[Speed, Speed] | None = None
    with track(data.count, f"comparing {first.name} with {second.name}") as advance:
        for batch in data.batches(batch_size):
            gatherer.add(batch)
            if speeds is None:
                speeds = (measure_speed(first, batch.inputs), measure_speed(second, batch.inputs))
            for _ in range(batch.count):
                advance()
    assert speeds is not None
    outputs = tuple(meter.result() for meter in gatherer.meters)
    pair = gatherer.pair() if data.has_labels else None
    return Comparison(first.name, second.name, data.source, data.count, outputs, pair, speeds)


@dataclass
class _Gatherer:
    """What is counted over the batches."""

    meters: list[FidelityMeter]
    first: Network
    second: Network
    accuracies: tuple[AccuracyMeter, AccuracyMeter] = field(default_factory=lambda: (AccuracyMeter(), AccuracyMeter()))
    gained: int = 0
    lost: int = 0

    def add(self, batch: Batch) -> None:
        pairs = list(zip(self.first.run(batch.inputs), self.second.run(batch.inputs), strict=True))
        for meter, (expected, actual) in zip(self.meters, pairs, strict=True):
            if expected.shape != actual.shape:
                raise ModelError(
                    f"output '{meter.name}' has shape {list(expected.shape)} in '{self.first.path}' and "
                    f"{list(actual.shape)} in '{self.second.path}': expected the same"
                )
            meter.add(expected, actual)
        if batch.labels is not None:
            expected, actual = pairs[0]
            self._add_labelled(as_scores(expected, self.first.path), as_scores(actual, self.second.path), batch.labels)

    def _add_labelled(self, expected: Array, actual: Array, labels: Array) -> None:
        for meter, scores in zip(self.accuracies, (expected, actual), strict=True):
            meter.add(scores, labels)
        was_right, is_right = ranked(expected)[:, 0] == labels, ranked(actual)[:, 0] == labels
        self.gained += int(np.sum(is_right & ~was_right))
        self.lost += int(np.sum(was_right & ~is_right))

    def pair(self) -> Pair:
        first, second = self.accuracies
        return Pair(first.result(), second.result(), self.gained, self.lost)


def _accuracy_json(pair: Pair) -> dict[str, Any]:
    return {
        "top1_percent": [100 * pair.first.top1, 100 * pair.second.top1],
        "top5_percent": [100 * pair.first.top5, 100 * pair.second.top5],
        "top1_difference": 100 * pair.top1_difference,
        "standard_error": 100 * pair.standard_error,
        "gained": pair.gained,
        "lost": pair.lost,
    }


def _finite(content: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinities: as text there."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in content.items()
    }
