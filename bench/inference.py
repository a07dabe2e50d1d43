"""How fast quantized models run in ONNX Runtime, as a multiple of the float model.

    python -m bench.inference --models DIR --calib DIR [--peers NAME ...] [--presets NAME ...] [--threads 1 2]

The batch size is 1, with our operator library registered. The float and the quantized model alternate in one process,
and the best turn of each is shown, followed by how much longer the median turn took. Integer kernels are counted in the
graph after ONNX Runtime has optimized it. `portable s` is the time of a session that uses the functions in the file,
without the library. Another tool's files run in its own environment, with its own library if it has one, and are
compared with the float model there. `--for-cpu` adds a row for our files after `quark convert --for cpu`, and fails if
an output bit on one of the images is not the same.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from bench.cells import number, times, with_spread
from bench.child import OURS, ChildError, Interpreters, blank
from bench.models import NamedModel, add_arguments, chosen_models, label, positive
from bench.peers import add_peer_arguments, open_peers
from bench.record import Blank, Record, say
from bench.samples import SampleFile, write_samples
from bench.timing import Timing, take_turns
from quark.onnx import get_library_path
from quark.onnx.convert.for_cpu import convert_for_cpu
from quark.onnx.session import open_session
from quark.ops.schema import DOMAIN

INTEGER_KERNELS = ("QLinearConv", "ConvInteger")
CREATIONS = 3
LATENCY = ["float ms", "ours ms", "ours / float"]
SESSIONS = ["session s, float", "session s, ours", "portable s"]


def header(titles: Iterable[str]) -> list[str]:
    peers = [cell for title in titles for cell in (f"{title} / its float", "of ours")]
    return ["model", "preset", "threads", *LATENCY, *peers, "integer kernels", *SESSIONS]


@dataclass(frozen=True)
class Latency:
    """Of the quantized model and of the float model beside it."""

    float: Timing
    quantized: Timing

    @property
    def multiple(self) -> float:
        return self.quantized.best / self.float.best


@dataclass
class Figure:
    """One row of the table; what could not be measured is not there, and `errors` says why."""

    model: str
    preset: str
    latencies: dict[str, dict[int, Latency]] = field(default_factory=dict)  # by who, and the number of threads
    integer_kernels: int | None = None
    convolutions: int | None = None
    session_seconds: dict[str, Timing] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def rows(self, threads: list[int]) -> Iterator[list[str]]:
        """One for each number of threads; what has nothing to do with threads stands in the first."""
        rest = self._rest()
        for thread in threads:
            found = {who: by_threads.get(thread) for who, by_threads in self.latencies.items()}
            ours = found.pop(OURS)
            yield [
                self.model,
                label(self.preset),
                str(thread),
                with_spread(ours and ours.float, 1e3),
                with_spread(ours and ours.quantized, 1e3),
                number(ours and ours.multiple, unit=" x"),
                *(cell for peer in found.values() for cell in _beside(peer, ours)),
                *rest,
            ]
            rest = [""] * len(rest)

    def blanks(self) -> list[Blank]:
        return [blank(who, self.model, label(self.preset), reason) for who, reason in self.errors.items()]

    def _rest(self) -> list[str]:
        kernels = "" if self.integer_kernels is None else f"{self.integer_kernels} of {self.convolutions}"
        created = [self.session_seconds.get(name) for name in ("float", "library", "portable")]
        return [kernels, *(number(each and each.best) for each in created)]


def _beside(peer: Latency | None, ours: Latency | None) -> tuple[str, str]:
    return number(peer and peer.multiple, unit=" x"), times(peer and peer.multiple, ours and ours.multiple, 1)


def optimized_operators(path: Path) -> Counter[str]:
    """How many nodes of each type a session of that file runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.register_custom_ops_library(get_library_path())
    with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
        options.optimized_model_filepath = str(Path(folder, "optimized.onnx"))
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        graph = onnx.load(options.optimized_model_filepath, load_external_data=False).graph
    return Counter(node.op_type for node in graph.node)


def time_sessions(model: Path, quantized: Path, has_portable: bool) -> dict[str, Timing]:
    """Seconds until a session is there; once for portable functions, which take their time."""
    runs: dict[str, Callable[[], object]] = {
        "float": partial(open_session, model, threads=1),
        "library": partial(open_session, quantized, threads=1),
    }
    turns = [name for _ in range(CREATIONS) for name in runs]
    if has_portable and any(
        function.domain == DOMAIN for function in onnx.load(quantized, load_external_data=False).functions
    ):
        runs["portable"] = partial(open_session, quantized, threads=1, has_library=False)
        turns.append("portable")
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for name in turns:
        begin = time.perf_counter()
        runs[name]()
        seconds[name].append(time.perf_counter() - begin)
    return {name: Timing.of(second) for name, second in seconds.items()}


