"""What was chosen for every layer, as a value and as a file.

The file is JSON with a line for each layer, the least sensitive first or in any other order. To change a plan, write
"high" or "low" into its `choice`; only `layer` and `choice` have to be there:

    {"layer": "conv1", "op_type": "Conv", "sensitivity": 0.0021, "weights": 864, "macs": 10838016, "choice": "low"}

`sensitivity` is the squared error of the network's output, relative to the output's power, if that layer alone has the
lower types and all else is float. It is used again if it was measured for the same model, types and samples (`basis`).
A `Figure` is a measurement of a network, with the limit that was set for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import Any

from quark.errors import InvalidValueError, unknown_name
from quark.files.foreign import REPORT, Fields, parse_json, short

VERSION = 1
DEFAULT_SQNR_DB = 25.0  # noise of a three-hundredth of the output's power: what 8 bits reach on networks that suit them
_TOLERANCE = 1e-9  # 0.75 - 0.74 is a little more than 0.01


class Metric(str, Enum):
    """The measured quantity. Accuracy and signal to noise should be high, the others low."""

    ACCURACY = "accuracy"  # the value of the user's function
    MEASURE_DROP = "drop of the measure"  # loss of a measure, as a share of the float network's value
    L2 = "L2 distance"  # distance of the output from the float network's; the mean over samples
    SQNR = "SQNR"  # signal to noise of the output, in decibels
    BITS = "bits per weight"  # the mean over the weights of all layers that could be lowered
    SCORE = "score"  # distance from the float network's outputs
    BIT_OPERATIONS = "bit operations"  # multiplications times the bits of both factors, of those at the higher types

    @property
    def is_higher_better(self) -> bool:
        return self in (Metric.ACCURACY, Metric.SQNR)


@dataclass(frozen=True)
class Figure:
    """`limit` is the worst value that is accepted. `reference`, if there is one, is the value of the float network or,
    for budgets, of all layers at the higher types.

    >>> Figure(Metric.ACCURACY, 0.74, limit=0.75 - 0.01, reference=0.75).is_met
    True
    >>> str(Figure(Metric.ACCURACY, 0.74, limit=0.74, reference=0.75))
    'accuracy 0.75 -> 0.74'
    """

    metric: Metric
    value: float
    limit: float
    reference: float | None = None

    @property
    def is_met(self) -> bool:
        if self.metric.is_higher_better:
            return self.value >= self.limit - _TOLERANCE
        return self.value <= self.limit + _TOLERANCE * max(1.0, abs(self.limit))

    @property
    def harm(self) -> float:
        """For comparing two networks: less is better."""
        return -self.value if self.metric.is_higher_better else self.value

    @property
    def wanted(self) -> str:
        return f"{'at least' if self.metric.is_higher_better else 'at most'} {_text(self.metric, self.limit)}"

    def __str__(self) -> str:
        before = "" if self.reference is None else f"{_text(self.metric, self.reference)} -> "
        return f"{self.metric.value} {before}{_text(self.metric, self.value)}"


def _text(metric: Metric, value: float) -> str:
    if metric is Metric.SQNR:
        return f"{value:.1f} dB"
    if metric is Metric.MEASURE_DROP:
        return f"{value:.2%}"
    return f"{value:.1%}" if metric is Metric.BIT_OPERATIONS else f"{value:.4g}"


class Precision(str, Enum):
    """The two precisions that a plan chooses from, layer by layer."""

    HIGH = "high"
    LOW = "low"


@dataclass(frozen=True)
class LayerPrecision:
    """A layer that could be lowered. `sensitivity` is None if it was not measured, and `macs`, the multiplications for
    one sample, if shapes are not known. `score` replaces the sensitivity if a score was requested, and
    `target` is the number of the types, if there are several to choose from."""

    layer: str
    op_type: str = ""
    sensitivity: float | None = None
    weights: int = 0
    macs: int | None = None
    choice: Precision = Precision.HIGH
    score: float | None = None
    target: int = 0

    @property
    def rank(self) -> float:
        """The less, the sooner it is mixed in; infinite if nothing was measured."""
        known = self.sensitivity if self.score is None else self.score
        return math.inf if known is None else known


@dataclass(frozen=True)
class MixedPlan:
    """`high` and `low` are the types in words. `figures` are those of the network with these choices. `model` and
    `basis` are digests: of the model, and of all that sensitivities follow from. `samples` is how many were used.

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
        return tuple(planned.layer for planned in self.layers if planned.choice is Precision.LOW)

    @property
    def missed(self) -> tuple[Figure, ...]:
        """The figures that are not what was wanted."""
        return tuple(figure for figure in self.figures if not figure.is_met)

    def with_lowered(self, lowered: Collection[str], figures: tuple[Figure, ...] = ()) -> MixedPlan:
        """The same layers with these lowered and no others."""
        names = frozenset(lowered)
        choices = {True: Precision.LOW, False: Precision.HIGH}
        layers = tuple(replace(planned, choice=choices[planned.layer in names]) for planned in self.layers)
        return replace(self, layers=layers, figures=figures)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON can hold it; infinities as text."""
        return {
            "version": VERSION,
            "high": self.high,
            "low": self.low,
            "figures": [{key: _plain(value) for key, value in asdict(figure).items()} for figure in self.figures],
            "measured": {"model": self.model, "basis": self.basis, "samples": self.samples},
            "layers": [_layer_fields(layer) for layer in self.layers],
        }

    def to_json(self) -> str:
        """The plan as text, with a line for each layer."""
        content = self.to_dict()
        layers = ",\n".join(f"  {json.dumps(layer, allow_nan=False)}" for layer in content.pop("layers"))
        head = json.dumps(content, indent=1, allow_nan=False).removesuffix("\n}")
        return f'{head},\n "layers": [\n{layers}\n ]\n}}\n'

    @staticmethod
    def from_json(text: str, label: str = "plan of mixed precision") -> MixedPlan:
        """Read a plan. An error names the document as `label`, and the field that is wrong."""
        return MixedPlan.from_dict(parse_json(text, label, REPORT), label)

    @staticmethod
    def from_dict(content: Any, label: str = "plan of mixed precision") -> MixedPlan:
        """The same from content that was parsed already."""
        fields = Fields(content, label)
        if "layers" not in fields:
            raise InvalidValueError(f"{label}: not a plan of mixed precision: expected a list of 'layers'")
        if fields.content.get("version", VERSION) != VERSION:
            raise InvalidValueError(f"{label} has version {short(fields.value('version'))}: expected {VERSION}")
        layers = tuple(_layer(mapping, label) for mapping in fields.mappings("layers"))
        names: set[str] = set()
        for planned in layers:
            if planned.layer in names:
                raise InvalidValueError(
                    f"{label}: layer '{planned.layer}' is in it more than once: leave one of the lines"
                )
            names.add(planned.layer)
        measured = fields.mapping("measured") if "measured" in fields else Fields({}, label, "measured")
        return MixedPlan(
            layers,
            fields.text("high") if "high" in fields else "",
            fields.text("low") if "low" in fields else "",
            tuple(map(_figure, fields.mappings("figures"))) if "figures" in fields else (),
            model=measured.text("model") if "model" in measured else "",
            basis=measured.text("basis") if "basis" in measured else "",
            samples=measured.integer("samples") if measured.has("samples") else 0,
        )


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value.value if isinstance(value, Enum) else value


def _layer_fields(layer: LayerPrecision) -> dict[str, Any]:
    """The fields of a layer; a score and the number of its types only if there are some."""
    unsaid = {name for name, value in (("score", layer.score), ("target", layer.target or None)) if value is None}
    return {key: _plain(value) for key, value in asdict(layer).items() if key not in unsaid}


def _layer(content: Fields, label: str) -> LayerPrecision:
    name = content.text("layer")
    if not name:
        content.refuse("layer", "the name of a layer")
    known = [field.name for field in fields(LayerPrecision)]
    for key in content:
        if key not in known:
            raise unknown_name(f"field of layer '{name}'", key, known)
    label = f"{label}, layer '{name}'"  # a person looks for the name rather than the line number
    layer = Fields(content.content, label)
    return LayerPrecision(
        name,
        layer.text("op_type") if "op_type" in layer else "",
        layer.number("sensitivity", 0, is_finite=False) if layer.has("sensitivity") else None,
        layer.integer("weights") if layer.has("weights") else 0,
        layer.integer("macs") if layer.has("macs") else None,
        Precision(layer.text("choice", [precision.value for precision in Precision])),
        layer.number("score", is_finite=False) if layer.has("score") else None,
        layer.integer("target") if layer.has("target") else 0,
    )


def _figure(content: Fields) -> Figure:
    value, limit = (content.number(name, is_finite=False) for name in ("value", "limit"))
    reference = content.number("reference", is_finite=False) if content.has("reference") else None
    return Figure(Metric(content.text("metric", [metric.value for metric in Metric])), value, limit, reference)
