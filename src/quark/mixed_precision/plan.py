"""What was chosen for every layer, as a value and as a file.

The file is JSON with a line for each layer, the least sensitive first or in any other order. To change a plan, write
"high" or "low" into its `choice`; only `layer` and `choice` have to be there:

    {"layer": "conv1", "op_type": "Conv", "sensitivity": 0.0021, "weights": 864, "macs": 10838016, "choice": "low"}

`sensitivity` is the squared error of the network's output, relative to the output's power, where that layer alone has
the lower types and all else is float. Where it was measured for the same model, types and samples (`basis`), it is
used again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import Any

from quark.errors import InvalidValueError, unknown_name
from quark.mixed_precision.figures import Figure, Metric

VERSION = 1


class Precision(str, Enum):
    HIGH = "high"
    LOW = "low"


@dataclass(frozen=True)
class LayerPrecision:
    """A layer that could be lowered. `sensitivity` None: not measured; `macs`, multiplications for one sample, None:
    the shapes are not known."""

    layer: str
    op_type: str = ""
    sensitivity: float | None = None
    weights: int = 0
    macs: int | None = None
    choice: Precision = Precision.HIGH


@dataclass(frozen=True)
class MixedPlan:
    """`high` and `low` say the types in words. `figures` are those of the network with these choices. `model` and
    `basis` are digests: of the model, and of all that sensitivities follow from; `samples` of them were looked at.

    >>> plan = MixedPlan((LayerPrecision("a"), LayerPrecision("b")), "int16", "int8").with_lowered(["b"])
    >>> plan.lowered
    ('b',)
    >>> MixedPlan.from_json(plan.to_json()) == plan
    True
    """

    layers: tuple[LayerPrecision, ...]
    high: str
    low: str
    figures: tuple[Figure, ...] = ()
    model: str = ""
    basis: str = ""
    samples: int = 0

    @property
    def lowered(self) -> tuple[str, ...]:
        return tuple(each.layer for each in self.layers if each.choice is Precision.LOW)

    @property
    def missed(self) -> tuple[Figure, ...]:
        """The figures that are not what was wanted."""
        return tuple(each for each in self.figures if not each.is_met)

    def with_lowered(self, lowered: Collection[str], figures: tuple[Figure, ...] = ()) -> MixedPlan:
        """The same layers with these lowered and no others."""
        names = frozenset(lowered)
        choices = {True: Precision.LOW, False: Precision.HIGH}
        layers = tuple(replace(each, choice=choices[each.layer in names]) for each in self.layers)
        return replace(self, layers=layers, figures=figures)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; infinities as text."""
        return {
            "version": VERSION,
            "high": self.high,
            "low": self.low,
            "figures": [{key: _plain(value) for key, value in asdict(each).items()} for each in self.figures],
            "measured": {"model": self.model, "basis": self.basis, "samples": self.samples},
            "layers": [{key: _plain(value) for key, value in asdict(each).items()} for each in self.layers],
        }

    def to_json(self) -> str:
        """As text, with a line for each layer."""
        content = self.to_dict()
        layers = ",\n".join(f"  {json.dumps(each, allow_nan=False)}" for each in content.pop("layers"))
        head = json.dumps(content, indent=1, allow_nan=False).removesuffix("\n}")
        return f'{head},\n "layers": [\n{layers}\n ]\n}}\n'

    @staticmethod
    def from_json(text: str) -> MixedPlan:
        """What `to_json` wrote, or a person. An error names the layer and the field that is wrong."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidValueError(f"not a plan of mixed precision: {error}") from error
        if not isinstance(content, Mapping) or not isinstance(content.get("layers"), list):
            raise InvalidValueError("not a plan of mixed precision: expected an object with a list of 'layers'")
        if content.get("version", VERSION) != VERSION:
            raise InvalidValueError(f"plan of mixed precision of version {content['version']!r}: expected {VERSION}")
        layers = tuple(_layer(each, number) for number, each in enumerate(content["layers"], 1))
        _refuse_duplicates([each.layer for each in layers])
        return MixedPlan(
            layers,
            _text(content.get("high", ""), "high"),
            _text(content.get("low", ""), "low"),
            _figures(content.get("figures", [])),
            **_measured(content.get("measured", {})),
        )


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value.value if isinstance(value, Enum) else value


def _layer(content: Any, number: int) -> LayerPrecision:
    if not isinstance(content, Mapping) or not isinstance(content.get("layer"), str) or not content["layer"]:
        raise InvalidValueError(f"layer {number} of the plan: expected an object with the name under 'layer'")
    name = content["layer"]
    known = [each.name for each in fields(LayerPrecision)]
    for key in content:
        if key not in known:
            raise unknown_name(f"field of layer '{name}'", key, known)
    choices = [each.value for each in Precision]
    if content.get("choice") not in choices:
        raise InvalidValueError(
            f"layer '{name}' of the plan: choice {content.get('choice')!r}, expected {' or '.join(choices)}"
        )
    return LayerPrecision(
        name,
        _text(content.get("op_type", ""), f"op_type of layer '{name}'"),
        _number(content.get("sensitivity"), f"sensitivity of layer '{name}'"),
        _count(content.get("weights", 0), f"weights of layer '{name}'") or 0,
        _count(content.get("macs"), f"macs of layer '{name}'"),
        Precision(content["choice"]),
    )


def _figures(content: Any) -> tuple[Figure, ...]:
    if not isinstance(content, list):
        raise InvalidValueError(f"figures of the plan: {content!r}, expected a list, which may be left out")
    return tuple(map(_figure, content))


def _figure(content: Any) -> Figure:
    try:
        metric = Metric(content["metric"])
        value, limit = _number(content["value"], "figure"), _number(content["limit"], "figure")
        reference = _number(content.get("reference"), "figure")
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValueError(f"figures of the plan: {content!r} is none; the list may be left out") from error
    if value is None or limit is None:
        raise InvalidValueError(f"figures of the plan: {content!r} has no value or no limit")
    return Figure(metric, value, limit, reference)


def _measured(content: Any) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise InvalidValueError(f"measured of the plan: {content!r}, expected an object")
    texts = {key: _text(content.get(key, ""), f"{key} under 'measured'") for key in ("model", "basis")}
    return {**texts, "samples": _count(content.get("samples", 0), "samples under 'measured'") or 0}


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidValueError(f"{what} of the plan: {value!r}, expected text")
    return value


def _count(value: Any, what: str) -> int | None:
    number = _number(value, what)
    if number is not None and not math.isfinite(number):
        raise InvalidValueError(f"{what} of the plan: {value!r}, expected a count")
    return None if number is None else int(number)


def _number(value: Any, what: str) -> float | None:
    """A number of at least 0, or text that `_plain` made of one; figures may be below 0."""
    if value is None:
        return None
    text = value if value in ("inf", "-inf", "nan") else None
    if isinstance(value, bool) or not (text or isinstance(value, (int, float))):
        raise InvalidValueError(f"{what} of the plan: {value!r}, expected a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise InvalidValueError(f"{what} of the plan is too large: a number of {value.bit_length()} bits") from error
    if what != "figure" and not number >= 0:
        raise InvalidValueError(f"{what} of the plan: {value!r}, expected at least 0")
    return number


def _refuse_duplicates(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InvalidValueError(f"layer '{name}' is in the plan more than once: leave one of the lines")
