"""Time and memory of quantization, compared with a plain pass over the same images and with other tools.

    python -m bench.quantize --models DIR --calib DIR [--peers NAME ...] [--presets NAME ...] [--images 32] [--repeat 3]

Each run is a new process; the time is from model file to quantized file, excluding imports. The floor is one pass of
ONNX Runtime over the calibration images, in a process of the same kind: no calibration can be faster. The runs
alternate, and the best of each is shown, followed by how much longer the median run took. Peak memory is that of the
whole process.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cells import number, times, with_spread
from bench.child import OURS
from bench.models import add_arguments, chosen_models, label, positive
from bench.peers import add_peer_arguments, open_peers
from bench.record import Record
from bench.runs import Quantizers, Runs, blanks, memory_cells, memory_header, time_cells, time_header
from bench.samples import write_samples


def header(titles: Sequence[str]) -> list[str]:
    sizes = [f"{title} file MB" for title in (OURS, *titles)]
    return ["model", "preset", "floor s", f"{OURS} / floor", *time_header(titles), *memory_header(titles), *sizes]


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    model: str
    preset: str
    floor: Runs
    runs: Mapping[str, Runs]

    def cells(self) -> list[str]:
        peers = [who for who in self.runs if who != OURS]
        return [
            self.model,
            label(self.preset),
            with_spread(self.floor.seconds),
            times(self.runs[OURS].best, self.floor.best, 1),
            *time_cells(self.runs, peers),
            *memory_cells(self.runs, peers),
            *(number(run.file_mb, 1) for run in self.runs.values()),
        ]

    def to_json(self) -> dict[str, Any]:
        found = {"floor": self.floor, **self.runs}
        return {"model": self.model, "preset": label(self.preset)} | {
            who: each.to_json() for who, each in found.items()
        }


def measure(quantizers: Quantizers, preset: str, repeat: int) -> Figure:
    """One preset, with a floor that was timed beside it."""
    floor = Runs()
    return Figure(quantizers.model.name, preset, floor, quantizers.take_turns(preset, repeat, floor))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    add_peer_arguments(parser)
    parser.add_argument("--images", type=positive, default=32, help="to calibrate on (%(default)s)")
    parser.add_argument("--repeat", type=positive, default=3, help="runs of each; the best counts (%(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    models = chosen_models(arguments)
    interpreters = open_peers(arguments)
    notes = [f"{arguments.images} images, best of {arguments.repeat}."]
    titles = list(interpreters.titles.values())
    record = Record.begin("quantize", arguments, header(titles), notes, interpreters.facts)
    for model in models:
        with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
            samples = write_samples(model, arguments.calib, arguments.images, Path(folder))
            quantizers = Quantizers(interpreters, model, samples, Path(folder))
            for preset in arguments.presets:
                figure = measure(quantizers, preset, arguments.repeat)
                record.add([figure.cells()], figure.to_json(), blanks(figure.runs, model.name, preset))
    record.finish()


if __name__ == "__main__":
    main()
