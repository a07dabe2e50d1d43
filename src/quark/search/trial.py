"""Trials, the budgets that they must keep to, and their ranking.

A trial beats another if it is not worse in size, drop and latency, and better in one of them. The Pareto front contains
all trials that none beats. Trials are ranked as follows; those within all limits come first, among them those by which
the target gains something, and among these

    with a limit on the drop     the smallest file first. Files up to 5 % larger than the smallest count as equally
                                 small and are ordered by the next line; then those up to 5 % larger than the smallest
                                 of the rest, and so on
    otherwise                    the least drop first; of equal ones those that none beats, then the least divergence
                                 from float, then the smallest file, then the fastest

so the first is never beaten by another of its group. Then come those beyond a limit, by the sum of their excesses
as shares of the limits, and finally those that failed. Ties are ordered by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from quark.errors import InvalidValueError, unknown_name
from quark.files.foreign import Fields
from quark.text import json_value

ALIKE_IN_SIZE = 1.05
_DROP_UNIT = 1.0  # the least divisor for shares of a limit on the drop, which may be 0
_UNITS = {
    "size": {"%": 0.01, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9},
    "drop": {"": 1.0, "%": 1.0, "points": 1.0},
    "latency": {"%": 0.01, "ms": 1.0, "s": 1e3},
    "time": {"s": 1.0, "m": 60.0, "h": 3600.0, "min": 60.0},
}
_VALUE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z%]*)")


class Stage(str, Enum):
    """The cost of a trial, cheapest first."""

    DIRECT = "direct"  # a preset without changes
    RECIPE = "recipe"  # with an algorithm that takes seconds
    MIXED = "mixed"  # layers of two precisions
    FINETUNED = "finetuned"  # layers fitted one by one


@dataclass(frozen=True)
class Measurement:
    """Size, accuracy and speed of a quantized network; None is unknown.

    drop              percentage points of `measure`, or percent of the user's metric; negative if better than float
    error             standard error of the drop, in points
    top1              a fraction
    kl                mean divergence of the predictions from float's, in nats
    value             the user's metric
    verdict, worst    of `quark.compare`, with the part of the outputs that decides it
    float_mac_share   what protection left in float, None if nothing was protected
    lint              what an NPU would refuse, if that was checked
    latency_ratio     latency as a share of float's, measured at the same time: a later run has another float latency
    """

    size_bytes: int
    drop: float
    latency_ms: float
    measure: str = ""
    error: float | None = None
    top1: float | None = None
    agreement: float | None = None
    kl: float | None = None
    sqnr_db: float | None = None
    is_packed: bool = False
    value: float | None = None
    verdict: str = ""
    worst: str = ""
    float_mac_share: float | None = None
    lint: str = ""
    latency_ratio: float | None = None

    @property
    def costs(self) -> tuple[float, float, float]:
        return self.size_bytes, self.drop, self.latency_ms


@dataclass(frozen=True)
class Trial:
    """One configuration and its figures. `measured` is None if it failed: `failure` is the reason.

    `changes` are those of --set; `seconds` is the time to quantize and measure; `model` is the file in the folder of
    trials, empty if it was not kept.
    """

    name: str
    preset: str
    stage: Stage
    changes: tuple[tuple[str, Any], ...] = ()
    measured: Measurement | None = None
    failure: str = ""
    seconds: float = 0.0
    quantizing_seconds: float = 0.0
    remarks: tuple[str, ...] = ()
    model: str = ""
    basis: str = field(default="", compare=False)  # a hash of everything that the result depends on

    def __post_init__(self) -> None:
        if (self.measured is None) == (not self.failure):
            raise InvalidValueError(f"trial '{self.name}': expected figures or the reason why there are none")

    @property
    def figures(self) -> Measurement:
        """The measurement of a trial that did not fail."""
        assert self.measured is not None
        return self.measured

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as JSON, with infinities as text."""
        content: dict[str, Any] = json_value(asdict(self))
        return content

    @staticmethod
    def from_dict(content: Any, label: str = "trial") -> Trial:
        """Read what `to_dict` returned; anything else raises InvalidValueError, which calls it `label`."""
        fields = Fields(content, label)
        fields.refuse_others(Trial.__dataclass_fields__)
        changes = []
        for change in fields.array("changes"):
            if not isinstance(change, list) or len(change) != 2 or not isinstance(change[0], str):
                fields.refuse("changes", "a list of pairs [KEY, VALUE]")
            changes.append((change[0], change[1]))
        measured = _measurement(fields.mapping("measured")) if fields.has("measured") else None
        failure = fields.text("failure")
        if (measured is None) == (not failure):
            raise InvalidValueError(f"{label}: expected 'measured', or 'failure' with the reason why there is nothing")
        return Trial(
            name=fields.file_name("name"),
            preset=fields.text("preset"),
            stage=Stage(fields.text("stage", [stage.value for stage in Stage])),
            changes=tuple(changes),
            measured=measured,
            failure=failure,
            seconds=fields.number("seconds", 0),
            quantizing_seconds=fields.number("quantizing_seconds", 0) if "quantizing_seconds" in fields else 0.0,
            remarks=fields.texts("remarks"),
            model=fields.text("model"),
            basis=fields.text("basis"),
        )


