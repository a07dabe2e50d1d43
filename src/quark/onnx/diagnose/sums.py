"""How close two tensors are, as sums that add up over samples; and the same for each channel.

Sums run in float32 over stretches that stay in the processor's cache, and in float64 from stretch to stretch: whole
networks are compared, and this is most of the work beside running them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.fidelity import FidelityMeter, OutputFidelity

Array = NDArray[Any]
STRETCH = 1 << 15


@dataclass(frozen=True)
class Sums:
    """Of y (float) and z (quantized): y.z, y.y, z.z, the squared error and the largest. A z that is not finite where y
    is breaks them: the fidelity is then the worst there is."""

    dot: float = 0.0
    exact: float = 0.0
    quantized: float = 0.0
    error: float = 0.0
    max_error: float = 0.0
    is_broken: bool = False

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.dot + other.dot,
            self.exact + other.exact,
            self.quantized + other.quantized,
            self.error + other.error,
            max(self.max_error, other.max_error),
            self.is_broken or other.is_broken,
        )

    @property
    def relative_error(self) -> float:
        """The squared error as a share of the float tensor's power; what is exact has none."""
        if self.is_broken:
            return math.inf
        return 0.0 if self.error == 0.0 else self.error / self.exact if self.exact > 0 else math.inf

    def fidelity(self, name: str) -> OutputFidelity:
        meter = FidelityMeter(
            name, self.dot, self.exact, self.quantized, self.error, self.max_error, self.is_broken, _has_classes=False
        )
        return meter.result()


def pair_sums(exact: Array, quantized: Array) -> Sums:
    """Of one tensor of one sample.

    >>> pair_sums(np.array([3.0, 4.0]), np.array([3.0, 3.0])).relative_error
    0.04
    """
    y, z = _flat(exact), _flat(quantized)
    total = np.zeros(5)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, y.size, STRETCH):
            a, b = y[start : start + STRETCH], z[start : start + STRETCH]
            e = b - a
            largest = max(float(e.max()), -float(e.min()))
            total[:4] += (a @ b, a @ a, b @ b, e @ e)
            total[4] = max(total[4], largest) if largest == largest else math.nan
    if not np.isfinite(total).all():
        return _careful_sums(y, z)
    return Sums(*total.tolist())


def _careful_sums(y: Array, z: Array) -> Sums:
    """Where something is not finite, or float32 is too small for the squares."""
    usable = np.isfinite(y)
    a, b = y[usable].astype(np.float64), z[usable].astype(np.float64)
    if not np.isfinite(b).all():
        return Sums(is_broken=True)
    e = b - a
    return Sums(float(a @ b), float(a @ a), float(b @ b), float(e @ e), float(np.abs(e).max(initial=0.0)))


@dataclass(frozen=True, eq=False)
class ChannelSums:
    """y.z, y.y and z.z for every channel."""

    dot: Array
    exact: Array
    quantized: Array

    def __add__(self, other: ChannelSums) -> ChannelSums:
        return ChannelSums(self.dot + other.dot, self.exact + other.exact, self.quantized + other.quantized)


def channel_sums(exact: Array, quantized: Array, axis: int) -> ChannelSums:
    y, z = (np.moveaxis(each, axis, 0).reshape(each.shape[axis], -1) for each in (exact, quantized))
    y, z = y.astype(np.float64), z.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return ChannelSums(*(np.einsum("ci,ci->c", a, b) for a, b in ((y, z), (y, y), (z, z))))


def _flat(array: Array) -> Array:
    kind = np.float64 if array.dtype == np.float64 else np.float32
    return np.ascontiguousarray(array, kind).reshape(-1)
