"""Kill runs that write files at random moments, and look at what they leave.

    python killed_runs.py WORK FOLDER [--kills N] [--seed S] [--all-signals]

WORK is one of WORKS below. This process imports everything, makes no session, and forks a child for each run; the child
is killed after a random time while this process reads the output again and again. What it may see is a file that was
there before, or one of those that a run that nobody kills writes, whole; beside them only temporary names, which the
next run removes. A child writes its files again and again, so that many kills fall around the renaming. With
--all-signals the children are ended by every signal that ends a process, in turn, instead of SIGKILL alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from walked_networks import residual

from quark.demo import network_path
from quark.files.output import PREFIX
from quark.onnx import get_default_config, quantize
from quark.onnx.load import load
from quark.onnx.pack import pack_model

OLD = b"what was here before"
SAMPLES = np.random.default_rng(0).random((8, 1, 8, 8), dtype=np.float32)
CACHE = "cache"
INTERRUPTED = 130
SIGNALS = tuple(
    getattr(signal, f"SIG{name}")
    for name in (
        *("KILL", "TERM", "INT", "HUP", "QUIT", "ABRT", "SEGV", "BUS", "FPE", "ILL", "TRAP", "SYS", "ALRM", "VTALRM"),
        *("PROF", "USR1", "USR2", "XCPU", "IO", "PWR", "STKFLT", "PIPE", "XFSZ"),
    )
    if hasattr(signal, f"SIG{name}")
)


def write_quantized(folder: Path, tell: Callable[[], None]) -> None:
    """The whole way, from the float file to the files beside each other."""
    quantize(network_path(), SAMPLES, "XINT8").save(folder / "out.onnx")
    tell()


def write_in_turn(folder: Path, tell: Callable[[], None]) -> None:
    """Two results under one name, again and again."""
    results = [quantize(network_path(), SAMPLES, config) for config in ("XINT8", "BF16")]
    for turn in range(20):
        results[turn % 2].save(folder / "out.onnx")
        tell()


def write_two_files_in_turn(folder: Path, tell: Callable[[], None]) -> None:
    """The same with weights in files of their own."""
    results = []
    for preset in ("XINT8", "BF16"):
        config = get_default_config(preset)
        config.use_external_data_format = True
        results.append(quantize(network_path(), SAMPLES, config))
    for turn in range(20):
        results[turn % 2].save(folder / "out.onnx")
        tell()


def write_packed_in_turn(folder: Path, tell: Callable[[], None]) -> None:
    source = folder.parent / "blocks.onnx"
    if not source.exists():
        quantize(network_path(), SAMPLES, "MXINT8").save(source)
    for turn in range(6):
        pack_model(source, folder / "out.onnx", ("portable", "custom")[turn % 2])
        tell()


def write_finetuned(folder: Path, tell: Callable[[], None]) -> None:
    """Layers that are finished are kept beside the folder, so that another run goes on with them."""
    config = get_default_config("XINT8_ADAROUND")
    options = {"NumIterations": 60, "BatchSize": 1, "CacheDir": str(folder.parent / CACHE)}
    config.extra_options["FastFinetune"].update(options)
    samples = [np.random.default_rng(seed).standard_normal((1, 3, 6, 6)).astype(np.float32) for seed in range(16)]
    quantize(residual(), samples, config).save(folder / "out.onnx")
    tell()


WORKS: dict[str, Callable[[Path, Callable[[], None]], None]] = {
    "quantize": write_quantized,
    "save": write_in_turn,
    "save two files": write_two_files_in_turn,
    "pack": write_packed_in_turn,
    "finetune": write_finetuned,
}


def nothing() -> None:
    """What a run tells when nobody learns from it."""


def start(work: str, folder: Path, tell: Callable[[], None] = nothing) -> int:
    process = os.fork()
    if process:
        return process
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        WORKS[work](folder, tell)
        os._exit(0)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    except BaseException as error:
        print(f"the run itself failed: {error!r}", flush=True)
        os._exit(7)


def finish(process: int) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status not in (0, INTERRUPTED) and -status not in SIGNALS:
        raise SystemExit(f"the run ended with status {status}")


def visible(folder: Path) -> dict[str, bytes]:
    """The files that have their names; one that goes between the listing and the reading was not there."""
    found = {}
    for each in folder.iterdir():
        if not each.name.startswith(PREFIX):
            try:
                found[each.name] = each.read_bytes()
            except FileNotFoundError:
                continue
    return found


class Witness:
    """Reads the output, and ends everything where it is not whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: set[bytes] = {OLD}

    def look(self, *, is_running: bool) -> None:
        found = visible(self.folder)
        model = found.pop("out.onnx", None)
        if model is not None and model not in self.known:
            raise SystemExit(f"out.onnx holds {len(model)} bytes that no run writes")
        report = found.pop("out.json", OLD)
        if report != OLD:
            json.loads(report)
        if any(not name.endswith(".data") for name in found):
            raise SystemExit(f"left behind: {sorted(found)}")
        if not is_running and model not in (None, OLD):
            self._check_weights(found)

    def _check_weights(self, beside: dict[str, bytes]) -> None:
        """That the weights of the model are there: its own, not those of another run."""
        proto = onnx.load(self.folder / "out.onnx", load_external_data=False)
        for tensor in proto.graph.initializer:
            places = {entry.key: entry.value for entry in tensor.external_data}
            if places and places["location"] not in beside:
                raise SystemExit(f"'{tensor.name}' is in '{places['location']}', which is gone")


