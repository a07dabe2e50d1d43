"""Two models on the same samples: outputs, accuracies, speed, and what a quantization lost.

The paired difference of accuracies is far more certain than either accuracy, because most samples are right, or wrong,
for both. With g samples won and l lost among n, the difference is (g - l)/n, and its standard error is
sqrt(g + l - (g - l)^2/n)/n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quark.account import Report
from quark.compare import OutputFidelity, OutputsMeter, have_same_form, largest_drop
from quark.errors import InvalidValueError, ModelError
from quark.evaluate.datasets import Dataset, open_dataset
from quark.evaluate.evaluation import (
    DEFAULT_BATCH_SIZE,
    Accuracy,
    AccuracyMeter,
    Array,
    Speed,
    measure_in_turns,
    ranked,
)
from quark.evaluate.network import Network, as_scores
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
    """Two models compared. `outputs` are the second model's relative to the first's. `accuracies` is None without
    labels, and `measure` without a measure to take."""

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
        return next((output.agreement for output in self.outputs if output.agreement is not None), None)

    def to_json(self) -> dict[str, Any]:
        """Shares are in percent."""
        pair = self.accuracies
        accuracy = pair and {
            "top1_percent": [100 * pair.first.top1, 100 * pair.second.top1],
            "top5_percent": [100 * pair.first.top5, 100 * pair.second.top5],
            "top1_difference": 100 * pair.top1_difference,
            "standard_error": 100 * pair.standard_error,
            "gained": pair.gained,
            "lost": pair.lost,
        }
        return {
            "first": self.first,
            "second": self.second,
            "data": self.data,
            "samples": self.count,
            "agreement_percent": None if self.agreement is None else 100 * self.agreement,
            "measure": None if self.measure is None else self.measure.to_dict(),
            "accuracy": accuracy,
            "outputs": [output.to_dict() for output in self.outputs],
            "ms_per_sample": [speed.ms_per_sample for speed in self.speeds],
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
    names = tuple({input_.name for input_ in network.inputs} for network in (first, second))
    if names[0] != names[1]:
        raise ModelError(
            f"models '{first.path}' and '{second.path}' have the inputs {', '.join(sorted(names[0]))} and "
            f"{', '.join(sorted(names[1]))}: expected the same, because both run on the same samples. Give two forms "
            "of one network, or rename the inputs of one"
        )
    meter = MeasureMeter(measure, first) if isinstance(measure, OutputMeasure) else None
    tally = PairMeter(first.outputs, (first.path, second.path), meter)
    speeds: list[Speed] | None = None
    with track(data.count, f"comparing {first.name} with {second.name}") as advance:
        for batch in data.batches(batch_size):
            expected, actual = first.run(batch.inputs), second.run(batch.inputs)
            for name, y, z in zip(first.outputs, expected, actual, strict=True):
                if not have_same_form(y, z):
                    raise ModelError(
                        f"output '{name}' has shape {list(y.shape)} in '{first.path}' and {list(z.shape)} in "
                        f"'{second.path}': expected the same"
                    )
                if y.dtype.kind == "f" and np.isnan(y).any():
                    raise InvalidValueError(
                        f"model '{first.path}': its output '{name}' has NaN, so that there is nothing to compare with. "
                        "Check the model, the data and how it is prepared (--preprocess)"
                    )
            tally.add(expected, actual, batch.labels, batch.count)
            if speeds is None:
                speeds = measure_in_turns((first, second), batch.inputs)
            for _ in range(batch.count):
                advance()
    assert speeds is not None
    outputs = tally.outputs.result()
    pair = tally.pair() if data.has_labels else None
    measured = None if meter is None else meter.result()
    if isinstance(measure, FunctionMeasure):
        measured = measure.judge(first.session, second.session)
    return Comparison(first.name, second.name, data.source, data.count, outputs, pair, (speeds[0], speeds[1]), measured)


class MeasureMeter:
    """Takes a built-in measure of two networks, batch by batch, and of the first against itself for its own value."""

    def __init__(self, measure: OutputMeasure, network: Network) -> None:
        self._measure, self._names = measure, network.outputs
        self._float, self._other = measure.meter(), measure.meter()

    def add(self, expected: list[Array], actual: list[Array], count: int) -> None:
        first = samples_of_batch(dict(zip(self._names, expected, strict=True)), count)
        second = samples_of_batch(dict(zip(self._names, actual, strict=True)), count)
        for sample, other in zip(first, second, strict=True):
            self._float.add(sample, sample)
            self._other.add(sample, other)

    def result(self) -> MeasureResult:
        return self._measure.result(self._float.value(), self._other.value())


@dataclass
class PairMeter:
    """Gathers the outputs of two networks for the same batches: how close they are, a measure, and the accuracy of both
    if there are labels. `models` are the files, for errors."""

    names: Sequence[str]
    models: tuple[Path, Path]
    measure: MeasureMeter | None = None
    outputs: OutputsMeter = field(default_factory=OutputsMeter)
    accuracies: tuple[AccuracyMeter, AccuracyMeter] = field(default_factory=lambda: (AccuracyMeter(), AccuracyMeter()))
    gained: int = 0
    lost: int = 0

    def add(self, expected: list[Array], actual: list[Array], labels: Array | None, count: int) -> None:
        """Add a batch of `count` samples: the outputs of both networks."""
        first, second = (dict(zip(self.names, side, strict=True)) for side in (expected, actual))
        self.outputs.add(first, second, count)
        if self.measure is not None:
            self.measure.add(expected, actual, count)
        if labels is not None:
            scores = [as_scores(side[0], model) for side, model in zip((expected, actual), self.models, strict=True)]
            for meter, score in zip(self.accuracies, scores, strict=True):
                meter.add(score, labels)
            was_right, is_right = (ranked(score)[:, 0] == labels for score in scores)
            self.gained += int(np.sum(is_right & ~was_right))
            self.lost += int(np.sum(was_right & ~is_right))

    def pair(self) -> Pair:
        """The accuracies of both; only if there were labels."""
        first, second = self.accuracies
        return Pair(first.result(), second.result(), self.gained, self.lost)


@dataclass(frozen=True)
class Drop:
    """A loss in `unit`, and the name of what was lost."""

    points: float
    measure: str
    unit: str = "points"

    def __str__(self) -> str:
        return f"{self.points:.2f} {self.unit} of {self.measure}"


def measured_drop(report: Report, float_model: Path, quantized: Path, data: Path | None, preprocess: str) -> Drop:
    """How much a quantization lost, which --max-drop limits.

    With a metric, the loss in percent of the float model's value, or the difference in points for error rates. With
    labelled data, top-1 accuracy of the float model less that of the quantized one on the same images. Otherwise what
    the worst output lost on the held-out samples (`largest_drop`); an error if no output was compared.
    """
    if report.measure is not None:
        unit = "%" if report.measure.is_higher_better else "points"
        return Drop(100 * report.measure.drop, report.measure.name, unit)
    if data is not None:
        networks = Network(float_model), Network(quantized)
        pair = compare(*networks, open_dataset(data, networks[0], preprocess)).accuracies
        if pair is None:
            raise InvalidValueError(f"--data '{data}' has no labels: expected a folder for each class")
        return Drop(-100 * pair.top1_difference, "top-1 accuracy")
    if not report.outputs:
        raise InvalidValueError("--max-drop: nothing was compared with the float model; give --calib or --data")
    return Drop(*largest_drop(report.outputs))
