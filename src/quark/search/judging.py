"""How much a quantized network lost against the float one, on samples that all trials share.

    a metric of the user's           what was lost of it, in percent of the float network's value; for error rates the
                                     difference, in points
    labelled samples                 top-1 accuracy of the float network less that of the quantized one, in points
    an output of shape [n, classes]  100 (1 - agreement)
    scores, boxes, distributions     100 (1 - the figure of their worst part), see `quark.fidelity`
    any other output                 100 (1 - cosine)

Without labels the worst output counts. The divergence is the mean over samples of sum p log(p / q), where p and q are
the float and the quantized network's probabilities, of the first output that has classes: it tells apart what the few
changed predictions do not.

The float network runs once. What it was given and what it said is kept, beyond a little in a temporary file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.card import samples_digest
from quark.errors import InvalidValueError
from quark.evaluate import AccuracyMeter, Network, measure_speed, open_dataset
from quark.evaluate.accuracy import ranked
from quark.evaluate.comparison import MeasureMeter
from quark.evaluate.datasets import Batch
from quark.evaluate.network import as_scores
from quark.fidelity import OutputsMeter, have_same_form, overall_verdict, worst_text
from quark.measures import FunctionMeasure, Measure, MeasureResult, OutputMeasure
from quark.onnx.data import Samples
from quark.onnx.data.store import SampleStore

Array = NDArray[Any]
BATCH_SIZE = 10
SPEED_ROUNDS, SPEED_REPEATS, SPEED_SECONDS = 3, 4, 0.5
CAREFUL_ROUNDS, CAREFUL_REPEATS, CAREFUL_SECONDS = 4, 50, 0.2  # where latency decides
_TINY = 1e-12


@dataclass(frozen=True)
class Judgement:
    """Of one network against float; see `quark.search.trial.Measurement` for the units."""

    drop: float
    measure: str
    latency_ms: float
    error: float | None = None
    top1: float | None = None
    agreement: float | None = None
    kl: float | None = None
    sqnr_db: float | None = None
    value: float | None = None
    verdict: str = ""
    worst: str = ""
    latency_ratio: float | None = None


class Judge:
    """The float network's answers to the samples, which others are held against. With a `measure`, networks are judged
    by that instead of by accuracy or closeness.

    With `threads`, latency decides and is measured with more care, by so many threads: one is what other work on the
    machine and the threads of other sessions disturb least."""

    def __init__(
        self,
        float_model: Path,
        batches: Iterable[Batch],
        source: str,
        measure: Measure | None = None,
        threads: int | None = None,
    ) -> None:
        self._threads = threads
        self._float = network = Network(float_model)
        self.source = source
        self.measure = measure
        self.count = 0
        self._inputs, self._outputs = SampleStore(), SampleStore()
        self._labels: list[Array | None] = []
        start = time.perf_counter()
        for batch in batches:
            outputs = network.run(batch.inputs)
            _refuse_nan(outputs, network.outputs, float_model)
            self._inputs.append(batch.inputs)
            self._outputs.append({str(i): each for i, each in enumerate(outputs)})
            self._labels.append(batch.labels)
            self.count += batch.count
        if not self.count:
            raise InvalidValueError(f"data '{source}': no samples in it")
        self.output_names = network.outputs
        self.has_labels = self._labels[0] is not None
        self.top1 = self._float_top1(float_model)
        self.float_value = self._float_value()
        self.seconds = time.perf_counter() - start  # that it takes to judge a network
        self._timed = network if threads is None else Network(float_model, threads)
        self.latency_ms = measure_speed(self._timed, self._inputs[0]).ms_per_sample

    def digest(self) -> str:
        """A hash of all samples and their labels."""
        labels = ({} if each is None else {"labels": each} for each in self._labels)
        return samples_digest((self._inputs[i] for i in range(len(self._inputs))), labels)

    def judge(self, model: Path) -> Judgement:
        """Run the model over all samples."""
        network = Network(model)
        meter = MeasureMeter(self.measure, self._float) if isinstance(self.measure, OutputMeasure) else None
        tally = _Tally(self.output_names, OutputsMeter(), meter)
        for i, labels in enumerate(self._labels):
            expected = list(self._outputs[i].values())
            inputs = self._inputs[i]
            tally.add(expected, network.run(inputs), labels, model, len(next(iter(inputs.values()))))
        latency = self._latency(network)
        judgement = replace(tally.result(latency), latency_ratio=latency / self.latency_ms)
        measured = None if meter is None else meter.result()
        if isinstance(self.measure, FunctionMeasure):
            assert self.float_value is not None
            measured = self.measure.result(self.float_value, self.measure.value(network.session))
        return judgement if measured is None else _by_measure(judgement, measured)

    def compared_latencies(self, models: Sequence[Path]) -> list[float]:
        """The latency of several models as a share of float's, measured in turns in one run."""
        networks = [self._timed, *(Network(each, self._threads) for each in models)]
        best = [math.inf] * len(networks)
        for _ in range(CAREFUL_ROUNDS):
            for i, network in enumerate(networks):
                speed = measure_speed(network, self._inputs[0], CAREFUL_REPEATS, CAREFUL_SECONDS)
                best[i] = min(best[i], speed.ms_per_sample)
        return [each / best[0] for each in best[1:]]

    def _latency(self, network: Network) -> float:
        """The float network's time of the beginning, times the ratio of both now: a machine that is busy later than
        earlier would otherwise make the later trials the slower ones."""
        if self._threads is not None:
            return self.latency_ms * self.compared_latencies([network.path])[0]
        inputs = self._inputs[0]
        rounds = [
            [measure_speed(each, inputs, SPEED_REPEATS, SPEED_SECONDS).ms_per_sample for each in (self._float, network)]
            for _ in range(SPEED_ROUNDS)
        ]
        first, second = min(times[0] for times in rounds), min(times[1] for times in rounds)
        return self.latency_ms * second / first

    def _float_value(self) -> float | None:
        """The float network's value of the measure. What is wrong with the measure is found here, before any trial."""
        if isinstance(self.measure, FunctionMeasure):
            return self.measure.value(self._float.session, "the float network")
        if not isinstance(self.measure, OutputMeasure):
            return None
        meter = MeasureMeter(self.measure, self._float)
        for i in range(len(self._outputs)):
            outputs = list(self._outputs[i].values())
            meter.add(outputs, outputs, len(next(iter(self._inputs[i].values()))))
        return meter.result().float_value

    def _float_top1(self, model: Path) -> float | None:
        if not self.has_labels:
            return None
        meter = AccuracyMeter()
        for i, labels in enumerate(self._labels):
            assert labels is not None
            meter.add(as_scores(self._outputs[i]["0"], model), labels)
        return meter.result().top1


