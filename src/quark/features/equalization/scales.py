"""Cross-layer equalization: channels of neighbouring layers are given ranges of the same size.

Between two layers with only Relu or similar operators, channel i can be divided by any s_i > 0 and multiplied again:

    W1[i] / s_i,   b1_i / s_i,   W2[:, i] * s_i        leave the function as it is

With r1_i and r2_i the largest magnitudes of W1[i] and W2[:, i], s_i = sqrt(r1_i r2_i) / r2_i gives both the range
sqrt(r1_i r2_i). Through a layer that maps each channel to itself, a depthwise convolution, the chain is solved at once:

    r_0 -> d_1 -> ... -> r_n:   every one becomes g, the geometric mean;   s_1 = r_0 / g,   s_2 = s_1 d_1 / g, ...

which for three layers is the cube-root form of the paper (arXiv 1906.04721), and for two the line above.

Several tensors on one side, as the writers and the readers of a residual stream: a quantizer with one scale for a
tensor cares how large a channel is beside the largest of the same tensor. `combine` therefore compares the ranges
relative to each tensor's largest, takes the larger, and brings the result to the geometric mean of the tensors' levels;
one tensor alone keeps its ranges.

A `Rescaling` is one set of channels: the weights whose outputs it divides, the weights whose inputs it multiplies, and
the scales so far. Sets that a depthwise layer alone connects are a chain, which `sweep` solves at once.

Channels in front of a Clip(0, c) that stays as it is can only be rescaled so far. Divided by s, a channel meets the
bound at c * s of its old values. Let [l, m] be its values before the Clip on calibration data, and t = m + (m - l) / 10
what it may reach elsewhere:

    m >= 0.98 c     the bound is at work: s = 1
    m <  0.98 c     it never was: any s with t / s <= c leaves it so, and any s >= 1

so that the function stays on the calibration data, and nearly so elsewhere. The margin is a part of the whole range: a
channel that is rarely positive has a small m that says little. Some networks hardly ever reach their bounds, and could
do without. In others the bound is a part of what they compute, and a sample of images does not show all of the channels
that it works in: there the channels are to be left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

MAX_SWEEPS = 300  # iterations of "until it settles"
AT_WORK_FROM = 0.98  # share of the bound of a Clip
MARGIN = 0.1  # share of the range
MAX_AT_WORK = 0.05  # share of the channels
# No scale goes further: a channel that is almost dead would take its activations out of the range of the type.
_FURTHEST = {"float16": 2.0**5}
_FURTHEST_OTHERWISE = 2.0**16
# share of the bias that counts beside the weights: its input is 1, theirs are activations, which go to several
BIAS_SHARE = 0.25


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
    levels = [float(magnitudes.max(initial=0)) for magnitudes in ranges]
    alive = [(magnitudes, level) for magnitudes, level in zip(ranges, levels, strict=True) if level > 0]
    if not alive:
        return np.zeros_like(ranges[0])
    if len(alive) == 1:
        return alive[0][0]
    relative: Array = np.max([magnitudes / level for magnitudes, level in alive], axis=0)
    return relative * float(np.exp(np.mean([np.log(level) for _, level in alive])))


def relative_to(is_held: Array, ranges: Array) -> Array:
    """The ranges beside the largest of the channels that are held; as they are where none is.

    With one scale for a tensor, what is held sets the step of the others. On both sides of a channel the same distance
    to that is wanted, and not the same number.
    """
    level = float(ranges[is_held].max(initial=0))
    return ranges / level if level > 0 else ranges


def scales_towards_mean(first: Array, rest: Sequence[Array]) -> Array:
    """The divisors of `first`'s channels that give them the geometric mean of the chain, which `rest` continues. 1 for
    a channel that is dead, that is zero or not finite, in any of them."""
    chain = [first, *rest]
    with np.errstate(all="ignore"):
        scales = first / np.exp(np.mean([np.log(link) for link in chain], axis=0))
    is_alive = np.all([link > 0 for link in chain], axis=0) & np.isfinite(scales) & (scales > 0)
    return np.where(is_alive, scales, 1.0)


@dataclass(frozen=True)
class Ranges:
    """What one set of channels is found from. `sources` are the weights that write it, each with the largest magnitude
    of the bias by channel, `added` those of other constants. `sinks` are the weights that read it, with the places that
    a channel has there. `largest` is the greatest number of the type, `type_name` its name."""

    sources: Sequence[tuple[ChannelMagnitudes, Array | None]]
    sinks: Mapping[ChannelMagnitudes, int]
    added: Sequence[Array] = field(default_factory=tuple)
    type_name: str = "float32"
    largest: float = float(np.finfo(np.float32).max)


class Rescaling:
    """One set of channels: its scales so far, between `lowest` and `highest`, and its ranges by now."""

    def __init__(self, count: int, ranges: Ranges, has_appended_bias: bool = True) -> None:
        self.scales: Array = np.ones(count)
        self._ranges, self._has_appended_bias = ranges, has_appended_bias
        # layers that share a weight hold one, which is divided once
        self._divided = list(dict.fromkeys(weight for weight, _ in ranges.sources))
        self.lowest, self.highest = self._room(count)

    @property
    def is_changed(self) -> bool:
        return bool((self.scales != 1).any())

    def limit(self, lowest: Array, highest: Array) -> None:
        """Limit the scales to these bounds; a channel whose two limits are equal is fixed."""
        self.lowest, self.highest = np.maximum(self.lowest, lowest), np.minimum(self.highest, highest)

    def source_ranges(self) -> Array:
        """The range of every channel in the layers that write it."""
        ranges = []
        for weight, bias in self._ranges.sources:
            ranges.append(weight.of_outputs())
            if self._has_appended_bias and bias is not None:
                ranges[-1] = np.maximum(ranges[-1], bias / weight.divided * BIAS_SHARE)
        if self._has_appended_bias:
            added = (magnitudes / self.scales * BIAS_SHARE for magnitudes in self._ranges.added)
            ranges[0] = np.max([ranges[0], *added], axis=0)
        return combine(ranges)

    def sink_ranges(self) -> Array:
        """The range of every channel in the layers that read it."""
        return combine(
            [weight.of_inputs().reshape(-1, width).max(axis=1) for weight, width in self._ranges.sinks.items()]
        )

    def scale(self, wanted: Array) -> Array:
        """Scale by the requested factors within the limits, and return the actual ones."""
        total = np.clip(self.scales * wanted, self.lowest, self.highest)
        scales: Array = total / self.scales
        self.scales = total
        for weight in self._divided:
            weight.divide_outputs(scales)
        for weight, width in self._ranges.sinks.items():
            weight.multiply_inputs(np.repeat(scales, width))
        return scales

    def beside_held(self, ranges: Array) -> Array:
        """The ranges relative to those of channels that are held."""
        return relative_to(np.asarray(self.lowest == self.highest), ranges)

    def _room(self, count: int) -> tuple[Array, Array]:
        """The bounds of the scales: the divided numbers have to stay in the range of their type."""
        furthest = _FURTHEST.get(self._ranges.type_name, _FURTHEST_OTHERWISE)
        biases = [bias for _, bias in self._ranges.sources if bias is not None]
        reach = np.max([*(weight.of_outputs() for weight in self._divided), *biases, *self._ranges.added], axis=0)
        return np.clip(reach / (self._ranges.largest / 2), 1 / furthest, 1.0), np.full(count, furthest)


Set = TypeVar("Set", bound=Rescaling)


def sweep(chains: Sequence[Sequence[Rescaling]], weight_threshold: float) -> float:
    """Equalize every chain once, in their order; the mean change of a scale, as a factor less one. A channel whose
    ranges add up to less than the threshold stays as it is."""
    changes = [np.zeros(0)]
    for chain in chains:
        first, behind = chain[0].source_ranges(), [link.sink_ranges() for link in chain]
        for index, link in enumerate(chain):
            rest = [later.beside_held(ranges) for later, ranges in zip(chain[index:], behind[index:], strict=True)]
            wanted = scales_towards_mean(link.beside_held(first), rest)
            is_small = first + np.sum(behind[index:], axis=0) < weight_threshold
            scales = link.scale(np.where(is_small, 1.0, wanted))
            changes.append(np.abs(scales - 1))
            first = behind[index] * scales  # if the chain continues, the layer behind is depthwise
    every = np.concatenate(changes)
    return float(every.mean()) if every.size else 0.0


def chains_of(sets: Sequence[Set], following: Mapping[Set, Set]) -> list[list[Set]]:
    """The sets in rows, each behind the one that it follows; most are one or two long."""
    chains = []
    for start in (start for start in sets if start not in following.values()):
        chain = [start]
        while chain[-1] in following:
            chain.append(following[chain[-1]])
        chains.append(chain)
    placed = {link for chain in chains for link in chain}
    return chains + [[left] for left in sets if left not in placed]  # a ring of depthwise layers has no start


def largest_of_pairs(weight: Array) -> Array:
    """The largest magnitude of each pair of channels, of a weight by group, output, input, and the rest."""
    if weight.shape[3] == 1:
        return np.asarray(np.abs(weight[..., 0]))
    return np.asarray(np.maximum(weight.max(axis=3), -weight.min(axis=3)))


def limits_of_clip(bottom: Array, top: Array, bound: float) -> tuple[Array, Array]:
    """The least and the largest scale of every channel; the same number where a channel has to stay."""
    bottom, top = np.asarray(bottom, np.float64), np.asarray(top, np.float64)
    lowest = np.minimum(1.0, (top + (top - bottom) * MARGIN) / bound)
    is_at_work = top >= bound * AT_WORK_FROM
    return np.where(is_at_work, 1.0, np.maximum(lowest, 0.0)), np.where(is_at_work, 1.0, np.inf)


def share_at_work(top: Array, bound: float) -> float:
    """The share of channels that reach the bound; above MAX_AT_WORK they are all to be left."""
    return float((np.asarray(top, np.float64) >= bound * AT_WORK_FROM).mean())
