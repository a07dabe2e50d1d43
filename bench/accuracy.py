"""Top-1 and top-5 of quantized networks, ours and the peer's, beside the float network on the same images.

    python -m bench.accuracy --models DIR --calib DIR --val DIR [--peer PYTHON] [--presets NAME ...] [--limit N]

`--val` is a folder with a folder for each class. The difference to float is paired, with its standard error: of images
that one of the two alone gets right. Agreement is the share of images with the same first class as float. All files run
here, the peer's too: our library has the operators that it uses. The networks see every batch side by side, `--group`
of them at a time, and only the five best classes of each image are kept.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.child import OURS, PEER, ChildError, Interpreters
from bench.networks import NamedModel, add_arguments, chosen_models, label, positive
from bench.results import describe_machine, markdown, number, say, write_json
from bench.samples import SampleFile, write_samples
from quark.errors import QuarkError
from quark.evaluate import Accuracy, Dataset, Network, open_dataset
from quark.evaluate.accuracy import ranked
from quark.evaluate.comparison import Pair
from quark.evaluate.evaluation import remarks_on

FLOAT = "float"
BATCH_SIZE = 10
JUDGED = ("top-1", "difference", "top-5", "agreement")
HEADER = ["model", "preset", "images", "float top-1", *(f"{who} {each}" for who in (OURS, PEER) for each in JUDGED)]

Ranks = NDArray[np.int64]  # the best classes of each image, best first
Key = tuple[str, str]  # preset and who quantized; (FLOAT, "") for the float network


@dataclass(frozen=True)
class Score:
    """One quantized network beside the float network, in percent and in points."""

    top1: float
    top5: float
    difference: float
    standard_error: float
    agreement: float
    gained: int
    lost: int

    def cells(self) -> list[str]:
        difference = f"{self.difference:+.2f} ± {self.standard_error:.2f}"
        return [f"{self.top1:.2f}", difference, f"{self.top5:.2f}", f"{self.agreement:.1f} %"]


@dataclass(frozen=True)
class Figure:
    """One row of the table. A missing score has its reason in `errors`."""

    model: str
    preset: str
    images: int
    float_top1: float
    float_top5: float
    scores: dict[str, Score]
    errors: dict[str, str]

    def cells(self) -> list[str]:
        blank = [""] * len(JUDGED)
        found = [self.scores[who].cells() if who in self.scores else blank for who in (OURS, PEER)]
        return [self.model, label(self.preset), str(self.images), number(self.float_top1), *found[0], *found[1]]


def accuracy_of(ranks: Ranks, labels: NDArray[np.int64]) -> Accuracy:
    hits = ranks == labels[:, None]
    return Accuracy(len(labels), float(hits[:, 0].mean()), float(hits.any(axis=1).mean()))


def score(reference: Ranks, ranks: Ranks, labels: NDArray[np.int64]) -> Score:
    """Both networks have seen the same images, in the same order."""
    was_right, is_right = reference[:, 0] == labels, ranks[:, 0] == labels
    gained, lost = int((is_right & ~was_right).sum()), int((was_right & ~is_right).sum())
    pair = Pair(accuracy_of(reference, labels), accuracy_of(ranks, labels), gained, lost)
    agreement = float((reference[:, 0] == ranks[:, 0]).mean())
    return Score(
        top1=100 * pair.second.top1,
        top5=100 * pair.second.top5,
        difference=100 * pair.top1_difference,
        standard_error=100 * pair.standard_error,
        agreement=100 * agreement,
        gained=gained,
        lost=lost,
    )


def groups_of(files: dict[Key, Path], size: int) -> Iterator[dict[Key, Path]]:
    """`size` files at a time, in order."""
    items = list(files.items())
    return (dict(items[start : start + size]) for start in range(0, len(items), size))


@dataclass
class Round:
    """The networks of one group, open at the same time; one that fails leaves, with the reason in `errors`."""

    networks: dict[Key, Network]
    ranks: dict[Key, list[Ranks]]
    errors: dict[Key, str]

    @classmethod
    def open(cls, files: dict[Key, Path], threads: int, errors: dict[Key, str]) -> Round:
        opened = cls({}, {key: [] for key in files}, errors)
        for key, path in files.items():
            with opened.failing(key):
                opened.networks[key] = Network(path, threads=threads)
        return opened

    @contextmanager
    def failing(self, key: Key) -> Iterator[None]:
        """What fails in here is that network's failure alone."""
        try:
            yield
        except QuarkError as error:
            self.errors[key] = str(error)
            self.networks.pop(key, None)
            del self.ranks[key]

    def add(self, inputs: dict[str, Any]) -> None:
        for key, network in list(self.networks.items()):
            # the peer may have renamed the input
            feeds = dict(zip((each.name for each in network.inputs), inputs.values(), strict=True))
            with self.failing(key):
                self.ranks[key].append(ranked(network.scores(feeds)))


