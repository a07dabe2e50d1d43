"""What a quantized network may cost: its limits, as people write them.

size=25%  size=10MB       the true file size: of the float file, or by itself (KB, MB, GB are of 1000)
drop=1.0                  percentage points of accuracy lost
latency=80%  latency=5ms  of the float network's time for a sample, or by itself
time=10m                  of the search: s, m or h; trials that would not be done by then are not begun
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from quark.errors import InvalidValueError, unknown_name

_UNITS = {
    "size": {"%": 0.01, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9},
    "drop": {"": 1.0, "%": 1.0, "points": 1.0},
    "latency": {"%": 0.01, "ms": 1.0, "s": 1e3},
    "time": {"s": 1.0, "m": 60.0, "h": 3600.0, "min": 60.0},
}
_VALUE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z%]*)")


@dataclass(frozen=True)
class Limit:
    """A number, or a share of the float network's where `is_share`."""

    value: float
    is_share: bool = False

    def of(self, whole: float) -> float:
        """The number that it is, given the float network's."""
        return self.value * whole if self.is_share else self.value


@dataclass(frozen=True)
class Budget:
    """All limits; None: no limit. Size in bytes, drop in percentage points, latency in milliseconds, time in seconds.

    >>> Budget.parse(["size=25%", "drop=1.0"])
    Budget(size=Limit(value=0.25, is_share=True), drop=1.0, latency=None, time=None)
    """

    size: Limit | None = None
    drop: float | None = None
    latency: Limit | None = None
    time: float | None = None

    @staticmethod
    def parse(texts: Iterable[str]) -> Budget:
        """Of texts like size=10MB; each kind once."""
        budget = Budget()
        for text in texts:
            kind, equals, value = text.partition("=")
            kind = kind.strip().lower()
            if not equals:
                raise InvalidValueError(f"budget '{text}': expected KIND=VALUE, such as size=25%, drop=1.0 or time=10m")
            if kind not in _UNITS:
                raise unknown_name("budget", kind, _UNITS)
            if getattr(budget, kind) is not None:
                raise InvalidValueError(f"budget '{text}': {kind} was given before; give it once")
            limit = _parse_value(kind, value, text)
            value_or_limit: Any = limit if kind in ("size", "latency") else limit.value
            budget = replace(budget, **{kind: value_or_limit})
        return budget

    def resolved(self, float_bytes: int, float_ms: float) -> Limits:
        """The limits as numbers, for this float network."""
        return Limits(
            size_bytes=math.inf if self.size is None else self.size.of(float_bytes),
            drop=math.inf if self.drop is None else self.drop,
            latency_ms=math.inf if self.latency is None else self.latency.of(float_ms),
        )


@dataclass(frozen=True)
class Limits:
    """What a trial is held against; infinite where there is no limit."""

    size_bytes: float = math.inf
    drop: float = math.inf
    latency_ms: float = math.inf


def _parse_value(kind: str, value: str, text: str) -> Limit:
    units = _UNITS[kind]
    match = _VALUE.fullmatch(value.strip())
    unit = "" if match is None else next((each for each in units if each.lower() == match[2].lower()), None)
    if match is None or unit is None or unit not in units:
        examples = ", ".join(f"{kind}=10{each}" for each in units)
        raise InvalidValueError(f"budget '{text}': expected a number with its unit: {examples}")
    number = float(match[1]) * units[unit]
    if kind != "drop" and number <= 0:
        raise InvalidValueError(f"budget '{text}': expected more than 0")
    return Limit(number, is_share=unit == "%" and kind in ("size", "latency"))
