"""The verdict on a quantized network: on each part of each output, on each output, and on all of them.

A part is a piece of an output with a scale and a meaning of its own: box coordinates, class scores, a distribution.
Each part is judged over all samples and on its worst sample. The worst part decides for the output, and the worst
output for the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from quark.compare.measures import PairSums
from quark.text import json_value

OK_SQNR_DB, OK_COSINE = 10.0, 0.95
COLLAPSED_SQNR_DB, COLLAPSED_COSINE = 3.0, 0.75
EXECUTION_GAP_DB = 6.0  # twice the error; rounding alone makes no such difference
CLOSE_SQNR_DB = 30.0  # from here on, a difference between two executions does not matter
FEW_PREDICTIONS = 100  # one prediction of so few is a percent or more
UNORDERED_KINDS = frozenset({"detections", "rows", "ids", "sequence"})  # kinds whose positions in a tensor mean little


class Verdict(str, Enum):
    """Overall quality of a quantized network."""

    OK = "ok"
    DEGRADED = "degraded"
    COLLAPSED = "collapsed"
    UNCHECKED = "unchecked"

    def is_worse_than(self, other: Verdict) -> bool:
        """True if the network is further from float; False if one of them was not checked."""
        return self in ORDER and other in ORDER and ORDER.index(self) > ORDER.index(other)


ORDER = (Verdict.OK, Verdict.DEGRADED, Verdict.COLLAPSED)


def _verdict_at(severity: float) -> Verdict:
    return ORDER[0 if severity <= 1 else 1 if severity <= 2 else 2]


@dataclass(frozen=True)
class PartFidelity:
    """One part of an output, over all samples.

    `name` says where the part lies ("channels 4..21 of axis 1"), `kind` what it is taken for ("scores"). `figure` is
    the value of `measure` over all samples, and `worst_figure` its value on the sample `worst_sample`, counted from 0.
    `severity` makes parts of different kinds comparable: up to 1 is ok, above 2 is collapsed.
    """

    name: str
    kind: str
    measure: str
    figure: float
    worst_sample: int
    worst_figure: float
    severity: float = 0.0
    distance: float = 0.0

    @property
    def verdict(self) -> Verdict:
        return _verdict_at(self.severity)

    @property
    def is_sample_worse(self) -> bool:
        """True if the worst sample is clearly worse than the samples taken together."""
        return self.worst_figure < self.figure and figure_text(self, self.worst_figure) != figure_text(self)

    def text(self, sample: str = "sample") -> str:
        """The part with its figures; `sample` is what samples are called.

        >>> PartFidelity("channels 4..21 of axis 1", "scores", "overlap of scores", 0.81, 3, 0.62).text()
        'channels 4..21 of axis 1 (scores): overlap of scores 0.81, and 0.62 on sample 3'
        """
        where = f"{self.name} ({self.kind})" if self.name else f"({self.kind})"
        figure, worst = figure_text(self), figure_text(self, self.worst_figure)
        own = f", and {worst} on {sample} {self.worst_sample}" if self.is_sample_worse else ""
        return f"{where}: {self.measure} {figure}{own}"


def figure_text(part: PartFidelity, figure: float | None = None) -> str:
    """A figure of the part for reading, with its unit."""
    value = part.figure if figure is None else figure
    if part.measure.startswith("SQNR"):
        return "exact" if value == math.inf else f"{value:.1f} dB"
    return f"{value:.2f}" if value < 0.995 or value == 1 else f"{value:.4f}"


@dataclass(frozen=True)
class OutputFidelity:
    """One output of the network, over all samples.

    `cosine`, `sqnr_db`, `agreement` and `max_error` are about the whole output. `agreement` is the share of equal
    predictions among all `predictions`; `near_ties` of the others went to a class that float finds nearly as likely.
    `kind` and `parts` say what the output is taken for and how close each of its parts is; the verdict comes from them
    where there are any. `worst_sample` is that of the worst part. `distance` ranks networks by how far they are from
    float: 0 is equal, it has no unit, and it falls smoothly as the network gets better.
    """

    name: str
    cosine: float
    sqnr_db: float
    agreement: float | None = None
    max_error: float = 0.0
    kind: str = ""
    parts: tuple[PartFidelity, ...] = ()
    worst_sample: int | None = None
    distance: float = math.nan
    predictions: int = 0
    near_ties: int = 0

    @classmethod
    def of(cls, name: str, sums: PairSums, agreement: float | None = None) -> OutputFidelity:
        """An output as a whole, from the sums over all samples."""
        return cls(name, sums.cosine, sums.sqnr_db, agreement, math.inf if sums.is_broken else sums.max_error)

    def __post_init__(self) -> None:
        if math.isnan(self.distance):
            object.__setattr__(self, "distance", 10 ** (-self.sqnr_db / 10))

    @property
    def worst_part(self) -> PartFidelity | None:
        return max(self.parts, key=lambda part: part.severity, default=None)

    @property
    def severity(self) -> float:
        """Up to 1 is ok, above 2 is collapsed."""
        if self.worst_part is not None:
            return self.worst_part.severity
        return max(
            severity_of(self.sqnr_db, OK_SQNR_DB, COLLAPSED_SQNR_DB),
            severity_of(self.cosine, OK_COSINE, COLLAPSED_COSINE),
        )

    @property
    def verdict(self) -> Verdict:
        return _verdict_at(self.severity)

    @property
    def drop(self) -> tuple[float, str]:
        """The loss in percentage points, and the name of what was lost."""
        if self.agreement is not None:
            ties = self.near_ties / max(self.predictions, 1)
            lost = max(0.0, 100 * (1 - self.agreement - ties))
            return lost, f"equal predictions of '{self.name}'{', apart from near ties' if self.near_ties else ''}"
        shares = [part for part in self.parts if not part.measure.startswith("SQNR")]
        if shares:
            worst = min(shares, key=lambda part: part.figure)
            return 100 * (1 - worst.figure), f"the {worst.measure} of '{self.name}'"
        return 100 * (1 - self.cosine), f"the cosine of '{self.name}'"

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it; infinities are text."""
        parts = [
            asdict(part) | {"is_sample_worse": part.is_sample_worse, "verdict": part.verdict.value}
            for part in self.parts
        ]
        content = {**asdict(self), "parts": parts, "severity": self.severity, "verdict": self.verdict.value}
        return {key: json_value(value) for key, value in content.items()}


