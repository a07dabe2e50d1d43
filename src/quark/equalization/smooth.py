"""SmoothQuant: move the difficulty of quantizing from activations to weights, where it can be borne.

A layer sums over its input channels j. Dividing channel j of the input by s_j > 0 and multiplying row j of the weight
by it changes nothing in float:

    y_k = sum_j x_j w_jk = sum_j (x_j / s_j) (s_j w_jk)        s_j = r_j^alpha / max_k|w_jk|^(1 - alpha)

where r_j is the largest |x_j|. alpha 1 makes all input channels equally wide, alpha 0 all rows of the weight. Only
ratios count, so s is scaled to a geometric mean of 1. A channel without input or without weight is left at 1. One that
is quieter than 1/1024 of the loudest counts as that loud: 8 bits do not see it anyway. Hence no two scales are further
apart than that.

Whether it helps is estimated. Rounding with a step d has the mean square error d^2/12, or the value's own mean square
where that is less: small values become 0. Independent errors add up, over j and k:

    input    one step d for all channels: the width of all x_j/s_j over 255; each error is passed on by its row
             A = sum min(d^2/12, e_j/s_j^2) s_j^2 w_jk^2              e_j: mean square of x_j
    weight   a step d_k = 2 max_j(s_j |w_jk|) / 255 for each output, or the largest for all, met by the energy of x
             B = sum min(d_k^2/12, s_j^2 w_jk^2) e_j/s_j^2
    beyond   what the samples did not show: one value in as many as were seen exceeds r_j, by b_j = excess r_j on the
             average, and the more rarely the further (exp(-u/b_j)). It is cut at s_j D, where D = max_j r_j/s_j
             C = sum 2 b_j^2/count exp(-(s_j D - r_j)/b_j) w_jk^2
    signal   P = sum e_j w_jk^2

The estimated error is (A + B + C) / P; for layers that share an input, the mean of theirs. Raising alpha lowers A and
raises B, and C as well: without smoothing only the loudest channel fills the range, with alpha 1 each of them does, and
may leave it. That is why few samples call for a lower alpha. Where fewer than 100 values of a channel were seen, what
lies beyond is a guess, and counts against smoothing only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.errors import InvalidValueError

Array = NDArray[Any]

ALPHAS = tuple(step / 20 for step in range(21))  # what the search tries
SPREAD = 1024.0  # no channel counts as quieter than this part of the loudest
STEPS = 255  # of 8 bits
MIN_COUNT = 100  # values of a channel that say where it ends
MAX_OUTPUTS = 256  # of a group, that the estimate looks at: it is a mean over them


@dataclass(frozen=True)
class Steps:
    """How steps are found: whether each output channel has its own for its weights, and whether the input's range is
    as wide on both sides of zero."""

    is_per_channel: bool = True
    is_symmetric: bool = False


@dataclass(frozen=True, eq=False)
class ChannelStatistics:
    """What is known of a layer's input: the extremes and the mean square of each channel, how many of its values were
    seen, and by what part of it (`excess`) one that exceeds the largest of them may be expected to do so."""

    lowest: Array
    highest: Array
    mean_square: Array
    count: int
    excess: float

    @property
    def reach(self) -> Array:
        """The largest magnitude."""
        return np.asarray(np.maximum(-self.lowest, self.highest), np.float64)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.reach).all() and np.isfinite(self.mean_square).all())

    def with_other(self, other: ChannelStatistics) -> ChannelStatistics:
        """Of two tensors that get the same scales."""
        count = self.count + other.count
        squares = self.mean_square * self.count + other.mean_square * other.count
        return ChannelStatistics(
            np.minimum(self.lowest, other.lowest),
            np.maximum(self.highest, other.highest),
            squares / max(count, 1),
            count,
            max(self.excess, other.excess),
        )


@dataclass(frozen=True, eq=False)
class LayerWeight:
    """What smoothing needs of a weight: the largest magnitude of every input channel's, and for the input channels and
    outputs of each group the largest magnitude and the sum of squares over the taps of a kernel (of a matrix: 1), where
    the largest of all weights counts as 1."""

    reach: Array  # [input channels]
    peak: Array  # [groups, inputs of a group, outputs of a group], of MAX_OUTPUTS at most
    square: Array
    taps: int = 1

    @classmethod
    def of(cls, weight: Array) -> LayerWeight:
        """From a weight arranged as [groups, inputs of a group, outputs of a group, taps].

        >>> LayerWeight.of(np.ones((1, 3, 2, 9), np.float32)).reach
        array([1., 1., 1.], dtype=float32)
        """
        if weight.ndim != 4:
            raise InvalidValueError(f"a weight of {weight.ndim} dimensions: expected [groups, inputs, outputs, taps]")
        reach = np.abs(weight).max(axis=(2, 3)).astype(np.float32).reshape(-1)
        outputs = weight.shape[2]
        some = np.abs(weight[:, :, :: -(-outputs // MAX_OUTPUTS)].astype(np.float32))
        some /= max(float(reach.max(initial=0)), np.finfo(np.float32).tiny)
        return cls(reach, some.max(axis=3), np.square(some).sum(axis=3), weight.shape[3])


@dataclass(frozen=True, eq=False)
class Smoothing:
    """Scales of the input channels, and what they do to the estimated error."""

    alpha: float
    scales: Array
    error: float
    error_before: float

    @property
    def gain_db(self) -> float:
        """By how much the estimated error falls; negative where it rises."""
        if self.error_before <= 0 or self.error <= 0:
            return 0.0
        return float(10 * np.log10(self.error_before / self.error))


def smoothing_scales(activation_reach: Array, weight_reach: Array, alpha: float) -> Array:
    """s_j of the formula above, with a geometric mean of 1; 1 for dead channels.

    >>> smoothing_scales(np.array([16.0, 1.0, 0.0]), np.array([1.0, 1.0, 1.0]), 0.5)
    array([2. , 0.5, 1. ])
    """
    is_live = (activation_reach > 0) & (weight_reach > 0)
    scales = np.ones(is_live.shape)
    if is_live.any():
        x, w = (_logarithm(np.asarray(each, np.float64)[is_live]) for each in (activation_reach, weight_reach))
        exponent = alpha * x - (1 - alpha) * w
        scales[is_live] = np.exp2(exponent - exponent.mean())
    return scales


def _logarithm(reach: Array) -> Array:
    return np.asarray(np.log2(np.maximum(reach, reach.max() / SPREAD)))


def estimated_error(layers: Sequence[LayerWeight], statistics: ChannelStatistics, scales: Array, steps: Steps) -> float:
    """The mean square error of 8 bits at the layers' outputs over their mean square, with these scales."""
    bound = float((statistics.reach / scales).max(initial=0))
    lowest, highest = (statistics.lowest / scales).min(initial=0), (statistics.highest / scales).max(initial=0)
    step = (2 * bound if steps.is_symmetric else float(highest - lowest)) / STEPS
    rounded = np.minimum(step**2 / 12 * np.square(scales), statistics.mean_square)
    passed_on = rounded + _cut(statistics, bound * scales)
    return float(np.mean([_layer_error(each, passed_on, statistics.mean_square, scales, steps) for each in layers]))


