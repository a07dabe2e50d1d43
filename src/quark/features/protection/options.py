"""The options of protection."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ProtectMode(str, Enum):
    """How much is done to keep a network usable in 8 bits."""

    AUTO = "auto"  # structures that are known to break, then a search by measurement if the verdict is not ok
    STRUCTURES = "structures"  # only what the form of the graph shows
    NONE = "none"


@dataclass(frozen=True)
class ProtectOptions:
    """`mac_budget` is the share of multiply-accumulates that measured layers may take out of 8 bits."""

    mode: ProtectMode = ProtectMode.NONE
    mac_budget: float = 0.15
