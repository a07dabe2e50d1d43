"""How far a preset's result depends on the calibration images: several sets of them, which have no image in common.

    python -m bench.calibration_sets --models DIR --calib DIR --val DIR [--presets XINT8 A8W8] [--sets 3] [--images 128]

Set k takes every image of `--calib` whose number is k modulo the number of sets, evenly spaced, and a few more of them
to judge refinements by. A cell is the mean divergence of predictions from float, sum p log(p / q), over the images of
`--val`, which need no labels; `spread` is the largest of the sets over the smallest. Divergence differs between two
networks that top-1 cannot tell apart on as many images. Top-1 agreement with float is in the JSON.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.cells import number, times
from bench.models import NamedModel, add_arguments, chosen_models, positive
from bench.record import Record, say
from bench.side_by_side import BATCH_SIZE
from quark.compare.measures import mean_divergence
from quark.evaluate import Dataset, Network, open_dataset
from quark.onnx import get_default_config, quantize
from quark.onnx.data.images import evenly_spaced, find_images, find_preprocessing, image_loader
from quark.onnx.data.samples import held_out_count

PRESETS = ["XINT8", "A8W8"]


@dataclass(frozen=True)
class Figure:
    """One row of the table: divergence and agreement of each set."""

    model: str
    preset: str
    divergence: list[float]
    agreement: list[float]

    def cells(self) -> list[str]:
        each = [number(value, 4) for value in self.divergence]
        return [self.model, self.preset, *each, times(max(self.divergence), min(self.divergence))]


def images_of_set(model: NamedModel, calib: Path, sets: int, number: int, count: int) -> np.ndarray:
    """The images of one of the sets: `count` to calibrate on, then those that are held out."""
    files = find_images(calib)[number::sets]
    wanted = count + held_out_count(count)
    if len(files) < wanted:
        raise SystemExit(f"--calib {calib}: {sets} sets of {wanted} images need {sets * wanted}; change --images")
    loader = image_loader(Network(model.path).image_input, find_preprocessing(model.preprocessing))
    chosen = evenly_spaced(files, wanted)
    every = wanted / held_out_count(count)
    aside = {int((place + 0.5) * every) for place in range(held_out_count(count))}
    order = [*(i for i in range(wanted) if i not in aside), *sorted(aside)]
    return np.stack([loader.load(chosen[place]) for place in order])


def scores_of(path: Path, data: Dataset, threads: int) -> np.ndarray:
    network = Network(path, threads=threads)
    names = [input_.name for input_ in network.inputs]
    batches = (dict(zip(names, batch.inputs.values(), strict=True)) for batch in data.batches(BATCH_SIZE))
    return np.concatenate([network.scores(feeds) for feeds in batches])


def measure(model: NamedModel, arguments: argparse.Namespace) -> list[Figure]:
    data = open_dataset(arguments.val, Network(model.path), model.preprocessing, arguments.limit)
    reference = scores_of(model.path, data, arguments.threads)
    found: dict[tuple[str, int], tuple[float, float]] = {}

    def one(number: int, preset: str, images: np.ndarray, folder: Path) -> None:
        config = get_default_config(preset)
        config.print_summary = False
        path = folder / f"{preset}-{number}.onnx"
        quantize(str(model.path), images, config, num_samples=arguments.images).save(path)
        scores = scores_of(path, data, arguments.threads)
        agreement = float((scores.argmax(axis=1) == reference.argmax(axis=1)).mean())
        found[preset, number] = mean_divergence(reference, scores), 100 * agreement
        say(f"{model.name} {preset} set {number}: divergence {found[preset, number][0]:.4f}")

    with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        for number in range(arguments.sets):
            images = images_of_set(model, arguments.calib, arguments.sets, number, arguments.images)
            list(pool.map(lambda preset: one(number, preset, images, Path(folder)), arguments.presets))  # noqa: B023
    return [
        figure_of(model.name, preset, [found[preset, k] for k in range(arguments.sets)]) for preset in arguments.presets
    ]


def figure_of(model: str, preset: str, sets: Sequence[tuple[float, float]]) -> Figure:
    return Figure(model, preset, [each for each, _ in sets], [each for _, each in sets])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(presets=PRESETS)
    parser.add_argument("--val", type=Path, required=True, metavar="DIR", help="images to compare with float on")
    parser.add_argument("--sets", type=positive, default=3, help="of calibration images (%(default)s)")
    parser.add_argument("--images", type=positive, default=128, help="in a set, to calibrate on (%(default)s)")
    parser.add_argument("--limit", type=positive, metavar="N", help="that many images of --val, evenly spaced (all)")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="presets at the same time (%(default)s)")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="of ONNX Runtime (%(default)s)")
    arguments = parser.parse_args()
    models = chosen_models(arguments)
    header = ["model", "preset", *(f"set {number + 1}" for number in range(arguments.sets)), "spread"]
    notes = [f"Mean divergence from float on the images of '{arguments.val.name}'; {arguments.images} images in a set."]
    record = Record.begin("calibration_sets", arguments, header, notes)
    for model in models:
        for figure in measure(model, arguments):
            record.add([figure.cells()], figure)
    record.finish()


if __name__ == "__main__":
    main()
