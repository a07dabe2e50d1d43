"""The algebra of SmoothQuant: scales that move the difficulty of quantizing from activations to weights.

A layer sums over its input channels j. Dividing channel j of the input by s_j > 0 and multiplying row j of the weight
by it changes nothing in float:

    y_k = sum_j x_j w_jk = sum_j (x_j / s_j) (s_j w_jk)        s_j = r_j^alpha / max_k|w_jk|^(1 - alpha)

where r_j is the largest |x_j|. For an input with spikes it is more, unless alpha is given
(`ChannelStatistics.usable_reach`). alpha 1 makes all input channels equally wide, alpha 0 all rows of the weight. Only
ratios count, so s is scaled to a geometric mean of 1. A channel without input or without weight is left at 1. One that
is quieter than 1/1024 of the loudest counts as that loud, since 8 bits do not resolve it anyway. So no two scales are
further apart than that.

The benefit is estimated. Rounding with a step d has the mean square error d^2/12, or the value's own mean square if
that is smaller: small values become 0. Independent errors add up, over j and k:

    input    one step d for all channels: the width of all x_j/s_j over 255; each error is passed on by its row
             A = sum min(d^2/12, e_j/s_j^2) s_j^2 w_jk^2              e_j: mean square of x_j
    weight   a step d_k = 2 max_j(s_j |w_jk|) / 255 for each output, or the largest for all, times the energy of x
             B = sum min(d_k^2/12, s_j^2 w_jk^2) e_j/s_j^2
    beyond   values that the samples did not show: one in n exceeds r_j, by b_j = excess r_j on average, with an
             exponential distribution (exp(-u/b_j)). It is clipped at s_j D, where D = max_j r_j/s_j
             C = sum 2 b_j^2/n exp(-(s_j D - r_j)/b_j) w_jk^2
             n counts 8 values of each sample, if it has more: those of one sample are alike (one voice, one subject),
             and where another sample exceeds what was seen, it often does so many times
    signal   P = sum e_j w_jk^2

The estimated error is (A + B + C) / P; layers that share an input get the mean of their errors. Raising alpha lowers A
and raises B and C: without smoothing only the loudest channel fills the range, with alpha 1 all of them do, and may
exceed it. Hence few samples call for a lower alpha. If fewer than 100 values of a channel were seen, C is a guess, and
counts against smoothing only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.onnx.calibrate.survey import ChannelExtremes

Array = NDArray[Any]

ALPHAS = tuple(step / 20 for step in range(21))  # candidates of the search
SPREAD = 1024.0  # no channel counts as quieter than 1/SPREAD of the loudest
STEPS = 255  # number of steps in 8 bits
SPIKE = 4.0  # ratio of a channel's size in the sample of its spike to its size in all other samples
SPIKY = 0.004  # share of channels with a spike from which on others are expected
WIDE = 0.99  # quantile of the channels' magnitudes that an unseen spike may have
MIN_COUNT = 100  # values of a channel that show where its range ends
FRESH = 8  # values of a channel in one sample that count as new information about its range
MAX_OUTPUTS = 256  # outputs of a group that the estimate averages over


@dataclass(frozen=True)
class Steps:
    """The choice of quantization steps: whether weights have one for each output channel, and whether the range of the
    input is symmetric around zero."""

    is_per_channel: bool = True
    is_symmetric: bool = False


@dataclass(frozen=True, eq=False)
class ChannelStatistics:
    """Statistics of a layer's input: extremes and mean square of each channel, and the number of values seen of each.
    `excess` is by how much a larger value is expected to exceed the largest seen, as a share of that. `spikes` is the
    share of channels that are far larger in one sample than in all others. `samples` are those that the values came
    from, counting each item of a batch; by default, every value is from a sample of its own."""

    lowest: Array
    highest: Array
    mean_square: Array
    count: int
    excess: float
    spikes: float = 0.0
    samples: int | None = None

    @property
    def fresh_count(self) -> int:
        """The number of values of a channel that tell something new about its range."""
        return self.count if self.samples is None else min(self.count, FRESH * self.samples)

    @property
    def reach(self) -> Array:
        """The largest magnitude of every channel."""
        return np.asarray(np.maximum(-self.lowest, self.highest), np.float64)

    @property
    def usable_reach(self) -> Array:
        """The magnitudes that scales are computed from. The result of GELU has spikes: channels that are quiet until a
        token comes that they are for, and then as large as the widest. Where the samples show such channels, no channel
        counts as quieter than most of the wide ones, so that the next one is not clipped."""
        reach = self.reach
        if self.spikes < SPIKY or not reach.any():
            return reach
        return np.where(reach > 0, np.maximum(reach, np.quantile(reach, WIDE)), reach)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.reach).all() and np.isfinite(self.mean_square).all())

    def with_other(self, other: ChannelStatistics) -> ChannelStatistics:
        """The statistics of two tensors together, which get the same scales."""
        count = self.count + other.count
        squares = self.mean_square * self.count + other.mean_square * other.count
        return ChannelStatistics(
            np.minimum(self.lowest, other.lowest),
            np.maximum(self.highest, other.highest),
            squares / max(count, 1),
            count,
            max(self.excess, other.excess),
            max(self.spikes, other.spikes),
            None if self.samples is None or other.samples is None else self.samples + other.samples,
        )


class ChannelMoments:
    """Gathers the statistics of a layer's input sample by sample. Channels are counted along `axis`.

    How far unseen values may exceed the seen ones is estimated by leaving out the sample with the largest magnitude of
    a channel: it exceeds the others by the difference between the largest and the second largest sample. For an
    exponential distribution of scale b, the mean square of that difference is 2 b^2. Over all channels this is, with
    wide channels counting more,

        excess^2 = sum over channels of (largest - second)^2 / (2 sum of largest^2)

    With one sample there is no second. Then an exponential distribution is assumed whose largest value out of `count`
    was seen, which has the scale largest / log(count).
    """

    is_mergeable = True

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.count = 0  # values seen of each channel
        self.samples = 0  # items of all batches
        self._all = ChannelExtremes(axis)
        self._sample = ChannelExtremes(axis)  # statistics of the current sample
        self._squares: Array = np.zeros(0)
        self._largest: list[Array] = []  # reach of every channel in its largest samples, two at most

    @property
    def statistics(self) -> ChannelStatistics:
        """The statistics so far, without any channel if nothing was observed."""
        mean_square = self._squares / max(self.count, 1)
        excess, spikes = 1 / math.log(max(self.count, 3)), 0.0
        if len(self._largest) == 2:
            largest, second = self._largest
            is_live = largest > 0
            spikes = float(np.mean(second[is_live] < largest[is_live] / SPIKE)) if is_live.any() else 0.0
            squares = float(np.square(largest).sum())
            excess = math.sqrt(float(np.square(largest - second).sum()) / squares / 2) if squares > 0 else 0.0
        samples = self.samples if len(self._largest) == 2 else None
        return ChannelStatistics(self._all.lowest, self._all.highest, mean_square, self.count, excess, spikes, samples)

    def observe(self, x: Array) -> None:
        if not x.size:
            return
        self._sample.observe(x)
        axis = self.axis % x.ndim
        lines = x.reshape(math.prod(x.shape[:axis]), x.shape[axis], -1).astype(np.float32, copy=False)
        squares = np.einsum("acb,acb->c", lines, lines).astype(np.float64)
        self._squares = self._squares + squares if self._squares.size else squares
        self.count += x.size // x.shape[axis]
        self.samples += x.shape[0] if axis else 1

    def end_of_sample(self) -> None:
        if self._sample.lowest.size:
            self._all.merge(self._sample)
            self._largest = _two_largest(*self._largest, self._sample.reach.astype(np.float64))
            self._sample = ChannelExtremes(self.axis)

    def merge(self, other: ChannelMoments) -> None:
        if not other.count:
            return
        self._all.merge(other._all)
        self._squares = self._squares + other._squares if self._squares.size else other._squares
        self._largest = _two_largest(*self._largest, *other._largest)
        self.count += other.count
        self.samples += other.samples


def _two_largest(*reaches: Array) -> list[Array]:
    """The two largest values of every channel, the largest first."""
    return list(np.sort(np.stack(reaches), axis=0)[::-1][:2])


@dataclass(frozen=True, eq=False)
class LayerWeight:
    """What smoothing needs to know about a weight. `reach` is the largest magnitude of each input channel. `peak` and
    `square` are the largest magnitude and the sum of squares over the taps of a kernel (a matrix has one tap), for
    weights divided by the largest of them."""

    reach: Array  # [input channels]
    peak: Array  # [groups, inputs of a group, outputs of a group], with MAX_OUTPUTS outputs at most
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
        sampled = np.abs(weight[:, :, :: -(-outputs // MAX_OUTPUTS)].astype(np.float32))
        sampled /= max(float(reach.max(initial=0)), np.finfo(np.float32).tiny)
        return cls(reach, sampled.max(axis=3), np.square(sampled).sum(axis=3), weight.shape[3])


@dataclass(frozen=True, eq=False)
class Smoothing:
    """Scales of the input channels, with the estimated error before and after."""

    alpha: float
    scales: Array
    error: float
    error_before: float

    @property
    def gain_db(self) -> float:
        """The decrease of the estimated error; negative if it increases."""
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
        live = (np.asarray(reach, np.float64)[is_live] for reach in (activation_reach, weight_reach))
        x, w = (np.log2(np.maximum(reach, reach.max() / SPREAD)) for reach in live)
        exponent = alpha * x - (1 - alpha) * w
        scales[is_live] = np.exp2(exponent - exponent.mean())
    return scales


def estimated_error(layers: Sequence[LayerWeight], statistics: ChannelStatistics, scales: Array, steps: Steps) -> float:
    """The mean square error of 8 bits at the layers' outputs with these scales, over the mean square of the outputs."""
    bound = float((statistics.reach / scales).max(initial=0))
    lowest, highest = (statistics.lowest / scales).min(initial=0), (statistics.highest / scales).max(initial=0)
    step = (2 * bound if steps.is_symmetric else float(highest - lowest)) / STEPS
    rounded = np.minimum(step**2 / 12 * np.square(scales), statistics.mean_square)
    beyond = statistics.excess * statistics.reach
    with np.errstate(over="ignore", under="ignore"):  # without excess the room is infinite
        room = np.maximum(bound * scales - statistics.reach, 0) / np.maximum(beyond, np.finfo(np.float64).tiny)
        clipped = 2 * np.square(beyond) * np.exp(-room) / max(statistics.fresh_count, 1)
    errors = [_layer_error(layer, rounded + clipped, statistics.mean_square, scales, steps) for layer in layers]
    return float(np.mean(errors))


def _layer_error(layer: LayerWeight, passed_on: Array, energy: Array, scales: Array, steps: Steps) -> float:
    """The same for one layer; `passed_on` is the mean square error of each input channel."""
    groups, inputs, _ = layer.peak.shape
    unit = max(float(energy.max(initial=0)), np.finfo(np.float64).tiny)  # keeps float32 from overflowing
    n, e, s = (
        vector.reshape(groups, inputs, 1).astype(np.float32) for vector in (passed_on / unit, energy / unit, scales)
    )
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
    """The scales for layers that read the same input, with that alpha; None takes the one with the least estimated
    error."""
    reach = np.max([layer.reach for layer in layers], axis=0)
    usable = statistics.usable_reach if alpha is None else statistics.reach
    known = statistics if statistics.count >= MIN_COUNT else replace(statistics, excess=0.0)
    before = estimated_error(layers, known, np.ones(reach.shape), steps)
    candidates = []
    for exponent in ALPHAS if alpha is None else (alpha,):
        scales = smoothing_scales(usable, reach, exponent)
        candidates.append(Smoothing(exponent, scales, estimated_error(layers, statistics, scales, steps), before))
    return min(candidates, key=lambda smoothing: smoothing.error)
