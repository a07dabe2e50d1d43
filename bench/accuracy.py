"""Top-1 and top-5 of networks quantized by quark and by other tools, compared with float on the same images.

    python -m bench.accuracy --models DIR --calib DIR --val DIR [DIR ...] [--only NAME ...] [--presets all]
                             [--peers NAME ...] [--cifar FILE.npz --cifar-model FILE.onnx] [--limit N] [--jobs N]
                             [--device cuda] [--resume]

`--val` are folders with one subfolder per class, which the note below a table names; the images of several are judged
together. Presets were chosen on images called `val`, and by divergence from float on calibration images that were not
used; `test` are images that nothing was chosen by. `--presets all` means all presets without finetuning, `finetuned`
those with it. `--jobs` measures so many groups of networks at the same time, which changes no figure but seconds. A
cell shows top-1 and the paired difference from float in points, with its standard error, which comes from the images
that only one of the two gets right. Top-5, the share of images with the same first class as float, sizes and seconds
are in the JSON. All files run in this environment, with our operator library. `--device` is where presets that train do
so. `--resume` continues today's record; finished rows are skipped.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.cells import number
from bench.child import OURS, ChildError, Interpreters, Outcome, blank
from bench.cifar import NAME as CIFAR
from bench.cifar import CifarSource
from bench.models import NamedModel, add_arguments, chosen_models, label, positive
from bench.peers import add_peer_arguments, open_peers
from bench.record import Blank, Record, say
from bench.samples import SampleFile, write_samples
from bench.side_by_side import FLOAT, Key, Ranks, Score, accuracy_of, open_labelled, rank_all, score
from quark.evaluate import Dataset
from quark.onnx.quantization.presets import PRESETS as ROWS

# arguments that choose rows, or say how to go about it; rows of other choices stand beside each other in one record
CHOOSING = ("presets", "only", "model", "models", "threads", "group", "jobs", "timeout")


class Source(Protocol):
    """A model with its images."""

    @property
    def model(self) -> NamedModel: ...

    def data(self, limit: int | None) -> Dataset: ...

    def samples(self, count: int, folder: Path) -> SampleFile: ...


@dataclass(frozen=True)
class FolderSource:
    """Images in folders; those of all `val` are judged."""

    model: NamedModel
    calib: Path
    val: Sequence[Path]

    def data(self, limit: int | None) -> Dataset:
        return joined([open_labelled(self.model, each, limit) for each in self.val])

    def samples(self, count: int, folder: Path) -> SampleFile:
        return write_samples(self.model, self.calib, count, folder)


def joined(parts: Sequence[Dataset]) -> Dataset:
    """The samples of all parts, one part after the other."""
    starts = np.cumsum([0, *(part.count for part in parts)])

    def read(number: int) -> dict[str, np.ndarray]:
        part = int(np.searchsorted(starts, number, side="right")) - 1
        return parts[part].read(number - int(starts[part]))

    labels = [part.labels for part in parts if part.labels is not None]
    assert len(labels) == len(parts)
    source = " and ".join(part.source for part in parts)
    return Dataset(source, int(starts[-1]), np.concatenate(labels), read, parts[0].classes)


@dataclass(frozen=True)
class Figure:
    """One row of the table. A missing score has its reason in `errors`."""

    model: str
    preset: str
    images: int
    float_top1: float
    float_top5: float
    scores: dict[str, Score] = field(default_factory=dict)
    made: dict[str, Outcome] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def cells(self, quantizers: Sequence[str]) -> list[str]:
        found = [str(self.scores[who]) if who in self.scores else "" for who in quantizers]
        return [self.model, self.preset, str(self.images), number(self.float_top1), *found]

    def blanks(self) -> list[Blank]:
        return [blank(who, self.model, self.preset, reason) for who, reason in self.errors.items()]


@dataclass
class Bench:
    """One model with its images; `folder` takes the quantized files, a few presets at a time."""

    source: Source
    interpreters: Interpreters
    arguments: argparse.Namespace
    folder: Path

    def figures(self, presets: Sequence[str]) -> Iterator[Figure]:
        """A row for each preset, as it is measured; with several jobs, in the order in which they end."""
        data = self.source.data(self.arguments.limit)
        samples = self.source.samples(self.arguments.images, self.folder)
        reference = self._float(data)
        per_round = max(1, self.arguments.group // len(self.interpreters.quantizers))
        rounds = [presets[start : start + per_round] for start in range(0, len(presets), per_round)]

        def measured(some: Sequence[str]) -> list[Figure]:
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                return list(self._round(some, data, samples, reference, Path(folder)))

        with ThreadPoolExecutor(self.arguments.jobs) as pool:
            for done in as_completed([pool.submit(measured, some) for some in rounds]):
                yield from done.result()

    def _float(self, data: Dataset) -> Ranks:
        errors: dict[Key, str] = {}
        found = rank_all({(FLOAT, ""): self.source.model.path}, data, self.arguments.threads, errors)
        if errors:
            raise SystemExit(f"model {self.source.model.name}: {errors[FLOAT, '']}")
        return found[FLOAT, ""]

    def _round(
        self, presets: Sequence[str], data: Dataset, samples: SampleFile, reference: Ranks, folder: Path
    ) -> Iterator[Figure]:
        assert data.labels is not None
        made: dict[Key, Outcome] = {}
        errors: dict[Key, str] = {}
        files = {}
        for key in [(preset, who) for preset in presets for who in self.interpreters.quantizers]:
            path = folder / key[1] / label(key[0]) / "quantized.onnx"
            outcome = self._quantize(key, samples, path)
            if isinstance(outcome, Outcome):
                files[key], made[key] = path, outcome
            else:
                errors[key] = outcome
        ranks = rank_all(files, data, self.arguments.threads, errors)
        plain = accuracy_of(reference, data.labels)
        for preset in presets:
            figure = Figure(self.source.model.name, label(preset), data.count, 100 * plain.top1, 100 * plain.top5)
            for who in self.interpreters.quantizers:
                key = preset, who
                if key in ranks:
                    figure.scores[who] = score(reference, ranks[key], data.labels)
                    figure.made[who] = made[key]
                else:
                    figure.errors[who] = errors[key]
            yield figure

    def _quantize(self, key: Key, samples: SampleFile, path: Path) -> Outcome | str:
        """What it took, or why there is no file."""
        path.parent.mkdir(parents=True)
        name = f"{self.source.model.name} {label(key[0])} {key[1]}"
        try:
            trained = {} if self.arguments.device == "cpu" else training_on(self.arguments.device, key)
            outcome = self.interpreters.quantize(key[1], self.source.model, samples, key[0], path, **trained)
        except ChildError as error:
            say(f"{name}: {error}")
            return str(error)
        say(f"{name}: quantized in {outcome.seconds:.1f} s")
        return outcome


def training_on(device: str, key: Key) -> dict[str, Any]:
    """What `quantize` is asked for besides the preset, so that it trains on that device.

    >>> training_on("cuda", ("MX6_DISTILL", "ours"))
    {'extra_options': {'DistillationDevice': 'cuda'}}
    >>> training_on("cuda", ("MX6", "ours"))
    {}
    """
    preset, who = key
    row = ROWS.get(preset)
    wanted: dict[str, Any] = {}
    if row is not None and row.fields.get("include_fast_ft"):
        wanted["finetune"] = {"OptimDevice": device}
    if row is not None and row.options.get("Distillation") and who == OURS:
        wanted["extra_options"] = {"DistillationDevice": device}
    return wanted


def resume(record: Record) -> set[tuple[str, str]]:
    """Put what today's record of the same name has into this one; its models and presets."""
    before = record.earlier(CHOOSING)
    if before is None:
        return set()
    record.rows, record.figures = before.rows, before.figures
    record.blanks = [
        blank(who, figure["model"], figure["preset"], reason)
        for figure in before.figures
        for who, reason in figure["errors"].items()
    ]
    return {(figure["model"], figure["preset"]) for figure in before.figures}


