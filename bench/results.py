"""What a benchmark leaves: a Markdown table to read, JSON with everything behind it, a word on stderr meanwhile."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import onnxruntime

from bench.timing import Timing
from quark.formats.native import instruction_set

# where things lie on one machine is nobody's business
PLACES = ("models", "model", "calib", "val", "peer", "json", "folder")


def describe_machine() -> str:
    processor = f"{platform.machine()}, {os.cpu_count()} processors, {instruction_set()}"
    return f"{processor}, ONNX Runtime {onnxruntime.__version__}"


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; every row has as many cells as the header.

    >>> print(markdown(["a", "b"], [["1", ""]]))
    | a | b |
    |---|---|
    | 1 |  |
    """
    lines = [header, *rows]
    if any(len(line) != len(header) for line in lines):
        raise ValueError(f"expected {len(header)} cells in every row")
    written = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([written[0], "|" + "---|" * len(header), *written[1:]])


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A cell; blank where there is nothing."""
    return "" if value is None else f"{value:.{digits}f}{unit}"


def times(part: float | None, whole: float | None, digits: int = 2) -> str:
    """How often `whole` goes into `part`; blank where one of them is missing."""
    return "" if part is None or whole is None else f"{part / whole:.{digits}f} x"


def with_spread(timing: Timing | None, factor: float = 1.0, digits: int = 2) -> str:
    """The best, and how much longer the median turn took: `1.50 +4 %`."""
    return "" if timing is None else f"{timing.best * factor:.{digits}f} +{100 * timing.spread:.0f} %"


def write_json(arguments: argparse.Namespace, setting: str, figures: Sequence[dict[str, Any]]) -> None:
    """If asked to, write where it was measured, how, and what came out so far: a long run may break off."""
    if arguments.json is None:
        return
    settings = {key: value for key, value in vars(arguments).items() if key not in PLACES}
    content = {"setting": setting, "arguments": settings, "figures": list(figures)}
    arguments.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
