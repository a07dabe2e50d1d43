"""Cross-layer equalization: channels of neighbouring layers are given ranges of the same size.

Between two layers with nothing but Relu and its like, channel i can be divided by any s_i > 0 and multiplied again:

    W1[i] / s_i,   b1_i / s_i,   W2[:, i] * s_i        leave the function as it is

With r1_i and r2_i the largest magnitudes of W1[i] and W2[:, i], s_i = sqrt(r1_i r2_i) / r2_i gives both the range
sqrt(r1_i r2_i). Through a layer that maps each channel to itself, a depthwise convolution, the chain is solved at once:

    r_0 -> d_1 -> ... -> r_n:   every one becomes g, the geometric mean;   s_1 = r_0 / g,   s_2 = s_1 d_1 / g, ...

which for three layers is the cube-root form of the paper (arXiv 1906.04721), and for two the line above.

Several tensors on one side, as the writers and the readers of a residual stream: a quantizer with one scale for a
tensor cares how large a channel is beside the largest of the same tensor. `combine` therefore compares the ranges
relative to each tensor's largest, takes the larger, and brings the result to the geometric mean of the tensors' levels;
one tensor alone keeps its ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

MAX_SWEEPS = 300  # of "until it settles"
BIAS_SHARE = 0.25  # of the bias counts beside the weights: its input is 1, theirs are activations, which go to several


class ChannelMagnitudes:
    """The magnitudes of one weight, by group, output channel and input channel, as its channels are rescaled.

    `divided` (by output channel) and `multiplied` (by input channel) are what has been asked for so far: the weight
    itself becomes W * multiplied / divided. The array that it is made from is written to.
    """

    def __init__(self, magnitudes: Array) -> None:
        self._now = magnitudes
        groups, outputs, inputs = magnitudes.shape
        self.divided: Array = np.ones(groups * outputs)
        self.multiplied: Array = np.ones(groups * inputs)

    def of_outputs(self) -> Array:
        """The largest magnitude of every output channel."""
        largest: Array = self._now.max(axis=2, initial=0)
        return largest.reshape(-1).astype(np.float64)

    def of_inputs(self) -> Array:
        """The largest magnitude of every input channel."""
        largest: Array = self._now.max(axis=1, initial=0)
        return largest.reshape(-1).astype(np.float64)

    def divide_outputs(self, scales: Array) -> None:
        self.divided = self.divided * scales
        groups, outputs, _ = self._now.shape
        self._now /= scales.reshape(groups, outputs, 1).astype(self._now.dtype)

    def multiply_inputs(self, scales: Array) -> None:
        self.multiplied = self.multiplied * scales
        groups, _, inputs = self._now.shape
        self._now *= scales.reshape(groups, 1, inputs).astype(self._now.dtype)


def combine(ranges: Sequence[Array]) -> Array:
    """One range for each channel out of those of several tensors; a tensor of zeros does not count."""
    levels = [float(each.max(initial=0)) for each in ranges]
    alive = [(each, level) for each, level in zip(ranges, levels, strict=True) if level > 0]
    if not alive:
        return np.zeros_like(ranges[0])
    if len(alive) == 1:
        return alive[0][0]
    relative: Array = np.max([each / level for each, level in alive], axis=0)
    return relative * float(np.exp(np.mean([np.log(level) for _, level in alive])))


def relative_to(is_held: Array, ranges: Array) -> Array:
    """The ranges beside the largest of the channels that are held; as they are where none is.

    With one scale for a tensor, what is held sets the step of the others. On both sides of a channel the same distance
    to that is wanted, and not the same number.
    """
    level = float(ranges[is_held].max(initial=0))
    return ranges / level if level > 0 else ranges


def scales_towards_mean(first: Array, rest: Sequence[Array]) -> Array:
    """What divides the channels of `first` so that they get the geometric mean of the chain, which `rest` continues.

    1 for a channel that is dead: zero, or not a number, in any of them.
    """
    chain = [first, *rest]
    with np.errstate(all="ignore"):
        scales = first / np.exp(np.mean([np.log(each) for each in chain], axis=0))
    is_alive = np.all([each > 0 for each in chain], axis=0) & np.isfinite(scales) & (scales > 0)
    return np.where(is_alive, scales, 1.0)
