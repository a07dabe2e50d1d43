"""How long quantizing takes and how much memory, against a plain pass over the same images and against the peer.

    python -m bench.quantize --models DIR --calib DIR [--peer PYTHON] [--presets NAME ...] [--images 32] [--repeat 3]

Each run is a fresh process; the clock runs from a model file to a quantized file, imports excluded. The floor is ONNX
Runtime once over the images to calibrate on, in a process like the others: no calibration can be faster. The runs take
turns, and the best of each counts; behind it stands how much longer the median run took. Peak memory is that of the
whole process.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.child import OURS, PEER, ChildError, Interpreters, Outcome
from bench.networks import NamedModel, add_arguments, chosen_models, positive
from bench.results import describe_machine, markdown, number, say, times, with_spread, write_json
from bench.samples import SampleFile, write_samples
from bench.timing import Timing

TIME = ["floor s", "ours s", "ours / floor", "peer s", "peer / ours"]
MEMORY = ["ours peak MB", "peer peak MB", "peer / ours"]
HEADER = ["model", "preset", *TIME, *MEMORY, "ours file MB", "peer file MB"]


@dataclass
class Runs:
    """The runs of one candidate; after a failure there are no more."""

    outcomes: list[Outcome] = field(default_factory=list)
    error: str | None = None

    @property
    def seconds(self) -> Timing | None:
        return Timing.of([each.seconds for each in self.outcomes]) if self.outcomes else None

    @property
    def best(self) -> float | None:
        return min((each.seconds for each in self.outcomes), default=None)

    @property
    def peak_mb(self) -> float | None:
        return min((each.peak_mb for each in self.outcomes), default=None)

    @property
    def file_mb(self) -> float | None:
        return next((each.file_mb for each in self.outcomes), None)

    def to_json(self) -> dict[str, Any]:
        seconds = None if self.seconds is None else asdict(self.seconds)
        return {
            "seconds": seconds,
            "peak_mb": self.peak_mb,
            "file_mb": self.file_mb,
            "error": self.error,
            "runs": [asdict(each) for each in self.outcomes],
        }


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    model: str
    preset: str
    floor: Runs
    ours: Runs
    peer: Runs

    def cells(self) -> list[str]:
        ours, peer = self.ours, self.peer
        return [
            self.model,
            self.preset,
            with_spread(self.floor.seconds),
            with_spread(ours.seconds),
            times(ours.best, self.floor.best, 1),
            with_spread(peer.seconds),
            times(peer.best, ours.best, 1),
            number(ours.peak_mb, 0),
            number(peer.peak_mb, 0),
            times(peer.peak_mb, ours.peak_mb),
            number(ours.file_mb, 1),
            number(peer.file_mb, 1),
        ]

    def to_json(self) -> dict[str, Any]:
        runs = {"floor": self.floor, "ours": self.ours, "peer": self.peer}
        return {"model": self.model, "preset": self.preset} | {name: each.to_json() for name, each in runs.items()}


def measure(
    model: NamedModel, arguments: argparse.Namespace, interpreters: Interpreters, samples: SampleFile, folder: Path
) -> list[Figure]:
    """All rows of one model."""
    floor = Runs()
    runs = {(preset, who): Runs() for preset in arguments.presets for who in (OURS, PEER)}
    for turn in range(arguments.repeat):
        floor.outcomes.append(interpreters.run_float(model, samples))
        for (preset, who), each in runs.items():
            if who not in interpreters.quantizers or each.error:
                continue
            try:
                each.outcomes.append(quantize_once(interpreters, who, model, samples, preset, folder))
            except ChildError as error:
                each.error = str(error)
            what = each.error or f"{each.outcomes[-1].seconds:.2f} s, {each.outcomes[-1].peak_mb:.0f} MB"
            say(f"{model.name} {preset} {who}, run {turn + 1} of {arguments.repeat}: {what}")
    return [Figure(model.name, preset, floor, runs[preset, OURS], runs[preset, PEER]) for preset in arguments.presets]


def quantize_once(
    interpreters: Interpreters, who: str, model: NamedModel, samples: SampleFile, preset: str, folder: Path
) -> Outcome:
    """Quantize into a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        return interpreters.quantize(who, model, samples, preset, Path(output, "quantized.onnx"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--images", type=positive, default=32, help="to calibrate on (%(default)s)")
    parser.add_argument("--repeat", type=positive, default=3, help="runs of each; the best counts (%(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    models = chosen_models(arguments)
    interpreters = Interpreters(arguments.peer)
    setting = f"{describe_machine()}; {interpreters.describe_peer()}"
    figures: list[Figure] = []
    for model in models:
        with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
            samples = write_samples(model, arguments.calib, arguments.images, Path(folder))
            figures += measure(model, arguments, interpreters, samples, Path(folder))
        write_json(arguments, setting, [each.to_json() for each in figures])
    print(f"{setting}; {arguments.images} images, best of {arguments.repeat}\n")
    print(markdown(HEADER, [each.cells() for each in figures]))


if __name__ == "__main__":
    main()