def rank_group(group: Round, data: Dataset, name: str) -> dict[Key, Ranks]:
    """The best classes of every image by every network of the group."""
    done = 0
    for batch in data.batches(BATCH_SIZE):
        group.add(batch.inputs)
        before, done = done, done + batch.count
        if before * 10 // data.count != done * 10 // data.count:
            say(f"  {name}: {done} of {data.count} images")
    return {key: np.concatenate(parts) for key, parts in group.ranks.items()}


def rank_all(
    files: dict[Key, Path], data: Dataset, arguments: argparse.Namespace, errors: dict[Key, str]
) -> dict[Key, Ranks]:
    """Group after group; `errors` takes the reasons of those that fail."""
    ranks: dict[Key, Ranks] = {}
    groups = list(groups_of(files, arguments.group))
    for index, files_of_group in enumerate(groups, 1):
        # no name for the open group: its sessions end before those of the next begin
        name = f"group {index} of {len(groups)}"
        ranks |= rank_group(Round.open(files_of_group, arguments.threads, errors), data, name)
    return ranks


def quantize_all(
    model: NamedModel, samples: SampleFile, interpreters: Interpreters, presets: list[str], errors: dict[Key, str]
) -> dict[Key, Path]:
    """A file for every preset by everyone, beside the images; `errors` takes the reasons of those that failed."""
    files = {}
    for preset in presets:
        for who in interpreters.quantizers:
            folder = samples.path.parent / who / label(preset)
            folder.mkdir(parents=True)
            try:
                outcome = interpreters.quantize(who, model, samples, preset, folder / "quantized.onnx")
                files[preset, who] = folder / "quantized.onnx"
                say(f"{model.name} {preset} {who}: quantized in {outcome.seconds:.1f} s")
            except ChildError as error:
                errors[preset, who] = str(error)
                say(f"{model.name} {preset} {who}: {error}")
    return files


def open_labelled(model: NamedModel, val: Path, limit: int | None) -> Dataset:
    """The images for that model, after a first one has gone through."""
    try:
        network = Network(model.path)
        data = open_dataset(val, network, model.preprocessing, limit)
        classes = network.scores(next(data.batches(1)).inputs).shape[1]
    except QuarkError as error:
        raise SystemExit(f"--val {val}: {error}") from error
    if data.labels is None:
        raise SystemExit(f"--val {val}: expected a folder for each class, with images in it")
    for remark in remarks_on(data, classes):
        say(f"{model.name}: {remark}")
    return data


def measure(model: NamedModel, arguments: argparse.Namespace, interpreters: Interpreters, folder: Path) -> list[Figure]:
    """All rows of one model."""
    data = open_labelled(model, arguments.val, arguments.limit)
    samples = write_samples(model, arguments.calib, arguments.images, folder)
    errors: dict[Key, str] = {}
    files = quantize_all(model, samples, interpreters, arguments.presets, errors)
    ranks = rank_all({(FLOAT, ""): model.path} | files, data, arguments, errors)
    if (FLOAT, "") not in ranks:
        raise SystemExit(f"model {model.name}: {errors[FLOAT, '']}")
    reference = ranks[FLOAT, ""]
    plain = accuracy_of(reference, data.labels)
    figures = []
    for preset in arguments.presets:
        keys = {who: (preset, who) for who in interpreters.quantizers}
        scores = {who: score(reference, ranks[key], data.labels) for who, key in keys.items() if key in ranks}
        reasons = {who: errors[key] for who, key in keys.items() if key in errors}
        figures.append(Figure(model.name, preset, data.count, 100 * plain.top1, 100 * plain.top5, scores, reasons))
    return figures


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--val", type=Path, required=True, metavar="DIR", help="images in class folders")
    parser.add_argument("--images", type=positive, default=128, help="to calibrate on (%(default)s)")
    parser.add_argument("--limit", type=positive, metavar="N", help="that many images of --val, evenly spaced (all)")
    parser.add_argument("--group", type=positive, default=6, metavar="N", help="networks in memory (%(default)s)")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="of ONNX Runtime (%(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    models = chosen_models(arguments)
    interpreters = Interpreters(arguments.peer)
    setting = f"{describe_machine()}; {interpreters.describe_peer()}"
    figures: list[Figure] = []
    for model in models:
        with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
            figures += measure(model, arguments, interpreters, Path(folder))
        write_json(arguments, setting, [asdict(each) for each in figures])
    print(f"{setting}; {arguments.images} images to calibrate on\n")
    print(markdown(HEADER, [each.cells() for each in figures]))


if __name__ == "__main__":
    main()
