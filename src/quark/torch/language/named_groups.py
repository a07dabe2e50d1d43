"""Groups of linear layers as users name them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NamedGroup:
    """A group as a user names it: linear layers, what computes their input, the one whose input is measured, and the
    module whose output tells how good scales are; "" for the linear layers themselves."""

    source: str
    linears: tuple[str, ...]
    input: str
    inspected: str = ""
