"""Mixed precision by accuracy: lower layers from A16W8 to A8W8, as many as the accepted loss of top-1 allows.

    python -m bench.mixed_precision --model NAME=PATH[:PREP] --calib DIR --val DIR [--images N] [--drop D] [--limit N]

Both folders have one subfolder per class. The images in --calib are used for calibration and for choosing the types of
layers. The images in --val are used only to evaluate the result, together with the two extremes: 16-bit activations in
all layers, and 8-bit activations in all layers. `--plan FILE` stores sensitivities and choices, and reuses the
sensitivities.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.models import NamedModel, parse_model, positive
from bench.record import Record, add_record_arguments, say
from bench.side_by_side import FLOAT, accuracy_of, open_labelled, rank_all, score
from quark.evaluate import Dataset
from quark.features.mixed_precision.plan import MixedPlan
from quark.onnx import QuantizationConfig, QuantType, get_default_config, quantize

HIGH, MIXED, LOW = "all at 16 bits", "mixed", "all at 8 bits"
HEADER = ["model", "network", "layers at 16 bits", "seconds", "top-1", "difference", "agreement"]


@dataclass(frozen=True)
class Row:
    """One network, on images that it was not made with."""

    model: str
    network: str
    high: int | None
    seconds: float
    top1: float
    difference: str
    agreement: str

    def cells(self) -> list[str]:
        high = "" if self.high is None else str(self.high)
        return [
            self.model,
            self.network,
            high,
            f"{self.seconds:.0f}",
            f"{self.top1:.2f}",
            self.difference,
            self.agreement,
        ]


def config_of(labels: np.ndarray, arguments: argparse.Namespace) -> QuantizationConfig:
    """A16W8, to be mixed with A8W8."""

    def top1(outputs: Any) -> float:
        return float((outputs.argmax(1).numpy() == labels).mean())

    config = get_default_config("A16W8")
    config.include_auto_mp = True
    config.extra_options["AutoMixprecision"] = {
        "ActTargetQuantType": QuantType.QInt8,
        "WeightTargetQuantType": QuantType.QInt8,
        "Top1AccTarget": arguments.drop,
        "EvaluateFunction": top1,
        "PlanFile": arguments.plan,
    }
    return config


def extreme(is_low: bool) -> QuantizationConfig:
    """All layers alike; but for the types what `config_of` has."""
    config = get_default_config("A16W8")
    if is_low:
        config.activation_type = QuantType.QInt8
    return config


def samples(data: Dataset) -> Iterator[dict[str, Any]]:
    return (batch.inputs for batch in data.batches(1))


def quantize_all(
    model: NamedModel, data: Dataset, arguments: argparse.Namespace, folder: Path
) -> tuple[dict[tuple[str, str], Path], dict[str, float], MixedPlan]:
    """The three files, what each took, and the plan of the mixed one."""
    assert data.labels is not None
    configs = {HIGH: extreme(False), LOW: extreme(True), MIXED: config_of(data.labels, arguments)}
    files, seconds, plan = {}, {}, None
    for name, config in configs.items():
        start = time.perf_counter()
        result = quantize(model.path, samples(data), config)
        seconds[name] = time.perf_counter() - start
        files[name, ""] = result.save(folder / f"{name.replace(' ', '_')}.onnx")
        plan = result.report.mixed or plan
        say(f"{model.name} {name}: {seconds[name]:.1f} s; {' '.join(map(str, plan.figures)) if plan else ''}")
        for remark in result.report.remarks:
            say(f"  {remark}")
    assert plan is not None
    return files, seconds, plan


def measure(model: NamedModel, arguments: argparse.Namespace, folder: Path) -> tuple[list[Row], MixedPlan]:
    calib = open_labelled(model, arguments.calib, arguments.images)
    val = open_labelled(model, arguments.val, arguments.limit)
    files, seconds, plan = quantize_all(model, calib, arguments, folder)
    errors: dict[tuple[str, str], str] = {}
    ranks = rank_all({(FLOAT, ""): model.path} | files, val, arguments.threads, errors)
    if errors:
        raise SystemExit("; ".join(errors.values()))
    reference = ranks[FLOAT, ""]
    rows = [Row(model.name, FLOAT, None, 0.0, 100 * accuracy_of(reference, val.labels).top1, "", "")]
    highs = {HIGH: len(plan.layers), MIXED: len(plan.layers) - len(plan.lowered), LOW: 0}
    for name, high in highs.items():
        found = score(reference, ranks[name, ""], val.labels)
        difference = f"{found.difference:+.2f} ± {found.standard_error:.2f}"
        rows.append(Row(model.name, name, high, seconds[name], found.top1, difference, f"{found.agreement:.1f} %"))
    return rows, plan


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="NAME=PATH[:PREP]")
    parser.add_argument("--calib", type=Path, required=True, metavar="DIR", help="images in class folders")
    parser.add_argument("--val", type=Path, required=True, metavar="DIR", help="other images in class folders")
    parser.add_argument("--images", type=positive, default=200, help="of --calib (%(default)s)")
    parser.add_argument("--limit", type=positive, metavar="N", help="that many images of --val, evenly spaced (all)")
    parser.add_argument("--drop", type=float, default=0.01, help="of top-1 that is accepted (%(default)s)")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="the plan of mixed precision")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="of ONNX Runtime (%(default)s)")
    add_record_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    model = parse_model(arguments.model)
    if not model.path.is_file():
        raise SystemExit(f"--model {arguments.model}: there is no file '{model.path}'")
    notes = [f"{arguments.images} images to calibrate on, {arguments.drop:g} of top-1 accepted."]
    record = Record.begin("mixed_precision", arguments, HEADER, notes)
    with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
        rows, plan = measure(model, arguments, Path(folder))
    record.notes.append(f"On those images: {', '.join(map(str, plan.figures))}.")
    figure = {"model": model.name, "networks": [asdict(row) for row in rows], "plan": plan.to_dict()}
    record.add([row.cells() for row in rows], figure)
    record.finish()


if __name__ == "__main__":
    main()
