"""Two models on the same samples: what changes for whom.

The paired difference of accuracies is far surer than either accuracy: most samples are right, or wrong, for both. With
g samples won and l lost among n, the difference is (g - l)/n with the standard error sqrt(g + l - (g - l)^2/n)/n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quark.errors import ModelError
from quark.evaluate.accuracy import Accuracy, AccuracyMeter, Array, ranked
from quark.evaluate.datasets import Batch, Dataset
from quark.evaluate.evaluation import DEFAULT_BATCH_SIZE
from quark.evaluate.network import Network, as_scores
from quark.evaluate.speed import Speed, measure_speed
from quark.fidelity import OutputFidelity, OutputsMeter, have_same_form
from quark.measures import FunctionMeasure, Measure, MeasureResult, OutputMeasure, samples_of_batch
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
    """`outputs` tell how close the second model's outputs are to the first's; `accuracies` is None without labels,
    `measure` without a measure to take."""

    first: str
    second: str
    data: str
    count: int
    outputs: tuple[OutputFidelity, ...]
    accuracies: Pair | None
    speeds: tuple[Speed, Speed]
    measure: MeasureResult | None = None

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
            "measure": None if self.measure is None else self.measure.to_dict(),
            "accuracy": None if self.accuracies is None else _accuracy_json(self.accuracies),
            "outputs": [output.to_dict() for output in self.outputs],
            "ms_per_sample": [each.ms_per_sample for each in self.speeds],
        }


def compare(
    first: Network,
    second: Network,
    data: Dataset,
    batch_size: int = DEFAULT_BATCH_SIZE,
    measure: Measure | None = None,
) -> Comparison:
    """Run both networks over all of the data. Their outputs must have the same names or at least the same number.
    `measure` is taken of both, with the first as the reference."""
    if len(first.outputs) != len(second.outputs):
        raise ModelError(
            f"models '{first.path}' and '{second.path}' have {len(first.outputs)} and {len(second.outputs)} outputs: "
            f"expected as many in both"
        )
    meter = MeasureMeter(measure, first) if isinstance(measure, OutputMeasure) else None
    gatherer = _Gatherer(OutputsMeter(), first, second, meter)
    speeds: tuple[Speed, Speed] | None = None
    with track(data.count, f"comparing {first.name} with {second.name}") as advance:
        for batch in data.batches(batch_size):
            gatherer.add(batch)
            if speeds is None:
                speeds = (measure_speed(first, batch.inputs), measure_speed(second, batch.inputs))
            for _ in range(batch.count):
                advance()
    assert speeds is not None
    outputs = gatherer.outputs.result()
    pair = gatherer.pair() if data.has_labels else None
    measured = None if meter is None else meter.result()
    if isinstance(measure, FunctionMeasure):
        measured = measure.judge(first.session, second.session)
    return Comparison(first.name, second.name, data.source, data.count, outputs, pair, speeds, measured)


class MeasureMeter:
    """Takes a built-in measure of two networks, batch by batch, and of the first against itself for its own value."""

    def __init__(self, measure: OutputMeasure, network: Network) -> None:
        self._measure, self._names = measure, network.outputs
        self._float, self._other = measure.meter(), measure.meter()

    def add(self, expected: list[Array], actual: list[Array], count: int) -> None:
        first = samples_of_batch(dict(zip(self._names, expected, strict=True)), count)
        second = samples_of_batch(dict(zip(self._names, actual, strict=True)), count)
        for one, other in zip(first, second, strict=True):
            self._float.add(one, one)
            self._other.add(one, other)

    def result(self) -> MeasureResult:
        return self._measure.result(self._float.value(), self._other.value())


@dataclass
class _Gatherer:
    """What is counted over the batches."""

    outputs: OutputsMeter
    first: Network
    second: Network
    measure: MeasureMeter | None = None
    accuracies: tuple[AccuracyMeter, AccuracyMeter] = field(default_factory=lambda: (AccuracyMeter(), AccuracyMeter()))
    gained: int = 0
    lost: int = 0

    def add(self, batch: Batch) -> None:
        pairs = list(zip(self.first.run(batch.inputs), self.second.run(batch.inputs), strict=True))
        for name, (expected, actual) in zip(self.first.outputs, pairs, strict=True):
            if not have_same_form(expected, actual):
                raise ModelError(
                    f"output '{name}' has shape {list(expected.shape)} in '{self.first.path}' and "
                    f"{list(actual.shape)} in '{self.second.path}': expected the same"
                )
        first, second = (dict(zip(self.first.outputs, values, strict=True)) for values in zip(*pairs, strict=True))
        self.outputs.add(first, second, batch.count)
        if self.measure is not None:
            self.measure.add([each for each, _ in pairs], [each for _, each in pairs], batch.count)
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
