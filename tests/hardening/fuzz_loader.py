"""Hand broken files to everything that reads a file; stop at the first surprise.

    python fuzz_loader.py [--seconds S] [--seed N] [--save DIR] [--door NAME] [--keep-going]

Every outcome must be a result or a QuarkError. A surprise is another exception, a crash of the process, a case that
takes longer than its limit, or memory beyond a bound. Cases run in a child process with RLIMIT_AS, one after the other,
each made from the seed and its number alone; the input of a surprise is saved, and `--seed N --first CASE` begins with
it. A child that ends is replaced, so that one surprise does not hide the next (--keep-going).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from broken_bytes import broken_archive, broken_bytes, broken_json, broken_message, hostile_message
from broken_sources import MODELS, Arrays, sources
from loader_doors import DOORS, Door

from quark.errors import QuarkError

MOST_MEMORY_BYTES = 3 << 30  # beyond what the process has when it begins
MOST_SECONDS = 20  # for one case: a loaded machine, and a session or two
FINE, REFUSED, SURPRISE = range(3)


@dataclass(frozen=True)
class Case:
    """One broken file and the door that it is handed to."""

    number: int
    door: Door
    content: bytes
    origin: str


def make_case(seed: int, number: int, known: dict[str, Any], only: str | None) -> Case:
    rng = np.random.default_rng([seed, number])
    doors = [door for door in DOORS if only in (None, door.name)]
    shares = np.array([door.share for door in doors])
    door = doors[rng.choice(len(doors), p=shares / shares.sum())]
    origin = door.origins[rng.integers(len(door.origins))]
    source = known[origin]
    if isinstance(source, Arrays):
        return Case(number, door, broken_archive(rng, source.arrays), origin)
    if isinstance(source, str):
        return Case(number, door, broken_json(rng, source).encode("utf-8", "surrogateescape"), origin)
    other = known[MODELS[rng.integers(len(MODELS))]].SerializeToString()
    kind = rng.random()
    if kind < 0.35:
        return Case(number, door, broken_bytes(rng, source.SerializeToString(), other), origin)
    if kind < 0.5:
        return Case(number, door, hostile_message(rng, source), origin)
    return Case(number, door, broken_message(rng, source), origin)


def run_case(case: Case, folder: Path) -> tuple[int, str]:
    """What came of it; the folder holds the external data that some models have."""
    path = folder / f"case{case.door.suffix}"
    path.write_bytes(case.content)
    try:
        case.door.enter(path)
    except QuarkError as error:
        return REFUSED, "" if str(error).strip() else "an error without a message"
    except (Exception, RecursionError):
        return SURPRISE, traceback.format_exc()
    return FINE, ""


def child(pipe: int, first: int, end: float, arguments: argparse.Namespace, known: dict[str, Any]) -> None:
    """Run cases until the time is up, telling of each when it begins and when it is over."""
    usage = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (usage + MOST_MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)  # warnings of the libraries behind the doors
    os.dup2(silence, 2)
    number = first
    folder = Path(arguments.work)
    while time.monotonic() < end:
        os.write(pipe, struct.pack("<qqq", number, -1, 0))
        signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
        case = make_case(arguments.seed, number, known, arguments.door)
        outcome, said = run_case(case, folder)
        signal.setitimer(signal.ITIMER_REAL, 0)
        text = said.encode()[-3000:]
        os.write(pipe, struct.pack("<qqq", number, outcome if not said else SURPRISE, len(text)) + text)
        number += 1


def read_exactly(pipe: int, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = os.read(pipe, count - len(found))
        if not more:
            return b""
        found += more
    return found


def watch(pipe: int, counts: Counter[str], tell: Callable[[int, str], bool]) -> tuple[int, bool]:
    """Read what the child tells; the number of the case that it was at when it ended, and whether it was within it."""
    number, is_within = -1, False
    while head := read_exactly(pipe, 24):
        number, outcome, length = struct.unpack("<qqq", head)
        is_within = outcome < 0
        if is_within:
            continue
        text = read_exactly(pipe, length).decode("utf-8", "replace") if length else ""
        counts[("fine", "refused", "surprises")[outcome]] += 1
        if outcome == SURPRISE and not tell(number, text):
            break
    return number, is_within


def fuzz(arguments: argparse.Namespace) -> Counter[str]:
    known = sources(Path(arguments.work))
    counts: Counter[str] = Counter()
    end, first = time.monotonic() + arguments.seconds, arguments.first
    goes_on = True

    def tell(number: int, text: str) -> bool:
        nonlocal goes_on
        case = make_case(arguments.seed, number, known, arguments.door)
        saved = Path(arguments.save) / f"fuzz-{arguments.seed}-{number}-{case.door.name}{case.door.suffix}"
        saved.parent.mkdir(parents=True, exist_ok=True)
        saved.write_bytes(case.content)
        print(f"SURPRISE: seed {arguments.seed}, case {number}, door {case.door.name}, made of {case.origin}: {saved}")
        print(text, flush=True)
        goes_on = arguments.keep_going
        return goes_on

    while time.monotonic() < end and goes_on:
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            os.close(reading)
            with contextlib.suppress(BrokenPipeError):
                child(writing, first, end, arguments, known)
            os._exit(0)
        os.close(writing)
        number, is_within = watch(reading, counts, tell)
        os.close(reading)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if is_within:
            counts["surprises"] += 1
            what = "longer than its limit" if status == -signal.SIGALRM else f"the process ended with status {status}"
            tell(number, what)
        first = number + 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--save", default=".", help="where the input of a surprise goes")
    parser.add_argument("--door", choices=[door.name for door in DOORS], help="only this one")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first surprise")
    arguments = parser.parse_args()
    arguments.work = tempfile.mkdtemp(prefix="fuzz-")
    try:
        counts = fuzz(arguments)
    finally:
        shutil.rmtree(arguments.work, ignore_errors=True)
    print(f"{sum(counts.values())} cases of seed {arguments.seed}: {json.dumps(counts)}")
    if counts["surprises"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
