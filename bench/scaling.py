"""How the cost of quantization grows with the images, the size of the model, its layers, and the processors.

    python -m bench.scaling [--presets A8W8 XINT8 MXFP4E2M1] [--axes images many_images width layers many_layers
                            processors] [--repeat 3] [--peers amd-quark]

The networks are generated, and only the quantity of the axis varies. Images and channels are small on the axes that go
up to 10,000 images and 5000 layers. Each run is a new process; the time is from model file to quantized file.
Processors are those that the process may use, for quark and the other tool alike. `per doubling` is the factor by which
seconds and memory grow if the axis doubles: 2 to the power of the slope of a line through all points in log-log scale.
For the width, it refers to the bytes of the weights, which grow by a factor of four.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.cells import number
from bench.child import OURS, Interpreters
from bench.layered_network import INPUT, Shape, build
from bench.models import NamedModel, checked_presets, positive
from bench.peers import add_peer_arguments, open_peers
from bench.record import Record, add_record_arguments, say
from bench.runs import Quantizers, Runs, blanks, memory_cells, memory_header, time_cells, time_header
from bench.samples import SampleFile
from quark.onnx.data.samples import held_out_count

PRESETS = ["A8W8", "XINT8", "MXFP4E2M1"]
PEERS = ["amd-quark"]
PER_DOUBLING = "per doubling"


@dataclass(frozen=True)
class Point:
    """One network, how many images, and on how many processors; None: all."""

    shape: Shape
    images: int = 32
    processors: int | None = None


def points_of(axis: str) -> dict[int, Point]:
    """The points of an axis by what is written there."""
    if axis == "images":
        return {count: Point(Shape(20, 64, 32), images=count) for count in (8, 16, 32, 64, 128)}
    if axis == "many_images":
        return {count: Point(Shape(6, 8, 8), images=count) for count in (100, 1000, 10_000)}
    if axis == "many_layers":
        return {layers: Point(Shape(layers, 16, 8), images=8) for layers in (500, 1000, 2000, 5000)}
    if axis == "width":
        return {width: Point(Shape(20, width, 16)) for width in (32, 64, 128, 256)}
    if axis == "layers":
        return {layers: Point(Shape(layers, 32, 16)) for layers in (10, 25, 50, 100, 200, 400)}
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= available]
    return {count: Point(Shape(20, 64, 32), processors=count) for count in counts}


AXES = ("images", "many_images", "width", "layers", "many_layers", "processors")


def slope(places: Sequence[float], values: Sequence[float]) -> float | None:
    """Of the line through all points in logarithms; None where there are fewer than two.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    if len(places) < 2:
        return None
    return float(np.polyfit(np.log(places), np.log(values), 1)[0])


def growth(places: Sequence[float], values: Sequence[float | None]) -> float | None:
    """By what the values are multiplied where the place doubles; places without a value are left out."""
    known = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
    found = slope([place for place, _ in known], [value for _, value in known])
    return None if found is None else 2.0**found


@contextmanager
def processors(count: int | None) -> Iterator[None]:
    """Processes that are started in here may use that many processors."""
    if count is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def write_images(path: Path, shape: tuple[int, ...]) -> None:
    """Random images in an .npy file, written one by one."""
    random = np.random.default_rng(1)
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for _ in range(shape[0]):
            file.write(random.standard_normal(shape[1:], np.float32).data)


def measure(point: Point, preset: str, interpreters: Interpreters, repeat: int) -> tuple[dict[str, Runs], float]:
    """The runs of everyone, and the megabytes of the model."""
    with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
        path = build(Path(folder, "network.onnx"), point.shape)
        count = point.images + held_out_count(point.images)
        write_images(Path(folder, "images.npy"), (count, 3, point.shape.size, point.shape.size))
        samples = SampleFile(Path(folder, "images.npy"), INPUT, point.images)
        quantizers = Quantizers(interpreters, NamedModel(str(point.shape), path), samples, Path(folder))
        with processors(point.processors):
            return quantizers.take_turns(preset, repeat), path.stat().st_size / 1e6


@dataclass(frozen=True)
class Line:
    """One preset along one axis, by the values there."""

    axis: str
    preset: str
    runs: Mapping[int, Mapping[str, Runs]]
    megabytes: Mapping[int, float]

    def summary(self) -> list[str]:
        """The last row: growth of seconds and memory, of everyone."""
        places = [self.megabytes[value] if self.axis == "width" else float(value) for value in self.runs]
        cells = []
        for what in ("best", "peak_mb"):
            for who in next(iter(self.runs.values())):
                values = [getattr(runs[who], what) for runs in self.runs.values()]
                cells += [number(growth(places, values), unit=" x"), *([] if who == OURS else [""])]
        return [self.axis, PER_DOUBLING, "", self.preset, *cells]


def measure_axis(axis: str, arguments: argparse.Namespace, interpreters: Interpreters, record: Record) -> None:
    """All rows of an axis, preset after preset."""
    peers = list(interpreters.titles)
    for preset in arguments.presets:
        line = Line(axis, preset, {}, {})
        for value, point in points_of(axis).items():
            say(f"{axis} {value}, {preset}")
            runs, megabytes = measure(point, preset, interpreters, arguments.repeat)
            line = Line(axis, preset, {**line.runs, value: runs}, {**line.megabytes, value: megabytes})
            row = [axis, str(value), f"{megabytes:.1f}", preset, *time_cells(runs, peers), *memory_cells(runs, peers)]
            figure = {"axis": axis, "value": value, "preset": preset, "model_mb": megabytes}
            figure |= {who: run.to_json() for who, run in runs.items()}
            record.add([row], figure, blanks(runs, f"{axis} {value}", preset))
        if line.runs:
            record.add([line.summary()], {"axis": axis, "preset": preset, PER_DOUBLING: line.summary()[4:]})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=PRESETS, metavar="NAME")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES), metavar="NAME", help=", ".join(AXES))
    parser.add_argument("--repeat", type=positive, default=3, help="runs of each; the best counts (%(default)s)")
    parser.add_argument("--timeout", type=positive, default=1800, metavar="S", help="of a quantization (%(default)s)")
    add_peer_arguments(parser, PEERS)
    add_record_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.presets = checked_presets(arguments.presets)
    interpreters = open_peers(arguments).with_timeout(arguments.timeout)
    titles = list(interpreters.titles.values())
    header = ["axis", "value", "model MB", "preset", *time_header(titles), *memory_header(titles)]
    record = Record.begin("scaling", arguments, header, [f"Best of {arguments.repeat}."], interpreters.facts)
    for axis in arguments.axes:
        measure_axis(axis, arguments, interpreters, record)
    record.finish()


if __name__ == "__main__":
    main()
