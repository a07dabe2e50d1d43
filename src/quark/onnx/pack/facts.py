"""What packing and unpacking did, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Profile(str, Enum):
    """Who is to read a packed file."""

    PORTABLE = "portable"  # any ONNX Runtime: standard operators
    CUSTOM = "custom"  # the same as calls of a function in the file: fewer nodes to look at
    NATIVE = "native"  # runtimes that take ONNX's own small types


@dataclass(frozen=True)
class PackedWeight:
    """One weight; `bits` are those that it takes in the file for each element, scales included."""

    name: str
    format: str
    shape: tuple[int, ...]
    bits: float
    bytes_before: int
    bytes_after: int
    note: str = ""


@dataclass(frozen=True)
class LeftWeight:
    """A weight that stays as it was."""

    name: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class PackFacts:
    """All weights of the main graph that are in a format or behind a quantizer; sizes are those of the files, external
    data included, and of the weights alone where nothing was written."""

    profile: str
    packed: tuple[PackedWeight, ...]
    left: tuple[LeftWeight, ...]
    bytes_before: int
    bytes_after: int
    remarks: tuple[str, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        """Of all packed weights together; 0 where there are none."""
        count = sum(each.bytes_after * 8 / each.bits for each in self.packed)
        return sum(each.bytes_after for each in self.packed) * 8 / count if count else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bits_per_weight": self.bits_per_weight}


@dataclass(frozen=True)
class UnpackFacts:
    """The weights that are float numbers again."""

    weights: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
