"""Size and cost of packed files: sizes, session creation time, latency, and whether the logits are equal.

    python -m bench.packed --models DIR --only resnet50_v1 --calib DIR [--presets NAME ...] [--threads 2]

The model is quantized once for each preset and packed with each profile that ONNX Runtime can run. Sessions are created
alternately in one process, with our operator library and no other option, and the best is shown. `nothing registered`
is the time to create sessions of the unpacked and the packed file without the library; there, activation quantizers are
functions, whatever the weights are. `session MB` is what creating a session adds to the peak memory of a new process
that has made one of a small network before. Latency is measured with the packed and the unpacked file alternating, at
batch size 1.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from bench.cells import number, times, with_spread
from bench.child import OURS, Interpreters
from bench.models import NamedModel, add_arguments, chosen_models, positive
from bench.one_quantization import peak_megabytes
from bench.record import Record, say
from bench.samples import SampleFile, write_samples
from bench.timing import Timing, take_turns
from quark.demo import network_path
from quark.onnx.pack import pack_model, unpack_model
from quark.onnx.session import open_session

PRESETS = ["MXFP4E2M1", "MXFP6E2M3", "MXFP8E4M3", "MXINT8", "MX9", "MX6", "MX4", "BFP16"]
PROFILES = ["portable", "custom"]
SIZES = ["float MB", "unpacked MB", "packed MB", "bits"]
SESSIONS = ["session ms: float", "unpacked", "packed", "packed / float", "nothing registered s: unpacked", "packed"]
HEADER = [
    "model",
    "preset",
    "profile",
    *SIZES,
    *SESSIONS,
    *("session MB: float", "unpacked", "packed", "packed / float"),
    "latency packed / unpacked",
    "same logits",
    "unpacks to itself",
]


@dataclass
class Figure:
    """One row of the table."""

    model: str
    preset: str
    profile: str
    float_bytes: int
    unpacked_bytes: int
    packed_bytes: int
    bits_per_weight: float
    sessions: dict[str, Timing] = field(default_factory=dict)
    bare_sessions: dict[str, Timing] = field(default_factory=dict)
    latency: dict[str, Timing] = field(default_factory=dict)
    megabytes: dict[str, float] = field(default_factory=dict)
    has_same_logits: bool = False
    unpacks_to_itself: bool = False

    def row(self) -> list[str]:
        best = {name: timing.best for name, timing in self.sessions.items()}
        bare = {name: timing.best for name, timing in self.bare_sessions.items()}
        sizes = [number(value / 1e6) for value in (self.float_bytes, self.unpacked_bytes, self.packed_bytes)]
        return [
            *(self.model, self.preset, self.profile, *sizes, number(self.bits_per_weight)),
            *(with_spread(self.sessions.get(name), 1e3, 0) for name in ("float", "unpacked", "packed")),
            times(best.get("packed"), best.get("float")),
            *(number(bare.get(name)) for name in ("unpacked", "packed")),
            *(number(self.megabytes.get(name), 0) for name in ("float", "unpacked", "packed")),
            times(self.megabytes.get("packed"), self.megabytes.get("float")),
            times(self.latency["packed"].best, self.latency["unpacked"].best),
            *("yes" if value else "no" for value in (self.has_same_logits, self.unpacks_to_itself)),
        ]


def time_sessions(makers: dict[str, Callable[[], object]], count: int) -> dict[str, Timing]:
    """Seconds until a session is there, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(count):
        for name, make in makers.items():
            begin = time.perf_counter()
            make()
            seconds[name].append(time.perf_counter() - begin)
    return {name: Timing.of(second) for name, second in seconds.items()}


def session_megabytes(path: Path) -> float:
    """What creating a session adds to the peak memory of a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_peak_growth, path).result()


def _peak_growth(path: Path) -> float:
    open_session(network_path(), threads=1)  # loads ONNX Runtime and our library
    before = peak_megabytes()
    session = open_session(path, threads=1)
    after = peak_megabytes()
    del session
    return after - before


def measure(
    model: NamedModel, preset: str, profile: str, unpacked: Path, samples: SampleFile, arguments: argparse.Namespace
) -> Figure:
    packed, back = unpacked.with_name("packed.onnx"), unpacked.with_name("back.onnx")
    facts = pack_model(unpacked, packed, profile)
    figure = Figure(
        *(model.name, preset, profile, model.path.stat().st_size, facts.bytes_before, facts.bytes_after),
        facts.bits_per_weight,
    )
    unpack_model(packed, back)
    figure.unpacks_to_itself = back.read_bytes() == unpacked.read_bytes()
    files = {"float": model.path, "unpacked": unpacked, "packed": packed}
    made = {name: partial(open_session, path, threads=1) for name, path in files.items()}
    figure.sessions = time_sessions(made, arguments.creations)
    figure.megabytes = {name: session_megabytes(path) for name, path in files.items()}
    if arguments.bare:
        bare = {
            name: partial(open_session, files[name], threads=1, has_library=False) for name in files if name != "float"
        }
        figure.bare_sessions = time_sessions(bare, arguments.bare)
    feeds = {samples.input_name: samples.first()}
    runs = {
        name: partial(open_session(files[name], threads=arguments.threads).run, None, feeds)
        for name in ("unpacked", "packed")
    }
    expected, found = (runs[name]() for name in ("unpacked", "packed"))
    figure.has_same_logits = all(
        np.array(a).tobytes() == np.array(b).tobytes() for a, b in zip(expected, found, strict=True)
    )
    figure.latency = take_turns(dict(runs), arguments.turns)
    return figure


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(presets=PRESETS)
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=PROFILES, metavar="NAME")
    parser.add_argument("--images", type=positive, default=8, help="to calibrate on (%(default)s)")
    parser.add_argument("--threads", type=positive, default=2, help="of the runs that are timed (%(default)s)")
    parser.add_argument("--turns", type=positive, default=7, help="at least; for a second anyway (%(default)s)")
    parser.add_argument("--creations", type=positive, default=5, help="sessions of each file (%(default)s)")
    parser.add_argument(
        "--bare", type=int, default=1, help="sessions with nothing registered, 0 for none (%(default)s)"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    models = chosen_models(arguments)
    notes = [f"Sessions best of {arguments.creations}, latency with {arguments.threads} threads."]
    record = Record.begin("packed", arguments, HEADER, notes)
    for model in models:
        for preset in arguments.presets:
            with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
                samples = write_samples(model, arguments.calib, arguments.images, Path(folder))
                unpacked = Path(folder, "files", "unpacked.onnx")
                unpacked.parent.mkdir()
                say(f"{model.name} {preset}")
                Interpreters().quantize(OURS, model, samples, preset, unpacked)
                for profile in arguments.profiles:
                    figure = measure(model, preset, profile, unpacked, samples, arguments)
                    record.add([figure.row()], figure)
    record.finish()


if __name__ == "__main__":
    main()
