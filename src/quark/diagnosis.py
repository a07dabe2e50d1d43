"""Where a quantized network differs from the float one, layer by layer, and what to do about it.

The value that the page, its JSON and `quark debug` are made of. A layer has three figures:

    local        its output when only it is quantized and is given the float network's inputs: its own doing
    accumulated  its output in the quantized network: its own doing and that of all before it
    sensitivity  how far the network's output moves when only this layer is quantized: what its own doing costs
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from quark.account import FileFacts
from quark.fidelity import OutputFidelity, Verdict, overall_verdict
from quark.measures import MeasureResult
from quark.plan import SkippedNode
from quark.text import shell_command


class Action(str, Enum):
    """The kinds of things to do about a layer."""

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
    """One thing to try about a layer: why it should help, and the option that asks for it, as --set takes it."""

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
    """What became of a suggestion."""

    HELPED = "helped"
    NO_GAIN = "no gain"
    FAILED = "failed"
    UNTRIED = "not tried"


@dataclass(frozen=True)
class Suggestion:
    """A change to how the file is made, and what it did on samples that were not calibrated on.

    `arguments` are those of `quark quantize`, quoted for a shell. `measure` is that of the part which decides the
    verdict on the file, with its value for the file and for the changed one. `reason` says why it was not tried, or why
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
        """What was measured, for reading.

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
    """The values of a tensor in bins of equal width from `lowest` to `highest`. `quantized` counts what they became, in
    the same bins. Beyond `clip` values saturate; None where the format has no such limits."""

    tensor: str
    lowest: float
    highest: float
    counts: tuple[int, ...]
    quantized: tuple[int, ...] | None = None
    clip: tuple[float, float] | None = None


@dataclass(frozen=True)
class LayerDiagnosis:
    """One layer of the quantized network, by the name of its node. `weights` and `inputs` are formats, empty where they
    are float; `clipped` is the share of its inputs' values that saturate; `share` is of all layers' sensitivities.
    `causes` say what is the matter with it."""

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
    nodes: tuple[str, ...] = ()  # all of the layer: its node, and the activation that is computed with it


@dataclass(frozen=True)
class Basis:
    """What was looked at: `samples` of `data`, and `sensitivity_samples` of them, evenly spaced, for sensitivities.
    `measure` is what those are: the divergence of predictions (kl), or the distance of all outputs, the sum over their
    parts of the squared error relative to the power (distance)."""

    data: str
    samples: int
    is_random: bool = False
    sensitivity_samples: int = 0
    measure: str = ""


@dataclass(frozen=True)
class WeightFacts:
    """The parameters of both files, and the bits of each: in the float file, by the formats, and in the quantized file
    as it lies on the disk."""

    parameters: int
    float_bits: float
    format_bits: float
    stored_bits: float


@dataclass(frozen=True)
class AccuracyFacts:
    """On the same labelled samples; shares, not percents."""

    data: str
    samples: int
    float_top1: float
    quantized_top1: float
    float_top5: float
    quantized_top5: float
    standard_error: float  # of the difference of top-1


@dataclass(frozen=True)
class SpeedFacts:
    """Milliseconds a sample, the best of several runs."""

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
    """Both files and all that was found. `making` is how the quantized file came about: configuration, versions,
    hashes, command; empty where it does not say. `suggestions` are all changes that were considered, those that helped
    first, by gain; `steps` are what to do first."""

    source: FileFacts
    result: FileFacts
    basis: Basis
    outputs: tuple[OutputFidelity, ...]
    layers: tuple[LayerDiagnosis, ...]
    skipped: tuple[SkippedNode, ...] = ()
    weights: WeightFacts | None = None
    accuracy: AccuracyFacts | None = None
    speed: SpeedFacts | None = None
    measure: MeasureResult | None = None  # by the user's metric, where one was given
    lint: tuple[Remark, ...] | None = None  # None where nobody looked
    steps: tuple[Step, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    remarks: tuple[str, ...] = ()
    making: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        return overall_verdict(self.outputs)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do first, each a line for reading."""
        return tuple(step.line() for step in self.steps)

    @property
    def ranked(self) -> tuple[LayerDiagnosis, ...]:
        """The layers that have a rank, the most sensitive first."""
        return tuple(sorted((each for each in self.layers if each.rank is not None), key=lambda each: each.rank or 0))

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it; infinities are text."""
        content: dict[str, Any] = _plain({"verdict": self.verdict, **asdict(self)})
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


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
