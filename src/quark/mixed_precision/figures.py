"""How a network does by one measure, and whether that is what was wanted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

DEFAULT_SQNR_DB = 25.0  # noise of a three-hundredth of the output's power: what 8 bits can do where they suit a network
_TOLERANCE = 1e-9  # 0.75 - 0.74 is a little more than 0.01


class Metric(str, Enum):
    """What is measured. Accuracy and signal to noise are better where they are higher, the others where lower."""

    ACCURACY = "accuracy"  # whatever the user's function says
    MEASURE_DROP = "drop of the measure"  # what is lost of a measure, as a share of the float network's value
    L2 = "L2 distance"  # of the output, from the float network's; the mean over samples
    SQNR = "SQNR"  # signal to noise of the output, in decibels
    BITS = "bits per weight"  # the mean over the weights of all layers that could be lowered
    BIT_OPERATIONS = "bit operations"  # multiplications times the bits of both factors, of those at the higher types

    @property
    def is_higher_better(self) -> bool:
        return self in (Metric.ACCURACY, Metric.SQNR)


@dataclass(frozen=True)
class Figure:
    """`limit` is the worst that is accepted; `reference` what the float network has, or for budgets all layers at the
    higher types, where that means something.

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