def agreement_text(output: OutputFidelity, digits: int = 1) -> str:
    """The share of equal predictions for reading: counts where a percentage would be about a few samples.

    >>> agreement_text(OutputFidelity("y", 1.0, 20.0, 0.875, predictions=8, near_ties=1))
    '7 of 8, 1 near tie'
    >>> agreement_text(OutputFidelity("y", 1.0, 20.0, 0.875, predictions=800))
    '87.5 %'
    """
    if output.agreement is None:
        return "-"
    if not 0 < output.predictions < FEW_PREDICTIONS:
        return f"{100 * output.agreement:.{digits}f} %"
    ties = f", {output.near_ties} near tie{'s' if output.near_ties > 1 else ''}" if output.near_ties else ""
    return f"{round(output.agreement * output.predictions)} of {output.predictions}{ties}"


def severity_of(figure: float, ok: float, collapsed: float) -> float:
    """How bad a figure is: 1 at the bound `ok`, 2 at the bound `collapsed`, linear from there on, at most 3.

    Below 1 it is the loss relative to the loss at the bound: for shares and cosines the distance from 1, for decibels
    the amplitude of the error. So 0 is equal to float.

    >>> severity_of(10.0, 10.0, 3.0), severity_of(3.0, 10.0, 3.0), severity_of(float("-inf"), 10.0, 3.0)
    (1.0, 2.0, 3.0)
    >>> round(severity_of(0.95, 0.9, 0.5), 2), round(severity_of(16.02, 10.0, 3.0), 2)
    (0.5, 0.5)
    """
    if math.isnan(figure):
        return 3.0
    if figure > ok:
        return max(0.0, (1 - figure) / (1 - ok)) if ok < 1 else 10 ** ((ok - figure) / 20)
    return min(1.0 + (ok - figure) / (ok - collapsed), 3.0)


