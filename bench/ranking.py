"""Whether the ranking of layers is right: the gain from leaving the worst layers in float, compared with random ones.

    python -m bench.ranking --models DIR --calib DIR --val DIR [--only NAME ...] [--presets NAME ...] [--limit N]

For every model and preset, the benchmark quantizes, ranks the layers with weights by `quark.onnx.diagnose`, and
quantizes again with the worst `--layers` in `nodes_to_exclude`, and with as many random layers, `--draws` times. It
measures on images of `--val` how much top-1 increases (in points), and how much the divergence of predictions from
float, sum p log(p / q), decreases. The ratio compares the worst layers with the mean of the draws. With a few hundred
images, top-1 varies by chance, and the divergence hardly does.

A layer is a node and the Relu or Clip fused with it. Quantizers are computed as the graph has them, which matches
integer kernels except for rounding.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.cells import number
from bench.models import NamedModel, add_arguments, chosen_models, label, positive
from bench.record import Record, say
from bench.side_by_side import open_labelled
from quark.compare.measures import log_probabilities
from quark.evaluate import Dataset
from quark.onnx import quantize
from quark.onnx.diagnose import diagnose
from quark.onnx.quantization.config.config import get_default_config
from quark.onnx.quantization.config.files import load_config
from quark.onnx.session import open_session

PRESETS = ["XINT8", "MXFP4E2M1"]
BATCH_SIZE = 10
BASE, WORST = "quantized", "worst in float"
HEADER = ["model", "preset", "images", "float top-1", "quantized", "worst", "random", "top-1 ratio", "KL", "worst KL"]
HEADER += ["random KL", "KL ratio"]


@dataclass(frozen=True)
class Score:
    """Top-1 in percent, and the mean divergence from float."""

    top1: float
    divergence: float


@dataclass(frozen=True)
class Row:
    """One model and preset. `draws` are the scores with random layers in float."""

    model: str
    preset: str
    images: int
    float_top1: float
    base: Score
    worst: Score
    draws: tuple[Score, ...]
    layers: tuple[str, ...]

    @property
    def top1_ratio(self) -> float | None:
        return ratio(self.worst.top1 - self.base.top1, [draw.top1 - self.base.top1 for draw in self.draws])

    @property
    def divergence_ratio(self) -> float | None:
        gains = [self.base.divergence - draw.divergence for draw in self.draws]
        return ratio(self.base.divergence - self.worst.divergence, gains)

    def cells(self) -> list[str]:
        top1 = float(np.mean([draw.top1 for draw in self.draws]))
        divergence = float(np.mean([draw.divergence for draw in self.draws]))
        return [
            self.model,
            label(self.preset),
            str(self.images),
            *(number(value) for value in (self.float_top1, self.base.top1, self.worst.top1, top1)),
            ratio_text(self.top1_ratio),
            *(number(value, 4) for value in (self.base.divergence, self.worst.divergence, divergence)),
            ratio_text(self.divergence_ratio),
        ]


def ratio(gain: float, others: Sequence[float]) -> float | None:
    """The gain over the mean of the others; None where those gained nothing, and there is nothing to divide by.

    >>> ratio(3.0, [1.0, 0.5]), ratio(3.0, [-1.0, 0.5])
    (4.0, None)
    """
    mean = float(np.mean(others))
    return gain / mean if mean > 0 else None


def ratio_text(value: float | None) -> str:
    return "random gains nothing" if value is None else f"{value:.1f} x"


def draw(candidates: Sequence[str], count: int, draws: int, seed: int) -> list[list[str]]:
    """`count` different layers, `draws` times."""
    generator = np.random.default_rng(seed)
    return [[candidates[i] for i in sorted(generator.permutation(len(candidates))[:count])] for _ in range(draws)]


def quantize_all(
    model: NamedModel, preset: str, arguments: argparse.Namespace, folder: Path
) -> tuple[dict[str, Path], tuple[str, ...]]:
    """All files by what was left in float, and the layers that were ranked worst."""

    def file(name: str, excluded: Sequence[str]) -> Path:
        config = load_config(Path(preset)) if Path(preset).suffix else get_default_config(preset)
        config.nodes_to_exclude = [*config.nodes_to_exclude, *excluded]
        result = quantize(
            model.path, arguments.calib, config, num_samples=arguments.images, preprocessing=model.preprocessing
        )
        say(f"{model.name} {label(preset)} {name}: {', '.join(excluded)}")
        return result.save(folder / f"{name.replace(' ', '_')}.onnx")

    files = {BASE: file(BASE, [])}
    diagnosis = diagnose(
        model.path,
        files[BASE],
        arguments.calib,
        num_samples=arguments.images,
        sensitivity_samples=arguments.samples,
        histograms=0,
        preprocessing=model.preprocessing,
    )
    candidates = {diagnosis.name: diagnosis.nodes for diagnosis in diagnosis.ranked if diagnosis.weights}
    worst = list(candidates)[: arguments.layers]
    files[WORST] = file(WORST, [node for name in worst for node in candidates[name]])
    for index, names in enumerate(draw(list(candidates), arguments.layers, arguments.draws, arguments.seed)):
        files[f"draw {index}"] = file(f"draw {index}", [node for name in names for node in candidates[name]])
    return files, tuple(worst)


def score_all(files: dict[str, Path], reference: Path, data: Dataset, threads: int) -> tuple[float, dict[str, Score]]:
    """Float's top-1, and the scores of all others; they see every batch side by side."""
    assert data.labels is not None
    networks = {name: open_session(path, threads=threads, has_integer_kernels=False) for name, path in files.items()}
    exact = open_session(reference, threads=threads)
    hits: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in ("float", *networks)}
    divergences: dict[str, list[NDArray[np.float64]]] = {name: [] for name in networks}
    start = 0
    for batch in data.batches(BATCH_SIZE):
        labels = data.labels[start : start + batch.count]
        start += batch.count
        scores = exact.run(None, batch.inputs)[0]
        hits["float"].append(scores.argmax(1) == labels)
        p = log_probabilities(scores)
        for name, network in networks.items():
            scores = network.run(None, batch.inputs)[0]
            hits[name].append(scores.argmax(1) == labels)
            divergences[name].append((np.exp(p) * (p - log_probabilities(scores))).sum(axis=1))
    top1 = {name: 100 * float(np.concatenate(hit).mean()) for name, hit in hits.items()}
    return top1["float"], {
        name: Score(top1[name], float(np.concatenate(divergence).mean())) for name, divergence in divergences.items()
    }


