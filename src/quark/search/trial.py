"""A trial: one configuration that was tried, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from quark.errors import InvalidValueError


class Stage(str, Enum):
    """How dear a trial is, cheapest first."""

    DIRECT = "direct"  # a preset as it is
    RECIPE = "recipe"  # with an algorithm that takes seconds
    MIXED = "mixed"  # layers of two precisions
    FINETUNED = "finetuned"  # layers fitted one by one


@dataclass(frozen=True)
class Measurement:
    """What a quantized network costs. `drop` is in percentage points of `measure`, negative where it is better than
    float; `top1` a share; `kl` the mean divergence of its predictions from float's, in nats; both None where unknown.
    `error` is the standard error of the drop, in points. `value` is what the network has of the user's metric, of
    which `drop` then is in percent. `is_packed`: the file is packed. `verdict` is the one of `quark.fidelity`, and
    `worst` the part of the outputs that decides it. `float_mac_share` is what protection left in float, None if nothing
    was protected. `lint` says what an NPU would refuse, where that was asked. `latency_ratio` is the latency as a share
    of float's, measured in the same minute: a later run of the search has another float latency."""

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


@dataclass(frozen=True)
class Trial:
    """`measured` is None where it failed: `failure` says why. `changes` are those of --set. `seconds` is what it took
    to quantize and measure; `model` the file in the folder of trials, empty where it was not kept."""

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
    basis: str = field(default="", compare=False)  # the hash of all that it followed from

    def __post_init__(self) -> None:
        if (self.measured is None) == (not self.failure):
            raise InvalidValueError(f"trial '{self.name}': expected figures or the reason why there are none")

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; infinities as text."""
        content = asdict(self)
        content["stage"] = self.stage.value
        content["changes"] = [list(each) for each in self.changes]
        content["remarks"] = list(self.remarks)
        if content["measured"] is not None:
            content["measured"] = {name: _to_json(each) for name, each in content["measured"].items()}
        return content

    @staticmethod
    def from_dict(content: Any) -> Trial:
        """What `to_dict` gave; anything else is an error."""
        try:
            fields = dict(content)
            measured = fields.pop("measured")
            return Trial(
                **{
                    **fields,
                    "name": _typed(fields["name"], str),
                    "preset": _typed(fields["preset"], str),
                    "failure": _typed(fields["failure"], str),
                    "model": _typed(fields["model"], str),
                    "basis": _typed(fields["basis"], str),
                    "seconds": float(fields["seconds"]),
                    "stage": Stage(fields["stage"]),
                    "changes": tuple((_typed(key, str), value) for key, value in fields["changes"]),
                    "remarks": tuple(_typed(each, str) for each in fields["remarks"]),
                },
                measured=None if measured is None else _measurement(measured),
            )
        except InvalidValueError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise InvalidValueError(f"not a trial: {type(error).__name__}: {error}") from error


def _measurement(content: Mapping[str, Any]) -> Measurement:
    fields = {name: _from_json(each) for name, each in dict(content).items()}
    for name in ("size_bytes", "drop", "latency_ms"):
        if isinstance(fields[name], bool) or not isinstance(fields[name], (int, float)) or math.isnan(fields[name]):
            raise InvalidValueError(f"not a trial: {name} is {fields[name]!r}")
    return Measurement(**fields)


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise InvalidValueError(f"not a trial: {str(value)[:60]!r} where {kind.__name__} was expected")
    return value


def _to_json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value
