"""Memory and time for a model that is too large for memory, compared with copying its files.

    python -m bench.big_models [--gigabytes 3] [--presets NAME ...] [--repeat 3] [--folder DIR]

A network of that size is written with its weights in a separate file. Each run is a new process; the time is from model
file to quantized file, excluding imports, and peak memory is the maximum of the process, including mapped pages. A copy
reads and writes the same files. Both are timed twice: until the files are written, when the system may still hold them
in memory, and until everything is on disk. The runs alternate, and the best of each is shown. Everything is written to
`--folder` and removed afterwards; it needs space for the network and one result.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.cells import number, times
from bench.child import last_words
from bench.models import checked_presets, positive
from bench.record import Blank, Record, add_record_arguments, say

PRESETS = ["MXINT8", "MXFP4E2M1", "BF16", "MATMUL_NBITS", "A8W8"]
HEADER = ["preset", "peak MB", "of the model", "s", "of a copy", "s on disk", "of a copy on disk", "file MB"]
QUANTIZE = """
import sys, time
from quark.onnx import quantize
begin = time.perf_counter()
quantize(sys.argv[1], config=sys.argv[3], use_random_data=True).save(sys.argv[2])
print(time.perf_counter() - begin)
"""


@dataclass(frozen=True)
class Run:
    """One program: seconds of its work, with what it took until that was on the disk, and of the whole process; its
    memory and its files."""

    seconds: float
    seconds_on_disk: float
    process_seconds: float
    peak_mb: float
    file_mb: float


@dataclass
class Figure:
    """The runs of one preset, and those of the copies between them."""

    preset: str
    model_mb: float
    runs: list[Run] = field(default_factory=list)
    copies: list[Run] = field(default_factory=list)
    error: str | None = None

    def best(self, what: str, *, of_copy: bool = False) -> float | None:
        return min((getattr(copy, what) for copy in (self.copies if of_copy else self.runs)), default=None)

    def cells(self) -> list[str]:
        if self.error is not None:
            return [self.preset, *[""] * (len(HEADER) - 1)]
        peak, cells = self.best("peak_mb"), [self.preset]
        cells += [number(peak, 0), times(peak, self.model_mb)]
        for what in ("seconds", "seconds_on_disk"):
            cells += [number(self.best(what), 1), times(self.best(what), self.best(what, of_copy=True), 1)]
        return [*cells, number(self.best("file_mb"), 0)]

    def blanks(self) -> list[Blank]:
        return [] if self.error is None else [Blank("ours", self.preset, self.error)]


def measure(command: list[str], folder: Path) -> Run:
    """Run a command that writes to an empty folder. What it prints last may be the seconds that count, else all do.
    ChildProcessError where it fails, with its last words."""
    with tempfile.TemporaryFile() as log:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        words = last_words(log.read().decode(errors="replace"), process.returncode)
        if process.returncode:
            raise ChildProcessError(words)
    written = sorted(folder.iterdir())
    for path in written:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    flushing = time.perf_counter() - begin - seconds
    work = float(words) if words.replace(".", "", 1).isdecimal() else seconds
    unit = 1 if sys.platform == "darwin" else 1024
    size = sum(path.stat().st_size for path in written)
    return Run(work, work + flushing, seconds, usage.ru_maxrss * unit / 1e6, size / 1e6)


def take_turns(files: list[Path], preset: str, repeat: int, folder: Path) -> Figure:
    """Copies and quantizations, one after the other, each into a folder that is gone afterwards."""
    figure = Figure(preset, sum(path.stat().st_size for path in files) / 1e6)
    for turn in range(repeat):
        try:
            with tempfile.TemporaryDirectory(dir=folder) as target:
                copy = ["cp", "--reflink=never", *map(str, files), target]
                figure.copies.append(measure(copy if sys.platform == "linux" else [copy[0], *copy[2:]], Path(target)))
            with tempfile.TemporaryDirectory(dir=folder) as target:
                arguments = [str(files[0]), str(Path(target, "quantized.onnx")), preset]
                figure.runs.append(measure([sys.executable, "-c", QUANTIZE, *arguments], Path(target)))
        except ChildProcessError as error:
            figure.error = str(error)
            break
        copy_run, run = figure.copies[-1], figure.runs[-1]
        say(f"{preset}, run {turn + 1} of {repeat}: {run.seconds:.1f} s, on disk {run.seconds_on_disk:.1f} s, ")
        say(f"    {run.peak_mb:.0f} MB; a copy {copy_run.seconds:.1f} s, on disk {copy_run.seconds_on_disk:.1f} s")
    return figure


def build(folder: Path, gigabytes: float) -> list[Path]:
    """In a process of its own: what it needs would count as memory of every program that this one starts."""
    path = folder / "network.onnx"
    command = [sys.executable, "-m", "bench.big_network", str(path), "--gigabytes", str(gigabytes)]
    subprocess.run(command, check=True)
    return [path, path.with_suffix(".data")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.0, help="of weights (%(default)s)")
    parser.add_argument("--presets", nargs="+", default=PRESETS, metavar="NAME")
    parser.add_argument("--repeat", type=positive, default=3, help="runs of each; the best counts (%(default)s)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where to write; else that of temporary files")
    add_record_arguments(parser)
    arguments = parser.parse_args()
    arguments.presets = checked_presets(arguments.presets)
    place = arguments.folder or Path(tempfile.gettempdir())
    needed, free = 2.1 * arguments.gigabytes, shutil.disk_usage(place).free / 1e9
    if free < needed:
        raise SystemExit(f"--folder {place}: {needed:.1f} GB are needed there, {free:.1f} GB are free")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    notes = [f"A network of {arguments.gigabytes:g} GB; best of {arguments.repeat}."]
    record = Record.begin("big_models", arguments, HEADER, notes)
    with tempfile.TemporaryDirectory(prefix="quark-bench-", dir=arguments.folder) as name:
        files = build(Path(name), arguments.gigabytes)
        for preset in arguments.presets:
            figure = take_turns(files, preset, arguments.repeat, Path(name))
            record.add([figure.cells()], figure, figure.blanks())
    record.finish()


if __name__ == "__main__":
    main()
