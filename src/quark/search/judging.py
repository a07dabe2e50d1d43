"""How much a quantized network lost against the float one, on samples that all trials share.

    a metric of the user's   what was lost of it, in percent of the float network's value; for error rates the
                             difference, in points
    labelled samples         top-1 accuracy of the float network less that of the quantized one, in points
    else                     what the worst output lost, see `quark.compare.largest_drop`

The divergence is the mean over samples of sum p log(p / q), where p and q are the float and the quantized network's
probabilities, of the first output that has classes. It distinguishes networks that change the same few predictions.

The float network runs once. Its inputs and outputs are kept, beyond a small size in a temporary file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.card import samples_digest
from quark.compare import have_same_form, largest_drop, overall_verdict, worst_text
from quark.compare.measures import divergence
from quark.errors import InvalidValueError
from quark.evaluate import AccuracyMeter, Network, measure_speed, open_dataset
from quark.evaluate.comparison import MeasureMeter, PairMeter
from quark.evaluate.datasets import Batch
from quark.evaluate.network import as_scores
from quark.measures import FunctionMeasure, Measure, OutputMeasure
from quark.onnx.data import Samples
from quark.onnx.data.samples import SampleStore
from quark.report.quantities import count_of

Array = NDArray[Any]
BATCH_SIZE = 10
SPEED_ROUNDS, SPEED_REPEATS, SPEED_SECONDS = 3, 4, 0.5
CAREFUL_ROUNDS, CAREFUL_REPEATS, CAREFUL_SECONDS = 4, 50, 0.2  # used if latency decides


@dataclass(frozen=True)
class Judgement:
    """One network compared with float; see `quark.search.trial.Measurement` for the units."""

    drop: float
    measure: str
    latency_ms: float = 0.0
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
    """Runs the float network on the samples once, and compares others with it. With a `measure`, networks are judged by
    that instead of by accuracy or closeness.

    `threads` is given if latency decides: it is then measured more carefully, with that many threads. One thread is
    disturbed least by other work on the machine and by the threads of other sessions."""

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
        accuracy = AccuracyMeter()
        start = time.perf_counter()
        for batch in batches:
            outputs = network.run(batch.inputs)
            for name, array in zip(network.outputs, outputs, strict=True):
                if array.dtype.kind == "f" and np.isnan(array).any():
                    raise InvalidValueError(
                        f"model '{float_model}', which is float: its output '{name}' has NaN, so that there is nothing "
                        f"to compare with. Check the data and how it is prepared (--preprocess)"
                    )
            self._inputs.append(batch.inputs)
            self._outputs.append({str(i): output for i, output in enumerate(outputs)})
            self._labels.append(batch.labels)
            self.count += batch.count
            if batch.labels is not None:
                accuracy.add(as_scores(outputs[0], float_model), batch.labels)
        if not self.count:
            raise InvalidValueError(f"data '{source}': no samples in it")
        self.output_names = network.outputs
        self.has_labels = self._labels[0] is not None
        self.top1 = accuracy.result().top1 if self.has_labels else None
        self.float_value = self._float_value()
        self.seconds = time.perf_counter() - start  # about as long as judging a network takes
        self._timed = network if threads is None else Network(float_model, threads)
        self.latency_ms = measure_speed(self._timed, self._inputs[0]).ms_per_sample

    def digest(self) -> str:
        """A hash of all samples and their labels."""
        labels = ({} if of_batch is None else {"labels": of_batch} for of_batch in self._labels)
        return samples_digest((self._inputs[i] for i in range(len(self._inputs))), labels)

    def judge(self, model: Path) -> Judgement:
        """Run the model over all samples."""
        network = Network(model)
        meter = MeasureMeter(self.measure, self._float) if isinstance(self.measure, OutputMeasure) else None
        tally = PairMeter(self.output_names, (model, model), meter)
        total, rows = 0.0, 0
        for i, labels in enumerate(self._labels):
            expected, actual = list(self._outputs[i].values()), network.run(self._inputs[i])
            if not all(have_same_form(y, z) for y, z in zip(expected, actual, strict=True)):
                raise InvalidValueError(f"model '{model}' has outputs of other shapes than the float model")
            tally.add(expected, actual, labels, _count(self._inputs[i]))
            pairs = zip(expected, actual, strict=True)
            classes = next(((y, z) for y, z in pairs if y.ndim == 2 and y.shape[1] > 1), None)
            if classes is not None:
                total += divergence(*classes)
                rows += len(classes[0])
        latency = self._latency(network)
        ratio, kl = latency / self.latency_ms, total / rows if rows else None
        judgement = replace(_judgement(tally), latency_ms=latency, latency_ratio=ratio, kl=kl)
        measured = None if meter is None else meter.result()
        if isinstance(self.measure, FunctionMeasure):
            assert self.float_value is not None
            measured = self.measure.result(self.float_value, self.measure.value(network.session))
        if measured is None:
            return judgement
        drop = 100 * measured.drop
        return replace(judgement, drop=drop, measure=measured.name, error=None, value=measured.value)

    def compared_latencies(self, models: Sequence[Path]) -> list[float]:
        """The latency of several models as a share of float's, measured in turns in one run."""
        networks = [self._timed, *(Network(model, self._threads) for model in models)]
        best = [math.inf] * len(networks)
        for _ in range(CAREFUL_ROUNDS):
            for i, network in enumerate(networks):
                speed = measure_speed(network, self._inputs[0], CAREFUL_REPEATS, CAREFUL_SECONDS)
                best[i] = min(best[i], speed.ms_per_sample)
        return [milliseconds / best[0] for milliseconds in best[1:]]

    def _latency(self, network: Network) -> float:
        """The float network's latency at the start times the current ratio of both, so that a machine that gets busy
        does not make later trials look slower."""
        if self._threads is not None:
            return self.latency_ms * self.compared_latencies([network.path])[0]
        inputs = self._inputs[0]
        rounds = [
            [
                measure_speed(timed, inputs, SPEED_REPEATS, SPEED_SECONDS).ms_per_sample
                for timed in (self._float, network)
            ]
            for _ in range(SPEED_ROUNDS)
        ]
        first, second = min(times[0] for times in rounds), min(times[1] for times in rounds)
        return self.latency_ms * second / first

    def _float_value(self) -> float | None:
        """The float network's value of the measure. Errors in a measure surface here, before any trial."""
        if isinstance(self.measure, FunctionMeasure):
            return self.measure.value(self._float.session, "the float network")
        if not isinstance(self.measure, OutputMeasure):
            return None
        meter = MeasureMeter(self.measure, self._float)
        for i in range(len(self._outputs)):
            outputs = list(self._outputs[i].values())
            meter.add(outputs, outputs, _count(self._inputs[i]))
        return meter.result().float_value