def watch(process: int, seconds: float, witness: Witness, number: int) -> None:
    """Read until it is time, then kill."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        witness.look(is_running=True)
        time.sleep(0.0005)
    os.kill(process, number)
    finish(process)


def prepare(folder: Path, has_old: bool) -> None:
    """The output as it was; temporary files of earlier kills stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in visible(folder):
        (folder / name).unlink()
    if has_old:
        (folder / "out.onnx").write_bytes(OLD)
        (folder / "out.json").write_bytes(OLD)


def learn(work: str, folder: Path, witness: Witness) -> float:
    """What a run that nobody kills writes at every turn; the seconds that it takes."""
    prepare(folder, has_old=False)
    learned = folder.parent / "learned"
    shutil.rmtree(learned, ignore_errors=True)
    learned.mkdir()

    def keep() -> None:
        content = (folder / "out.onnx").read_bytes()
        (learned / hashlib.sha256(content).hexdigest()).write_bytes(content)

    begin = time.monotonic()
    finish(start(work, folder, keep))
    seconds = time.monotonic() - begin
    witness.known.update(each.read_bytes() for each in learned.iterdir())
    shutil.rmtree(folder.parent / CACHE, ignore_errors=True)
    return seconds


def check_cleaning(work: str, folder: Path) -> int:
    """That the next run removes what killed ones left."""
    left = [each for each in folder.iterdir() if each.name.startswith(PREFIX)]
    finish(start(work, folder))
    still = [each.name for each in folder.iterdir() if each.name.startswith(PREFIX)]
    if still:
        raise SystemExit(f"temporary files that nobody removes: {still}")
    return len(left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=list(WORKS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all-signals", action="store_true")
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    folder = arguments.folder / "out"
    witness = Witness(folder)
    seconds = learn(arguments.work, folder, witness)
    whole = (folder / "out.onnx").read_bytes()
    resumed = 0
    for kill in range(arguments.kills):
        prepare(folder, has_old=bool(kill % 2))
        number = SIGNALS[kill % len(SIGNALS)] if arguments.all_signals else signal.SIGKILL
        watch(start(arguments.work, folder), float(random.uniform(0.2, 1.05)) * seconds, witness, number)
        witness.look(is_running=False)
        resumed += len(list((arguments.folder / CACHE).glob("*/*.npz")))
    left = check_cleaning(arguments.work, folder)
    if arguments.work == "finetune":
        if (folder / "out.onnx").read_bytes() != whole:
            raise SystemExit("the run that went on ended in other bytes")
        if not resumed:
            raise SystemExit("no layer was kept: nothing was resumed")
    load_or_see(folder / "out.onnx")
    print(f"{arguments.work}: {arguments.kills} kills of runs of {seconds:.2f} s, {left} temporary files removed")


def load_or_see(path: Path) -> None:
    """The last file is a model that its checks let through: they know it as quantized."""
    try:
        load(path)
    except ValueError as error:
        if "already quantized" not in str(error):
            raise


if __name__ == "__main__":
    main()