def overall_verdict(outputs: Iterable[OutputFidelity]) -> Verdict:
    """The verdict on the worst output; unchecked if there are none."""
    return max((output.verdict for output in outputs), key=ORDER.index, default=Verdict.UNCHECKED)


def largest_drop(outputs: Iterable[OutputFidelity]) -> tuple[float, str]:
    """The loss of the output that lost most, in percentage points, and the name of what was lost.

    an output of shape [n, classes]  100 (1 - agreement), where near ties count as agreeing
    scores, boxes, distributions     100 (1 - the figure of the worst part)
    any other output                 100 (1 - cosine)
    """
    return max(output.drop for output in outputs)


def worst_text(outputs: Iterable[OutputFidelity], sample: str = "sample") -> str:
    """The part that decides the verdict, with its figures; empty if there are no outputs.

    >>> part = PartFidelity("", "classes", "SQNR", 4.6, 2, 3.1, severity=1.6)
    >>> worst_text([OutputFidelity("logits", 0.81, 4.6, parts=(part,))], "held-out sample")
    "output 'logits' (classes): SQNR 4.6 dB, and 3.1 dB on held-out sample 2"
    """
    output = worst_output(outputs)
    if output is None:
        return ""
    if output.worst_part is not None:
        return f"output '{output.name}' {output.worst_part.text(sample)}"
    sqnr = "exact" if output.sqnr_db == math.inf else f"SQNR {output.sqnr_db:.1f} dB"
    return f"output '{output.name}': {sqnr}, cosine {output.cosine:.4f}"


@dataclass(frozen=True)
class ExecutionGap:
    """An output that two executions of one file compute differently: `optimized` as the runtime usually does, `plain`
    node by node."""

    output: str
    optimized_sqnr_db: float
    plain_sqnr_db: float

    def __str__(self) -> str:
        figures = (f"{figure:.1f} dB" for figure in (self.optimized_sqnr_db, self.plain_sqnr_db))
        return "output '{}' has an SQNR of {} with them and {} without".format(self.output, *figures)


def execution_gap(optimized: Iterable[OutputFidelity], plain: Iterable[OutputFidelity]) -> ExecutionGap | None:
    """The output with the largest difference in distance from float between two executions on the same samples; None if
    rounding explains all differences.

    >>> execution_gap([OutputFidelity("y", 0.7, 3.3)], [OutputFidelity("y", 0.99, 17.2)])
    ExecutionGap(output='y', optimized_sqnr_db=3.3, plain_sqnr_db=17.2)
    >>> execution_gap([OutputFidelity("y", 0.99, 19.0)], [OutputFidelity("y", 0.99, 17.2)]) is None
    True
    """
    others = {output.name: output for output in plain}
    gaps = [
        ExecutionGap(output.name, output.sqnr_db, others[output.name].sqnr_db)
        for output in optimized
        if output.name in others and output.kind not in UNORDERED_KINDS
    ]

    def size(gap: ExecutionGap) -> float:
        low, high = sorted((gap.optimized_sqnr_db, gap.plain_sqnr_db))
        return 0.0 if low >= CLOSE_SQNR_DB else high - low

    largest = max(gaps, key=size, default=None)
    return largest if largest is not None and size(largest) >= EXECUTION_GAP_DB else None


def worst_output(outputs: Iterable[OutputFidelity]) -> OutputFidelity | None:
    """The output that decides the verdict."""
    return max(outputs, key=lambda output: (output.severity, -output.sqnr_db), default=None)
