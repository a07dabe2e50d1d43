"""Where a quantized network differs from the float one, layer by layer, and what to do about it.

The accuracy report, its JSON and `quark debug` are made from it. A layer has three figures:

    local        the error of its output if only it is quantized, with inputs from the float network
    accumulated  the error of its output in the quantized network, including all earlier layers
    sensitivity  how far the network's output moves if only this layer is quantized
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from quark.account import FileFacts
from quark.compare import OutputFidelity, Verdict, overall_verdict
from quark.measures import MeasureResult
from quark.plan import SkippedNode
from quark.text import json_value, shell_command

BELOW_DB = 10.0
OWN_SHARE = 0.5  # share of a layer's error from which on the layer itself is to blame
BEST_DB = 60.0  # SQNR that the first layer is compared with


class Action(str, Enum):
    """Kinds of remedies for a layer."""

    EXCLUDE = "exclude"
    MORE_BITS = "more_bits"
    PER_CHANNEL = "per_channel"
    EQUALIZE = "equalize"
    SMOOTH = "smooth"
    CALIBRATE = "calibrate"
    BIAS_CORRECTION = "bias_correction"
    ADAROUND = "adaround"


@dataclass(frozen=True)
class Remedy:
    """One thing to try for a layer: why it should help, and the option for --set."""

    action: Action
    text: str
    option: str = ""

    @property
    def arguments(self) -> str:
        """The option as arguments of `quark quantize`, quoted for a shell."""
        return shell_command(["--set", self.option]) if self.option else ""


@dataclass(frozen=True)
class Step:
    """Something to do first. `arguments` are those of `quark quantize`, quoted for a shell; empty if there are none."""

    text: str
    arguments: str = ""

    def line(self) -> str:
        return self.text + (f": {self.arguments}" if self.arguments else "")


class Outcome(str, Enum):
    """Result of trying a suggestion."""

    HELPED = "helped"
    NO_GAIN = "no gain"
    FAILED = "failed"
    UNTRIED = "not tried"


@dataclass(frozen=True)
class Suggestion:
    """A change to how the file is made, and its effect on samples that were not used for calibration.

    `arguments` are those of `quark quantize`, quoted for a shell. `measure` belongs to the part that decides the
    verdict on the file, with its value before and after the change. `reason` says why the change was not tried, or why
    it failed.
    """

    text: str
    arguments: str
    outcome: Outcome = Outcome.UNTRIED
    verdict_before: Verdict = Verdict.UNCHECKED
    verdict_after: Verdict = Verdict.UNCHECKED
    measure: str = ""
    figure_before: str = ""
    figure_after: str = ""
    severity_before: float | None = None
    severity_after: float | None = None
    distance_before: float | None = None
    distance_after: float | None = None
    reason: str = ""

    @property
    def result(self) -> str:
        """What was measured, as text.

        >>> Suggestion("", "", Outcome.HELPED, Verdict.DEGRADED, Verdict.OK, "SQNR", "4.1 dB", "12.0 dB").result
        'measured: degraded -> ok, SQNR 4.1 dB -> 12.0 dB'
        """
        if self.outcome in (Outcome.UNTRIED, Outcome.FAILED):
            return f"{self.outcome.value}: {self.reason}" if self.reason else self.outcome.value
        verdicts = f"{self.verdict_before.value} -> {self.verdict_after.value}"
        return f"measured: {verdicts}, {self.measure} {self.figure_before} -> {self.figure_after}"

    @property
    def step(self) -> Step:
        """The suggestion and what was measured, with the arguments."""
        return Step(f"{self.text}; {self.result}", self.arguments)


@dataclass(frozen=True)
class Histogram:
    """The values of a tensor in bins of equal width from `lowest` to `highest`.

    `quantized` counts the quantized values in the same bins. Values beyond `clip` saturate; None if the format has no
    such limits.
    """

    tensor: str
    lowest: float
    highest: float
    counts: tuple[int, ...]
    quantized: tuple[int, ...] | None = None
    clip: tuple[float, float] | None = None


@dataclass(frozen=True)
class LayerDiagnosis:
    """One layer of the quantized network, by the name of its node.

    `weights` and `inputs` are formats, empty for float; `clipped` is the share of input values that saturate; `share`
    is its part of the sensitivities of all layers; `causes` explain its error.
    """

    name: str
    op_type: str
    tensor: str
    order: int
    weights: str = ""
    inputs: str = ""
    parameters: int = 0
    bits: float | None = None
    local: OutputFidelity | None = None
    accumulated: OutputFidelity | None = None
    sensitivity: float | None = None
    share: float | None = None
    rank: int | None = None  # 1 is the most sensitive
    clipped: float | None = None
    causes: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    weight_histogram: Histogram | None = None
    input_histogram: Histogram | None = None
    nodes: tuple[str, ...] = ()  # all nodes of the layer: its own, and the activation computed with it


@dataclass(frozen=True)
class Basis:
    """The data of the comparison: `samples` of `data`, and `sensitivity_samples` of them, evenly spaced.

    Sensitivities are the divergence of predictions if `measure` is kl. If it is distance, they are the distance of all
    outputs: the sum over their parts of the squared error relative to the power.
    """

    data: str
    samples: int
    is_random: bool = False
    sensitivity_samples: int = 0
    measure: str = ""


@dataclass(frozen=True)
class WeightFacts:
    """The number of parameters, and the bits of each: in the float file, by the formats, and in the quantized file."""

    parameters: int
    float_bits: float
    format_bits: float
    stored_bits: float


@dataclass(frozen=True)
class AccuracyFacts:
    """Accuracies on the same labelled samples, as fractions."""

    data: str
    samples: int
    float_top1: float
    quantized_top1: float
    float_top5: float
    quantized_top5: float
    standard_error: float  # of the difference in top-1


@dataclass(frozen=True)
class SpeedFacts:
    """Milliseconds per sample, the best of several runs."""

    float_ms: float
    quantized_ms: float
    batch_size: int
    threads: int | None = None


@dataclass(frozen=True)
class Remark:
    """Something found about a file: `where` names the node or tensor."""

    level: str
    rule: str
    where: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Both files and everything that was found.

    `making` says how the quantized file was made: configuration, versions, hashes, command; empty if unknown.
    `suggestions` are all changes that were considered, those that helped first, by gain; `steps` are what to do first.
    """

    source: FileFacts
    result: FileFacts
    basis: Basis
    outputs: tuple[OutputFidelity, ...]
    layers: tuple[LayerDiagnosis, ...]
    skipped: tuple[SkippedNode, ...] = ()
    weights: WeightFacts | None = None
    accuracy: AccuracyFacts | None = None
    speed: SpeedFacts | None = None
    measure: MeasureResult | None = None  # the result of the user's metric, if there is one
    lint: tuple[Remark, ...] | None = None  # None if not checked
    steps: tuple[Step, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    remarks: tuple[str, ...] = ()
    making: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        return overall_verdict(self.outputs)

    @property
    def advice(self) -> tuple[str, ...]:
        """The first steps to take, as lines of text."""
        return tuple(step.line() for step in self.steps)

    @property
    def ranked(self) -> tuple[LayerDiagnosis, ...]:
        """The layers that have a rank, the most sensitive first."""
        return tuple(
            sorted((layer for layer in self.layers if layer.rank is not None), key=lambda layer: layer.rank or 0)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON, with infinities as text."""
        content: dict[str, Any] = json_value({"verdict": self.verdict, **asdict(self)})
        for entry, suggestion in zip(content["suggestions"], self.suggestions, strict=True):
            entry["result"] = suggestion.result
        for entry, layer in zip(content["layers"], self.layers, strict=True):
            for part, remedy in zip(entry["remedies"], layer.remedies, strict=True):
                part["arguments"] = remedy.arguments
        content["advice"] = list(self.advice)
        content["outputs"] = [output.to_dict() for output in self.outputs]
        content["measure"] = self.measure.to_dict() if self.measure else None
        return content

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)


@dataclass(frozen=True)
class Divergence:
    """The layer where two networks diverge, number `index` of the diagnosis' layers.

    `is_below` is True if its accumulated SQNR is below the limit; otherwise it is the layer with the largest loss,
    `loss_db`. `share` is the part of its error that its own rounding makes, and `is_own` is True if that is at least
    half. `worst` has the largest local error of this layer and those before it.
    """

    layer: LayerDiagnosis
    index: int
    is_below: bool
    loss_db: float
    is_own: bool
    share: float
    worst: LayerDiagnosis


def first_divergence(diagnosis: Diagnosis, below_db: float = BELOW_DB) -> Divergence | None:
    """Return the first layer, in the order of the graph, whose accumulated SQNR is below `below_db`.

    If there is none, return the layer with the largest loss: the SQNR drop relative to the worst earlier layer. Returns
    None if every layer is exact.
    """
    layers = diagnosis.layers
    accumulated = [math.inf if layer.accumulated is None else layer.accumulated.sqnr_db for layer in layers]
    local = [math.inf if layer.local is None else layer.local.sqnr_db for layer in layers]
    inexact = [index for index, db in enumerate(accumulated) if db < math.inf]
    if not inexact:
        return None
    losses, before = [], BEST_DB
    for db in accumulated:
        losses.append(before - min(db, BEST_DB))
        before = min(before, db)
    below = next((index for index in inexact if accumulated[index] < below_db), None)
    index = below if below is not None else max(inexact, key=lambda position: (losses[position], -position))
    share = 0.0
    if local[index] == -math.inf:
        share = 1.0
    elif local[index] < math.inf and accumulated[index] > -math.inf:
        share = min(1.0, float(10 ** ((accumulated[index] - local[index]) / 10)))
    worst = min(range(index + 1), key=local.__getitem__)
    return Divergence(layers[index], index, below is not None, losses[index], share >= OWN_SHARE, share, layers[worst])