def _measurement(fields: Fields) -> Measurement:
    fields.refuse_others(Measurement.__dataclass_fields__)
    values: dict[str, Any] = {"size_bytes": fields.integer("size_bytes")}
    for name in ("drop", "latency_ms"):
        values[name] = fields.number(name, is_finite=False)
        if math.isnan(values[name]):
            fields.refuse(name, "a number")
    for name, definition in Measurement.__dataclass_fields__.items():
        if name in values or name not in fields:
            continue
        if definition.default is None:
            values[name] = fields.number(name, is_finite=False) if fields.has(name) else None
        else:
            values[name] = fields.boolean(name) if isinstance(definition.default, bool) else fields.text(name)
    return Measurement(**values)


@dataclass(frozen=True)
class Limit:
    """A number, or a share of the float network's if `is_share`."""

    value: float
    is_share: bool = False

    def of(self, whole: float) -> float:
        """Return the limit as a number, given the float network's."""
        return self.value * whole if self.is_share else self.value


@dataclass(frozen=True)
class Limits:
    """The limits for trials as numbers, infinite if there is none."""

    size_bytes: float = math.inf
    drop: float = math.inf
    latency_ms: float = math.inf


@dataclass(frozen=True)
class Budget:
    """Limits in bytes, percentage points, milliseconds and seconds; None is no limit.

    size=25%  size=10MB       the true file size, as a share of the float file or by itself (KB, MB, GB are of 1000)
    drop=1.0                  percentage points of accuracy lost
    latency=80%  latency=5ms  as a share of the float network's time for a sample, or by itself
    time=10m                  of the search, in s, m or h; trials that would take longer are not started

    >>> Budget.parse(["size=25%", "drop=1.0"])
    Budget(size=Limit(value=0.25, is_share=True), drop=1.0, latency=None, time=None)
    """

    size: Limit | None = None
    drop: float | None = None
    latency: Limit | None = None
    time: float | None = None

    @staticmethod
    def parse(texts: Iterable[str]) -> Budget:
        """Parse texts like size=10MB, each kind at most once."""
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
        """Return the limits as numbers, for this float network."""
        return Limits(
            size_bytes=math.inf if self.size is None else self.size.of(float_bytes),
            drop=math.inf if self.drop is None else self.drop,
            latency_ms=math.inf if self.latency is None else self.latency.of(float_ms),
        )


def _parse_value(kind: str, value: str, text: str) -> Limit:
    units = _UNITS[kind]
    match = _VALUE.fullmatch(value.strip())
    unit = "" if match is None else next((unit for unit in units if unit.lower() == match[2].lower()), None)
    if match is None or unit is None or unit not in units:
        examples = ", ".join(f"{kind}=10{unit}" for unit in units)
        raise InvalidValueError(f"budget '{text}': expected a number with its unit: {examples}")
    number = float(match[1]) * units[unit]
    if kind != "drop" and number <= 0:
        raise InvalidValueError(f"budget '{text}': expected more than 0")
    return Limit(number, is_share=unit == "%" and kind in ("size", "latency"))


def dominates(first: Measurement, second: Measurement) -> bool:
    """True if `first` beats `second`: it is no worse in any cost, and better in one."""
    return all(a <= b for a, b in zip(first.costs, second.costs, strict=True)) and first.costs != second.costs


def pareto_front(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Return the trials that none beats, the smallest file first. Trials with equal figures are all in it, or none."""
    able = [trial for trial in trials if trial.measured is not None]
    front = [trial for trial in able if not any(dominates(other.figures, trial.figures) for other in able)]
    return tuple(sorted(front, key=lambda trial: (*trial.figures.costs, trial.name)))


def excess(measured: Measurement, limits: Limits) -> float:
    """Return how far a trial is beyond the limits: the sum of shares of the limits, 0 if within."""
    over = [
        max(0.0, measured.size_bytes / limits.size_bytes - 1.0),
        max(0.0, measured.latency_ms / limits.latency_ms - 1.0),
        max(0.0, measured.drop - limits.drop) / max(limits.drop, _DROP_UNIT) if limits.drop < math.inf else 0.0,
    ]
    return sum(over)


def is_within(trial: Trial, limits: Limits) -> bool:
    """True if a trial worked and is within every limit."""
    measured = trial.measured
    return (
        measured is not None
        and measured.size_bytes <= limits.size_bytes
        and measured.drop <= limits.drop
        and measured.latency_ms <= limits.latency_ms
    )


def ranked(
    trials: Iterable[Trial], limits: Limits, gains: Callable[[Trial], bool] = lambda trial: True
) -> tuple[Trial, ...]:
    """Return all trials, the best first. `gains` is True for trials by which the target gains something."""
    listed = sorted(trials, key=lambda trial: trial.name)
    within = [trial for trial in listed if is_within(trial, limits)]
    front = {trial.name for trial in pareto_front(within)}

    def by_drop(trial: Trial) -> tuple[float, bool, float, float, float]:
        figures = trial.figures
        kl = math.inf if figures.kl is None else figures.kl
        return figures.drop, trial.name not in front, kl, figures.size_bytes, figures.latency_ms

    within.sort(key=by_drop)
    if limits.drop < math.inf:  # groups of about the same size, the smallest first
        rest, within = within, []
        while rest:
            most = ALIKE_IN_SIZE * min(trial.figures.size_bytes for trial in rest)
            within += [trial for trial in rest if trial.figures.size_bytes <= most]
            rest = [trial for trial in rest if trial.figures.size_bytes > most]
    within.sort(key=lambda trial: not gains(trial))
    beyond = [trial for trial in listed if trial.measured is not None and not is_within(trial, limits)]
    beyond.sort(key=lambda trial: (excess(trial.figures, limits), trial.figures.drop))
    return (*within, *beyond, *(trial for trial in listed if trial.measured is None))