def measure(model: NamedModel, preset: str, arguments: argparse.Namespace, folder: Path) -> Row:
    data = open_labelled(model, arguments.val, arguments.limit)
    files, worst = quantize_all(model, preset, arguments, folder)
    float_top1, scores = score_all(files, model.path, data, arguments.threads)
    draws = tuple(score for name, score in scores.items() if name not in (BASE, WORST))
    return Row(model.name, preset, data.count, float_top1, scores[BASE], scores[WORST], draws, worst)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(presets=PRESETS)
    parser.add_argument("--val", type=Path, required=True, metavar="DIR", help="images in class folders")
    parser.add_argument("--images", type=positive, default=64, help="to calibrate and rank on (%(default)s)")
    parser.add_argument("--samples", type=positive, default=8, help="of those for sensitivities (%(default)s)")
    parser.add_argument("--layers", type=positive, default=3, help="left in float (%(default)s)")
    parser.add_argument("--draws", type=positive, default=5, help="of random layers (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (%(default)s)")
    parser.add_argument("--limit", type=positive, metavar="N", help="that many images of --val, evenly spaced (all)")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="of ONNX Runtime (%(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    models = chosen_models(arguments)
    notes = [f"{arguments.layers} layers in float, {arguments.draws} draws; {arguments.images} images to rank on."]
    record = Record.begin("ranking", arguments, HEADER, notes)
    for model in models:
        for preset in arguments.presets:
            with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
                row = measure(model, preset, arguments, Path(folder))
            record.add([row.cells()], row)
    record.finish()


if __name__ == "__main__":
    main()