def time_ours(model: Path, quantized: Path, samples: SampleFile, threads: int, turns: int) -> Latency:
    feeds = {samples.input_name: samples.first()}
    runs: dict[str, Callable[[], object]] = {
        name: partial(open_session(path, threads=threads).run, None, feeds)
        for name, path in (("float", model), ("quantized", quantized))
    }
    return Latency(**take_turns(runs, turns))


@dataclass(frozen=True)
class Bench:
    """One network with its images; `folder` takes the quantized files."""

    model: NamedModel
    samples: SampleFile
    interpreters: Interpreters
    folder: Path
    arguments: argparse.Namespace

    def measure(self, preset: str, *, is_for_cpu: bool = False) -> Figure:
        figure = Figure(self.model.name, f"{label(preset)}, for cpu" if is_for_cpu else preset)
        for who in [OURS] if is_for_cpu else self.interpreters.quantizers:
            figure.latencies[who] = {}
            say(f"{self.model.name} {label(preset)} {who}")
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                quantized = Path(folder, "quantized.onnx")
                try:
                    self.interpreters.quantize(who, self.model, self.samples, preset, quantized)
                    quantized = self._converted(quantized) if is_for_cpu else quantized
                    for threads in self.arguments.threads:
                        figure.latencies[who][threads] = self._latency(who, quantized, threads)
                    if who == OURS:
                        self._measure_ours(figure, quantized)
                except Exception as error:  # the other rows are worth having
                    figure.errors[who] = (
                        str(error) if isinstance(error, ChildError) else f"{type(error).__name__}: {error}"
                    )
                    say(f"  {figure.errors[who]}")
        return figure

    def _converted(self, quantized: Path) -> Path:
        """The file that `quark convert --for cpu` writes; raises ValueError if its outputs are not the same."""
        converted = quantized.with_name("for_cpu.onnx")
        onnx.save(convert_for_cpu(onnx.load(quantized)), converted)
        before, after = (open_session(path, threads=1) for path in (quantized, converted))
        for image in np.load(self.samples.path, mmap_mode="r"):
            feeds = {self.samples.input_name: np.array(image[None])}
            if any(
                x.tobytes() != y.tobytes() for x, y in zip(before.run(None, feeds), after.run(None, feeds), strict=True)
            ):
                raise ValueError("the converted model has other outputs")
        return converted

    def _latency(self, who: str, quantized: Path, threads: int) -> Latency:
        if who == OURS:
            return time_ours(self.model.path, quantized, self.samples, threads, self.arguments.turns)
        job = {
            "float": str(self.model.path.absolute()),
            "quantized": str(quantized),
            "samples": str(self.samples.path),
            "threads": threads,
            "turns": self.arguments.turns,
            "seconds": 1.0,
            "has_operators": self.interpreters.present[who][0].has_operators,
        }
        found = self.interpreters.run(who, "peer_latency.py", job)
        return Latency(**{name: Timing.of(seconds) for name, seconds in found.items()})

    def _measure_ours(self, figure: Figure, quantized: Path) -> None:
        operators = optimized_operators(quantized)
        figure.integer_kernels = sum(operators[name] for name in INTEGER_KERNELS)
        nodes = onnx.load(self.model.path, load_external_data=False).graph.node
        figure.convolutions = sum(node.op_type == "Conv" for node in nodes)
        figure.session_seconds = time_sessions(self.model.path, quantized, not self.arguments.no_portable)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    add_peer_arguments(parser)
    parser.add_argument("--images", type=positive, default=32, help="to calibrate on (%(default)s)")
    parser.add_argument("--threads", type=positive, nargs="+", default=[1], metavar="N")
    parser.add_argument("--turns", type=positive, default=7, help="at least; for a second anyway (%(default)s)")
    parser.add_argument("--for-cpu", action="store_true", help="measure files after `quark convert --for cpu` too")
    parser.add_argument("--no-portable", action="store_true", help="make no sessions without the library")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    models = chosen_models(arguments)
    interpreters = open_peers(arguments)
    notes = [f"Batch 1, best of {arguments.turns} turns or more."]
    titles = interpreters.titles.values()
    record = Record.begin("inference", arguments, header(titles), notes, interpreters.facts)
    for model in models:
        with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
            samples = write_samples(model, arguments.calib, arguments.images, Path(folder))
            bench = Bench(model, samples, interpreters, Path(folder), arguments)
            for preset in arguments.presets:
                for is_for_cpu in (False, True) if arguments.for_cpu else (False,):
                    figure = bench.measure(preset, is_for_cpu=is_for_cpu)
                    record.add(figure.rows(arguments.threads), figure, figure.blanks())
    record.finish()


if __name__ == "__main__":
    main()