def sources(arguments: argparse.Namespace) -> list[Source]:
    """All models that the arguments name, each with its images."""
    if (arguments.cifar is None) != (arguments.cifar_model is None):
        raise SystemExit("--cifar FILE.npz and --cifar-model FILE.onnx belong together: give both")
    found: list[Source] = []
    is_cifar_alone = arguments.cifar is not None and arguments.models is None and not arguments.model
    for model in chosen_models(arguments, may_be_none=is_cifar_alone):
        if arguments.calib is None or arguments.val is None:
            raise SystemExit(f"model {model.name}: give its images with --calib DIR and --val DIR")
        found.append(FolderSource(model, arguments.calib, arguments.val))
    if arguments.cifar is not None:
        if not arguments.cifar_model.is_file():
            raise SystemExit(f"--cifar-model {arguments.cifar_model}: there is no such file")
        found.append(CifarSource(arguments.cifar, NamedModel(CIFAR, arguments.cifar_model)))
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, needs_calib=False)
    add_peer_arguments(parser)
    parser.add_argument("--val", type=Path, nargs="+", metavar="DIR", help="images in class folders")
    parser.add_argument("--cifar", type=Path, metavar="FILE.npz", help="CIFAR-10, for --cifar-model")
    parser.add_argument("--cifar-model", type=Path, metavar="FILE.onnx", help=f"called {CIFAR} in the table")
    parser.add_argument("--images", type=positive, default=128, help="to calibrate on (%(default)s)")
    parser.add_argument(
        "--limit", type=positive, metavar="N", help="that many images of each --val, evenly spaced (all)"
    )
    parser.add_argument("--group", type=positive, default=8, metavar="N", help="networks in memory (%(default)s)")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="groups at the same time (%(default)s)")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="of ONNX Runtime (%(default)s)")
    parser.add_argument("--timeout", type=positive, default=1800, metavar="S", help="of a quantization (%(default)s)")
    parser.add_argument("--device", default="cpu", help="where presets that train do so, such as cuda (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with today's record")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    chosen = sources(arguments)
    interpreters = open_peers(arguments).with_timeout(arguments.timeout)
    header = ["model", "preset", "images", "float", OURS, *interpreters.titles.values()]
    folders = " and ".join(f"'{each.name}'" for each in arguments.val or ())
    judged = f"the images of {folders}" if folders else "CIFAR-10's test images"
    measured = f"Top-1 in percent and the paired difference to float in points, on {judged}"
    notes = [f"{measured}; {arguments.images} images to calibrate on."]
    record = Record.begin("accuracy", arguments, header, notes, interpreters.facts)
    done = resume(record) if arguments.resume else set()
    for source in chosen:
        presets = [preset for preset in arguments.presets if (source.model.name, label(preset)) not in done]
        if not presets:
            say(f"{source.model.name}: everything is in the record")
            continue
        with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
            for figure in Bench(source, interpreters, arguments, Path(folder)).figures(presets):
                record.add([figure.cells(interpreters.quantizers)], asdict(figure), figure.blanks())
    order = [(source.model.name, label(preset)) for source in chosen for preset in arguments.presets]
    rank = {key: place for place, key in enumerate(order)}
    last = len(rank)  # rows of an earlier command stay in front of all others
    record.rows.sort(key=lambda row: rank.get((row[0], row[1]), -last))
    record.figures.sort(key=lambda figure: rank.get((figure["model"], figure["preset"]), -last))
    record.finish()


if __name__ == "__main__":
    main()
