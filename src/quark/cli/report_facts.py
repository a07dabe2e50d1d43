"""What the report says beyond the layers: accuracy on labelled data, speed, and what the NPU's rules find."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quark.cli.calibration_option import Calibration
from quark.diagnosis import AccuracyFacts, Remark, SpeedFacts
from quark.errors import InvalidValueError, ModelError

if TYPE_CHECKING:
    from quark.evaluate import Dataset, Network
    from quark.measures import Measure, MeasureResult

ROUNDS = 4
REPEATS_A_ROUND = 3
SECONDS_A_ROUND = 0.5


@dataclass(frozen=True)
class LabelledData:
    """--data, --limit and --labels; images are read as those for calibration."""

    path: Path
    limit: int | None = None
    labels: Path | None = None

    def open(self, network: Network, preprocess: str) -> Dataset:
        """The samples; data without labels is an error, since agreement with float is known without it."""
        from quark.evaluate import open_dataset

        data = open_dataset(self.path, network, preprocess, self.limit, self.labels)
        if not data.has_labels:
            raise InvalidValueError(
                f"--data '{self.path}' has no labels: expected a folder for each class, or --labels FILE; leave it out "
                f"where there are none"
            )
        return data


def measured_accuracy(float_model: Path, model: Path, data: LabelledData, preprocess: str) -> AccuracyFacts:
    """Both models on the same samples."""
    from quark.evaluate import Network, compare

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
    from quark.evaluate import Network
    from quark.measures import FunctionMeasure
    from quark.onnx.data import open_samples

    networks = Network(float_model), Network(model)
    samples = []
    if not isinstance(measure, FunctionMeasure):
        data = None if calibration.path is None else str(calibration.path)
        opened = open_samples(data, networks[0].inputs, count=calibration.count, preprocessing=calibration.preprocess)
        samples = list(opened.in_order())
    return measure.judge(networks[0].session, networks[1].session, samples)


def measured_speed(float_model: Path, model: Path, calibration: Calibration) -> SpeedFacts:
    """Both models on one sample, in turns: what disturbs the computer for a while then disturbs both."""
    from quark.evaluate import Network, measure_speed
    from quark.onnx.data import open_samples

    networks = Network(float_model), Network(model)
    data = None if calibration.path is None else str(calibration.path)
    samples = open_samples(data, networks[0].inputs, count=1, preprocessing=calibration.preprocess)
    inputs = next(samples.in_order())
    speeds = [
        [measure_speed(each, inputs, REPEATS_A_ROUND, SECONDS_A_ROUND) for each in networks] for _ in range(ROUNDS)
    ]
    best = [min(each.ms_per_sample for each in of_one) for of_one in zip(*speeds, strict=True)]
    return SpeedFacts(best[0], best[1], speeds[0][0].batch_size)


def lint_remarks(model: Path) -> tuple[Remark, ...] | None:
    """What `quark lint` finds; None for a file in other numbers than the NPU's, which it has nothing to say about."""
    from quark.onnx.lint import lint

    if not _is_in_npu_numbers(model):
        return None
    return tuple(
        Remark(
            each.level.value,
            each.rule,
            " ".join(dict.fromkeys(name for name in (each.node, each.tensor) if name)),
            each.message,
            each.fix,
        )
        for each in lint(model)
    )


def _is_in_npu_numbers(model: Path) -> bool:
    """True if 8-bit integers have power-of-two scales, one for each tensor; biases may be wider."""
    from quark.onnx.lint.file_quantizers import position_of
    from quark.onnx.plan_reader import read_plan
    from quark.plan import AffineChoice, BlockChoice

    try:
        choices = [each.choice for each in read_plan(model)]
    except ModelError:  # numbers that no plan has
        return False
    narrow = [each for each in choices if not isinstance(each, BlockChoice) and each.format in ("int8", "uint8")]
    return bool(narrow) and all(
        isinstance(each, AffineChoice) and len(each.scale) == 1 and position_of(each.scale[0]) is not None
        for each in narrow
    )
