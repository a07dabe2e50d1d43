"""Ranges in a JSON file, in the layout of AMD Quark:

    {"quark_version": ..., "tensors_range": {NAME: [LOWEST, HIGHEST]}}

A power-of-two scale is written as the numbers that its codes reach, so that the smallest power of two for that range is
the same scale again. Then "data_range" has the range of the data, with which a run that restores ranges has the same
result as the one that measured them. Other entries of the file are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quark
from quark.errors import InvalidValueError
from quark.files.foreign import REPORT, Fields, read_json
from quark.files.output import complete
from quark.formats.spec import IntFormat
from quark.ranges import TensorRange
from quark.ranges.power_of_two import range_at, range_with_position
from quark.text import get_logger

VERSION_KEY, RANGES_KEY, DATA_KEY = "quark_version", "tensors_range", "data_range"
LAYER_KEYS = ("model_to_finetune", "layers_to_finetune")  # AMD Quark's, by the numbers of its subgraphs

_MARGIN = 1.01  # codes cover data half a step beyond their ends
_LOG = get_logger(__name__)


@dataclass(frozen=True)
class StoredRange:
    """The range of a tensor in a file, and that of its data, if the file has both."""

    ends: tuple[float, float]
    data: tuple[float, float] | None = None

    def range_for(self, integer: IntFormat, has_position: bool) -> TensorRange:
        """Return the range for codes of that format; `has_position`: with the smallest power-of-two scale for it."""
        if not has_position:
            return TensorRange(*self.ends)
        range_ = range_with_position(*self.ends, integer.bits)
        lowest, highest = self.data or self.ends
        # a range that was narrowed by hand also limits the data
        is_covered = lowest >= _MARGIN * self.ends[0] and highest <= _MARGIN * self.ends[1]
        return TensorRange(lowest, highest, range_.position) if is_covered else range_


def read_range_file(path: Path) -> dict[str, StoredRange]:
    """Return the ranges of a file by tensor; none if there is no such file yet. Raises InvalidValueError if the file is
    something else."""
    if not path.exists():
        return {}
    label = f"file of ranges '{path}'"
    content = Fields(read_json(path, label, REPORT), label)
    for key in LAYER_KEYS:
        if key in content:
            _LOG.warning("%s: '%s' is not used; finished layers are kept in a folder beside the file", label, key)
    ranges = content.mapping(RANGES_KEY)
    data = content.mapping(DATA_KEY) if DATA_KEY in content else Fields({}, label)
    return {
        name: StoredRange(
            _ends(ranges.array(name, 2), f"{label}, tensor '{name}'"),
            _ends(data.array(name, 2), f"{label}, data of tensor '{name}'") if name in data else None,
        )
        for name in ranges
    }


def write_range_file(path: Path, ranges: Mapping[str, TensorRange], formats: Mapping[str, IntFormat]) -> None:
    """Add ranges to a file that it does not have yet. The file is written whole or not at all."""
    content: dict[str, Any] = {}
    if path.exists():
        content = dict(read_json(path, f"file of ranges '{path}'", REPORT))
    stored, data = dict(content.get(RANGES_KEY) or {}), dict(content.get(DATA_KEY) or {})
    for name, range_ in ranges.items():
        if name not in stored and range_.position is not None:
            data[name] = [range_.lowest, range_.highest]
        reach = range_ if range_.position is None else range_at(range_.position, formats[name].bits)
        stored.setdefault(name, [reach.lowest, reach.highest])
    content |= {VERSION_KEY: quark.__version__, RANGES_KEY: stored, **({DATA_KEY: data} if data else {})}
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _ends(pair: list[Any], label: str) -> tuple[float, float]:
    """Both ends: numbers, or lists of one number, as arrays of numpy become."""
    plain = [end[0] if isinstance(end, list) and len(end) == 1 else end for end in pair]
    lowest, highest = (Fields({"end": end}, label).number("end") for end in plain)
    if not lowest <= highest:
        raise InvalidValueError(f"{label}: range {lowest:g}..{highest:g}, expected two numbers in ascending order")
    return float(lowest), float(highest)
