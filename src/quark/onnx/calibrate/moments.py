"""Statistics of channels from which the error of quantizing them can be estimated.

    with FloatRunner(model, wanted) as runner:
        found = survey(runner, {name: ChannelMoments(axis) for name, axis in wanted.items()}, samples)
    statistics = {name: each.statistics for name, each in found.items()}

How far a value beyond those seen may lie shows in how the largest magnitudes of the samples differ: with n samples, the
next one exceeds all of them once in n + 1 times, and largest values follow Gumbel's law, whose scale b is

    b^2 = 6/pi^2 var(largest of each sample)

the excess being b on the average. Few samples say little of a variance. So one more is assumed, with the scale that an
exponential law has whose largest value of `count` is r: b = r / log(count).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.equalization.smooth import ChannelStatistics
from quark.onnx.calibrate.survey import ChannelExtremes


class ChannelMoments:
    """Extremes, mean squares and the spread of the samples' largest magnitudes, for every channel along `axis`."""

    is_mergeable = True

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.samples = 0
        self.count = 0  # values of a channel
        self._all = ChannelExtremes(axis)
        self._sample = ChannelExtremes(axis)  # of the present one
        self._squares: NDArray[np.float64] = np.zeros(0)
        self._reaches: NDArray[np.float64] = np.zeros((2, 0))  # sums of the samples' reaches, and of their squares

    @property
    def statistics(self) -> ChannelStatistics:
        """What was found; of no channels where nothing was observed."""
        lowest, highest = self._all.lowest, self._all.highest
        mean_square = self._squares / max(self.count, 1)
        return ChannelStatistics(lowest, highest, mean_square, self._excess(), self.count)

    def observe(self, x: NDArray[Any]) -> None:
        self._sample.observe(x)
        if not x.size:
            return
        axis = self.axis % x.ndim
        lines = x.reshape(math.prod(x.shape[:axis]), x.shape[axis], -1).astype(np.float32, copy=False)
        squares = np.einsum("acb,acb->c", lines, lines).astype(np.float64)
        self._squares = _sum(self._squares, squares)
        self.count += x.size // x.shape[axis]

    def end_of_sample(self) -> None:
        if self._sample.lowest.size:
            reach = self._sample.reach.astype(np.float64)
            self._reaches = _sum(self._reaches, np.stack([reach, np.square(reach)]))
            self.samples += 1
            self._all.merge(self._sample)
            self._sample = ChannelExtremes(self.axis)

    def merge(self, other: ChannelMoments) -> None:
        if other.count:
            self._all.merge(other._all)
            self._squares = _sum(self._squares, other._squares)
            self._reaches = _sum(self._reaches, other._reaches)
            self.count += other.count
            self.samples += other.samples

    def _excess(self) -> NDArray[np.float64]:
        n = max(self.samples, 1)
        mean, square = self._reaches / n
        variance = np.maximum(square - np.square(mean), 0) * n  # times n - 1, the number of free differences
        assumed = self._all.reach.astype(np.float64) / math.log(max(self.count, 3))
        return np.asarray(np.sqrt((6 / math.pi**2 * variance + np.square(assumed)) / n))


def _sum(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    return first + second if first.size else second
