"""How the range of a tensor is found, where what learns starts from a place of its own.

LSQ     2 mean|v| / sqrt(Qp), told as the range that codes of that step reach
TQT     a threshold: the maximum for weights and the least divergence for activations, unless said otherwise
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from quark.formats.spec import IntFormat
from quark.ranges import KLJ, MinMax, Observer, RangeMethod, TensorRange, ThreeSigma
from quark.torch.specs import AffineSpec, Algorithm, ThresholdInit


def observed_method(spec: AffineSpec, is_weight: bool = False) -> RangeMethod:
    """The method that a tensor of that spec is watched with."""
    learning = spec.learning
    if learning is None:
        return spec.method
    if learning.algorithm is Algorithm.LSQ:
        return MeanMagnitude()
    initial = learning.initial or (ThresholdInit.MAX if is_weight else ThresholdInit.KL_J)
    return {ThresholdInit.MAX: MinMax(), ThresholdInit.THREE_SIGMA: ThreeSigma(), ThresholdInit.KL_J: KLJ()}[initial]


@dataclass(frozen=True)
class MeanMagnitude(RangeMethod):
    """Step times the highest code, on both sides where codes have a sign; else down to what was seen."""

    def observer(self, integer: IntFormat, is_symmetric: bool) -> Observer:
        return MeanMagnitudeObserver(integer)

    def __str__(self) -> str:
        return "MeanMagnitude"


class MeanMagnitudeObserver(Observer):
    def __init__(self, integer: IntFormat) -> None:
        self._integer = integer
        self._sum = 0.0
        self._count = 0
        self._lowest = 0.0

    def observe(self, x: Any) -> None:
        self._lowest = min(self._lowest, float(np.min(x, initial=0.0)))
        self._sum += float(np.abs(x, dtype=np.float64).sum())
        self._count += int(np.size(x))

    def merge(self, other: Observer) -> None:
        assert isinstance(other, MeanMagnitudeObserver)
        self._sum += other._sum
        self._count += other._count
        self._lowest = min(self._lowest, other._lowest)

    def result(self) -> TensorRange:
        mean = self._sum / self._count if self._count else 0.0
        reach = 2 * mean * math.sqrt(self._integer.qmax)
        return TensorRange(-reach if self._integer.signed else self._lowest, reach)