def _cut(statistics: ChannelStatistics, bound: Array) -> Array:
    """The mean square of what exceeds the bound of its channel."""
    beyond = statistics.excess * statistics.reach
    with np.errstate(over="ignore", under="ignore"):  # to no excess at all, any room is endless
        room = np.maximum(bound - statistics.reach, 0) / np.maximum(beyond, np.finfo(np.float64).tiny)
        return np.asarray(2 * np.square(beyond) * np.exp(-room) / max(statistics.count, 1))


def _layer_error(layer: LayerWeight, passed_on: Array, energy: Array, scales: Array, steps: Steps) -> float:
    groups, inputs, _ = layer.peak.shape
    unit = max(float(energy.max(initial=0)), np.finfo(np.float64).tiny)  # keeps float32 from overflowing
    n, e, s = (each.reshape(groups, inputs, 1).astype(np.float32) for each in (passed_on / unit, energy / unit, scales))
    signal = float((e * layer.square).sum())
    if signal <= 0:
        return 0.0
    if steps.is_per_channel:
        bound = (layer.peak * s).max(axis=1, keepdims=True)
    else:
        bound = (layer.reach * scales).max() / layer.reach.max()
    step = 2 * bound / STEPS
    rounding = np.minimum(np.square(step / s) * (layer.taps / 12), layer.square)
    return float((n * layer.square).sum() + (rounding * e).sum()) / signal


def find_smoothing(
    layers: Sequence[LayerWeight], statistics: ChannelStatistics, alpha: float | None, steps: Steps
) -> Smoothing:
    """The scales for that alpha, or for the one with the least estimated error where it is None, for layers that read
    the same input."""
    reach = np.max([layer.reach for layer in layers], axis=0)
    known = statistics if statistics.count >= MIN_COUNT else replace(statistics, excess=0.0)
    before = estimated_error(layers, known, np.ones(reach.shape), steps)
    found = []
    for each in ALPHAS if alpha is None else (alpha,):
        scales = smoothing_scales(statistics.reach, reach, each)
        found.append(Smoothing(each, scales, estimated_error(layers, statistics, scales, steps), before))
    return min(found, key=lambda smoothing: smoothing.error)
