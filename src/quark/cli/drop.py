"""How much a quantization lost, in percentage points: what --max-drop limits.

    with a metric                    what the quantized model lost of it, in percent of the float model's value; of
                                     error rates the difference, in points
    with labelled data               top-1 accuracy of the float model less that of the quantized one, same images
    an output of shape [n, classes]  100 (1 - agreement) on the held-out samples
    scores, boxes, distributions     100 (1 - the figure of their worst part), see `quark.fidelity`
    any other output                 100 (1 - cosine)

The worst output counts. A report without any output, because nothing was checked, has lost an unknown share: an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quark.account import Report
from quark.errors import InvalidValueError


@dataclass(frozen=True)
class Drop:
    """Percentage points, and of what."""

    points: float
    measure: str
    unit: str = "points"

    def __str__(self) -> str:
        return f"{self.points:.2f} {self.unit} of {self.measure}"


def measured_drop(report: Report, float_model: Path, quantized: Path, data: Path | None, preprocess: str) -> Drop:
    """What was lost: by the metric of the run where there was one, else on labelled data where there is some."""
    if report.measure is not None:
        unit = "%" if report.measure.is_higher_better else "points"
        return Drop(100 * report.measure.drop, report.measure.name, unit)
    if data is not None:
        return _top1_drop(float_model, quantized, data, preprocess)
    if not report.outputs:
        raise InvalidValueError("--max-drop: nothing was compared with the float model; give --calib or --data")
    return Drop(*max(output.drop for output in report.outputs))


def _top1_drop(float_model: Path, quantized: Path, data: Path, preprocess: str) -> Drop:
    from quark.evaluate import Network, compare, open_dataset

    networks = Network(float_model), Network(quantized)
    pair = compare(*networks, open_dataset(data, networks[0], preprocess)).accuracies
    if pair is None:
        raise InvalidValueError(f"--data '{data}' has no labels: expected a folder for each class")
    return Drop(-100 * pair.top1_difference, "top-1 accuracy")
