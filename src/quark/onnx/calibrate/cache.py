"""Ranges kept between runs, by the hash of everything that they follow from: model, data, settings, versions.

One JSON file for each key in the folder that the user names. A file that cannot be read, or says something else than
expected, is ignored with a warning and written anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from quark.errors import InvalidValueError
from quark.files.foreign import REPORT, Fields, read_json
from quark.files.output import complete
from quark.ranges import TensorRange
from quark.text import get_logger

_LOG = get_logger(__name__)
CACHE_VERSION = 1


def cache_key(facts: Iterable[str]) -> str:
    """One hash of all the facts, in their order."""
    return hashlib.sha256(json.dumps([CACHE_VERSION, *facts]).encode()).hexdigest()


def read_ranges(folder: Path, key: str, names: Iterable[str]) -> dict[str, TensorRange] | None:
    """The ranges of these tensors; None where they are not there."""
    path = _path(folder, key)
    if not path.exists():
        return None
    label = f"calibration cache '{path}'"
    try:
        content = Fields(read_json(path, label, REPORT), label)
        if content.text("key") != key:
            content.refuse("key", f"'{key}'")
        ranges = content.mapping("ranges")
        return {name: _range(ranges, name) for name in names}
    except InvalidValueError as error:
        _LOG.warning("%s; it is ignored", error)
        return None


def write_ranges(folder: Path, key: str, ranges: Mapping[str, TensorRange]) -> None:
    """All or nothing; a folder that cannot be written is a warning, since the ranges themselves are there."""
    content = {"key": key, "ranges": {name: [r.lowest, r.highest, r.position] for name, r in ranges.items()}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with complete(_path(folder, key)) as unfinished:
            unfinished.write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        _LOG.warning("calibration cache %s is not written: %s", folder, error)


def _path(folder: Path, key: str) -> Path:
    return folder / f"ranges-{key[:32]}.json"


def _range(ranges: Fields, name: str) -> TensorRange:
    numbers = ranges.array(name, 3)
    parts = Fields(dict(zip(("lowest", "highest", "position"), numbers, strict=True)), f"range of tensor '{name}'")
    position = parts.integer("position", -1024, 1024) if parts.has("position") else None
    return TensorRange(float(parts.number("lowest")), float(parts.number("highest")), position)
