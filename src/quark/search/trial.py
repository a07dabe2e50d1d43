"""A trial: one configuration that was tried, and what came of it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from quark.errors import InvalidValueError
from quark.files.foreign import Fields


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
    def from_dict(content: Any, label: str = "trial") -> Trial:
        """What `to_dict` gave; anything else is an InvalidValueError, which calls it `label`."""
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
            stage=Stage(fields.text("stage", [each.value for each in Stage])),
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
    for name, each in Measurement.__dataclass_fields__.items():
        if name in values or name not in fields:
            continue
        if each.default is None:
            values[name] = fields.number(name, is_finite=False) if fields.has(name) else None
        else:
            values[name] = fields.boolean(name) if isinstance(each.default, bool) else fields.text(name)
    return Measurement(**values)


def _to_json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
