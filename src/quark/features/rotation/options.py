"""The options of rotation, and the file that names the nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quark.errors import InvalidValueError
from quark.features.feature import Feature
from quark.files.foreign import Fields, read_json

FEATURE = Feature("rotation", nouns={"rotation": "node"})
LARGEST = 1 << 16


@dataclass(frozen=True)
class RotatedPair:
    """A place of the network that is rotated, by names of nodes: `writers` compute it, `readers` read it, behind `norm`
    if there is one."""

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    norm: str | None = None


@dataclass(frozen=True)
class RotationOptions:
    """`size` is the number of channels that are rotated. A random rotation has random signs, from a fixed seed."""

    pairs: tuple[RotatedPair, ...]
    size: int
    is_random: bool = False
    source: str = ""  # the file, for messages

    def __post_init__(self) -> None:
        if not 2 <= self.size <= LARGEST:
            raise InvalidValueError(f"RMatrixDim = {self.size}: expected an integer from 2 to {LARGEST}")


def read_pairs(path: str | Path) -> tuple[RotatedPair, ...]:
    """The pairs of a JSON file: {"R1_pairs": [{"prev_nodes": [...], "norm_node": "...", "next_nodes": [...]}]}."""
    label = f"rotation config '{path}'"
    content = read_json(path, label)
    entries = Fields(content, label).value("R1_pairs")
    if not isinstance(entries, list) or not entries:
        raise InvalidValueError(f"{label}: field 'R1_pairs' has no pairs: expected a list of mappings with prev_nodes")
    found = []
    for number, entry in enumerate(entries):
        fields = Fields(entry, label, f"R1_pairs[{number}]")
        names = {}
        for key in ("prev_nodes", "next_nodes"):
            value = fields.content.get(key, [])
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                fields.refuse(key, "a list of names of nodes")
            names[key] = tuple(value)
        norm = fields.text("norm_node") if fields.has("norm_node") else None
        if norm == "":
            fields.refuse("norm_node", "the name of a node")
        found.append(RotatedPair(names["prev_nodes"], names["next_nodes"], norm))
    return tuple(found)