def judge_on_folder(
    model: Path,
    data: Path,
    preprocess: str,
    limit: int | None = None,
    labels: Path | None = None,
    measure: Measure | None = None,
    threads: int | None = None,
) -> Judge:
    """A judge by data on the disk, as `quark evaluate` reads it."""
    dataset = open_dataset(data, Network(model), preprocess, limit, labels)
    return Judge(model, dataset.batches(BATCH_SIZE), f"{dataset.count} samples of {dataset.source}", measure, threads)


def judge_on_held_out(
    model: Path, samples: Samples, measure: Measure | None = None, threads: int | None = None
) -> Judge:
    """A judge by the samples that calibration holds out."""
    batches = [Batch(sample, None) for sample in samples.held_out]
    return Judge(
        model, batches, f"{count_of(len(batches), 'held-out sample')} of the calibration data", measure, threads
    )


def _judgement(tally: PairMeter) -> Judgement:
    """The judgement by top-1 accuracy if there are labels, else by the output that lost most."""
    outputs = tally.outputs.result()
    agreement = next((output.agreement for output in outputs if output.agreement is not None), None)
    count = tally.accuracies[0].count
    error = top1 = None
    if count:
        difference = tally.gained - tally.lost
        error = 100 * math.sqrt(max(tally.gained + tally.lost - difference**2 / count, 0.0)) / count
        top1 = tally.accuracies[1].result().top1
        drop, measure = -100 * difference / count, "top-1 accuracy"
    else:
        drop, measure = largest_drop(outputs)
    return Judgement(
        drop,
        measure,
        error=error,
        top1=top1,
        agreement=agreement,
        sqnr_db=min(output.sqnr_db for output in outputs),
        verdict=overall_verdict(outputs).value,
        worst=worst_text(outputs),
    )


def _count(inputs: Mapping[str, Array]) -> int:
    return len(next(iter(inputs.values())))
