"""Statistics of channels from which the error of quantizing them can be estimated.

    with FloatRunner(model, wanted) as runner:
        found = survey(runner, {name: ChannelMoments(axis) for name, axis in wanted.items()}, samples)
    statistics = {name: each.statistics for name, each in found.items()}

How far a value may lie beyond those that were seen: leave out the sample with the largest magnitude of a channel, and
it exceeds the others by the difference between the largest and the second largest sample. For an exponential law of
scale b, the mean square of that difference is 2 b^2; the channels together give

    excess^2 = mean over channels of ((largest - second) / largest)^2 / 2

With one sample there is no second; then an exponential law is assumed whose largest value of `count` was met, which has
the scale largest / log(count).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.equalization.smooth import ChannelStatistics
from quark.onnx.calibrate.survey import ChannelExtremes

Reaches = NDArray[np.float64]


class ChannelMoments:
    """Extremes, mean squares and the largest samples of every channel, counted along `axis`."""

    is_mergeable = True

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.count = 0  # values of a channel
        self._all = ChannelExtremes(axis)
        self._sample = ChannelExtremes(axis)  # of the present one
        self._squares: NDArray[np.float64] = np.zeros(0)
        self._largest: list[Reaches] = []  # the reach of every channel in its two largest samples, or in fewer

    @property
    def statistics(self) -> ChannelStatistics:
        """What was found; of no channels where nothing was observed."""
        mean_square = self._squares / max(self.count, 1)
        return ChannelStatistics(self._all.lowest, self._all.highest, mean_square, self.count, self._excess())

    def observe(self, x: NDArray[Any]) -> None:
        if not x.size:
            return
        self._sample.observe(x)
        axis = self.axis % x.ndim
        lines = x.reshape(math.prod(x.shape[:axis]), x.shape[axis], -1).astype(np.float32, copy=False)
        squares = np.einsum("acb,acb->c", lines, lines).astype(np.float64)
        self._squares = self._squares + squares if self._squares.size else squares
        self.count += x.size // x.shape[axis]

    def end_of_sample(self) -> None:
        if self._sample.lowest.size:
            self._all.merge(self._sample)
            self._largest = _two_largest([*self._largest, self._sample.reach.astype(np.float64)])
            self._sample = ChannelExtremes(self.axis)

    def merge(self, other: ChannelMoments) -> None:
        if not other.count:
            return
        self._all.merge(other._all)
        self._squares = self._squares + other._squares if self._squares.size else other._squares
        self._largest = _two_largest([*self._largest, *other._largest])
        self.count += other.count

    def _excess(self) -> float:
        if len(self._largest) < 2:
            return 1 / math.log(max(self.count, 3))
        largest, second = self._largest
        is_live = largest > 0
        if not is_live.any():
            return 0.0
        return math.sqrt(float(np.mean(np.square(1 - second[is_live] / largest[is_live]))) / 2)


def _two_largest(reaches: list[Reaches]) -> list[Reaches]:
    """Of every channel, the largest first."""
    return list(np.sort(np.stack(reaches), axis=0)[::-1][:2])
