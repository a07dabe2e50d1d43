"""Facts on the report page besides layers: accuracy on labelled data, the user's measure, speed, lint's findings."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quark.cli.options import Calibration
from quark.diagnosis import AccuracyFacts, Remark, SpeedFacts
from quark.errors import InvalidValueError
from quark.evaluate import Network, compare, measure_in_turns, open_dataset
from quark.inspect.lint import lint_npu_file
from quark.measures import FunctionMeasure, Measure, MeasureResult
from quark.onnx.data import open_samples

if TYPE_CHECKING:
    from quark.evaluate import Dataset, Network

BUSY_LOAD = 1.5  # runnable processes per processor


@dataclass(frozen=True)
class LabelledData:
    """--data, --limit and --labels; images are read like those for calibration."""

    path: Path
    limit: int | None = None
    labels: Path | None = None

    def open(self, network: Network, preprocess: str) -> Dataset:
        """Open the samples. Data without labels is an error, because agreement with float is measured elsewhere."""

        data = open_dataset(self.path, network, preprocess, self.limit, self.labels)
        if not data.has_labels:
            raise InvalidValueError(
                f"--data '{self.path}' has no labels: expected a folder for each class, or --labels FILE; leave it out "
                f"where there are none"
            )
        return data


def measured_accuracy(float_model: Path, model: Path, data: LabelledData, preprocess: str) -> AccuracyFacts:
    """Measure both models on the same samples."""

    networks = Network(float_model), Network(model)
    result = compare(*networks, data.open(networks[0], preprocess))
    pair = result.accuracies
    assert pair is not None
    return AccuracyFacts(
        data.path.resolve().name,
        result.count,
        pair.first.top1,
        pair.second.top1,
        pair.first.top5,
        pair.second.top5,
        pair.standard_error,
    )


def measured_quality(float_model: Path, model: Path, measure: Measure, calibration: Calibration) -> MeasureResult:
    """Take the measure of both models; built-in ones on the samples that the models are compared on."""

    networks = Network(float_model), Network(model)
    samples = []
    if not isinstance(measure, FunctionMeasure):
        data = None if calibration.path is None else str(calibration.path)
        opened = open_samples(data, networks[0].inputs, count=calibration.count, preprocessing=calibration.preprocess)
        samples = list(opened.in_order())
    return measure.judge(networks[0].session, networks[1].session, samples)


def measured_speed(float_model: Path, model: Path, calibration: Calibration) -> SpeedFacts:
    """Time both models on one sample.

    On a busy computer, threads wait for each other, and the model that computes longer seems several times slower than
    it is. There, each model runs on one thread and its processor time is measured.
    """

    # the diagnosis before this used every processor, which is a load of one each; Windows reports no load
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    threads = 1 if load > BUSY_LOAD * (os.cpu_count() or 1) else None
    clock = time.perf_counter if threads is None else time.thread_time
    networks = Network(float_model, threads), Network(model, threads)
    data = None if calibration.path is None else str(calibration.path)
    samples = open_samples(data, networks[0].inputs, count=1, preprocessing=calibration.preprocess)
    inputs = next(samples.in_order())
    speeds = measure_in_turns(networks, inputs, clock)
    return SpeedFacts(speeds[0].ms_per_sample, speeds[1].ms_per_sample, speeds[0].batch_size, threads)


def lint_remarks(model: Path) -> tuple[Remark, ...] | None:
    """Return lint's findings; None for a file in formats other than the NPU's, which lint is not meant for."""

    findings = lint_npu_file(model)
    if findings is None:
        return None
    names = [" ".join(dict.fromkeys(name for name in (finding.node, finding.tensor) if name)) for finding in findings]
    return tuple(
        Remark(finding.level.value, finding.rule, name, finding.message, finding.fix)
        for finding, name in zip(findings, names, strict=True)
    )