def _refuse_nan(outputs: Iterable[Array], names: Iterable[str], model: Path) -> None:
    for name, array in zip(names, outputs, strict=True):
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise InvalidValueError(
                f"model '{model}', which is float: its output '{name}' has NaN, so that there is nothing to compare "
                f"with. Check the data and how it is prepared (--preprocess)"
            )


def judge_on_folder(
    model: Path,
    data: Path,
    preprocess: str,
    limit: int | None = None,
    labels: Path | None = None,
    measure: Measure | None = None,
    threads: int | None = None,
) -> Judge:
    """By data on a disk, as `quark evaluate` reads it."""
    dataset = open_dataset(data, Network(model), preprocess, limit, labels)
    return Judge(model, dataset.batches(BATCH_SIZE), f"{dataset.count} samples of {dataset.source}", measure, threads)


def judge_on_held_out(
    model: Path, samples: Samples, measure: Measure | None = None, threads: int | None = None
) -> Judge:
    """By the samples that calibration holds out."""
    batches = [Batch(each, None) for each in samples.held_out]
    return Judge(model, batches, f"{len(batches)} held-out samples of the calibration data", measure, threads)


def _by_measure(judgement: Judgement, measured: MeasureResult) -> Judgement:
    """The judgement with the drop of the measure in the place of the usual one."""
    drop = 100 * measured.drop
    return replace(judgement, drop=drop, measure=measured.name, error=None, value=measured.value)


@dataclass
class _Tally:
    """What is counted over the batches."""

    names: Sequence[str]
    outputs: OutputsMeter
    measure: MeasureMeter | None = None
    accuracies: tuple[AccuracyMeter, AccuracyMeter] = field(default_factory=lambda: (AccuracyMeter(), AccuracyMeter()))
    gained: int = 0
    lost: int = 0
    divergence: float = 0.0
    rows: int = 0

    def add(self, expected: list[Array], actual: list[Array], labels: Array | None, model: Path, count: int) -> None:
        if not all(have_same_form(y, z) for y, z in zip(expected, actual, strict=True)):
            raise InvalidValueError(f"model '{model}' has outputs of other shapes than the float model")
        first, second = (dict(zip(self.names, side, strict=True)) for side in (expected, actual))
        self.outputs.add(first, second, count)
        if self.measure is not None:
            self.measure.add(expected, actual, count)
        classes = next((i for i, each in enumerate(expected) if each.ndim == 2 and each.shape[1] > 1), None)
        if classes is not None:
            self.divergence += divergence(expected[classes], actual[classes])
            self.rows += len(expected[classes])
        if labels is not None:
            scores = as_scores(expected[0], model), as_scores(actual[0], model)
            for meter_of_one, each in zip(self.accuracies, scores, strict=True):
                meter_of_one.add(each, labels)
            was_right, is_right = (ranked(each)[:, 0] == labels for each in scores)
            self.gained += int(np.sum(is_right & ~was_right))
            self.lost += int(np.sum(was_right & ~is_right))

    def result(self, latency_ms: float) -> Judgement:
        outputs = self.outputs.result()
        kl = self.divergence / self.rows if self.rows else None
        agreement = next((each.agreement for each in outputs if each.agreement is not None), None)
        sqnr_db = min(each.sqnr_db for each in outputs)
        count = self.accuracies[0].count
        if count:
            difference = self.gained - self.lost
            error: float | None = 100 * math.sqrt(max(self.gained + self.lost - difference**2 / count, 0.0)) / count
            top1: float | None = self.accuracies[1].result().top1
            drop, measure = -100 * difference / count, "top-1 accuracy"
        else:
            error, top1 = None, None
            drop, measure = max(output.drop for output in outputs)
        verdict, worst = overall_verdict(outputs).value, worst_text(outputs)
        return Judgement(drop, measure, latency_ms, error, top1, agreement, kl, sqnr_db, verdict=verdict, worst=worst)


def divergence(expected: Array, actual: Array) -> float:
    """The sum over rows of the divergence of actual from expected; infinite where actual has NaN or Inf.

    >>> divergence(np.array([[0.0, 0.0]]), np.array([[1.0, 1.0]]))
    0.0
    """
    if not np.isfinite(actual).all():
        return math.inf
    p, log_p = _probabilities(expected)
    _, log_q = _probabilities(actual)
    return max(0.0, float((p * (log_p - log_q)).sum()))


def _probabilities(scores: Array) -> tuple[Array, Array]:
    """Of rows of scores; rows that are probabilities already stay as they are."""
    values = scores.astype(np.float64)
    if (values >= 0).all() and np.allclose(values.sum(1), 1.0, atol=1e-3):
        return values, np.log(np.maximum(values, _TINY))
    shifted = values - values.max(1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return np.exp(log), log
