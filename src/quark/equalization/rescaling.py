"""Sets of channels while their scales are found: what each layer's ranges are by now, and how far a scale may go.

A `Rescaling` is one set: the weights whose outputs it divides, the weights whose inputs it multiplies, and the scales
so far. Sets that a depthwise layer alone connects are a chain, which `sweep` solves at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from quark.equalization.cross_layer import (
    BIAS_SHARE,
    Array,
    ChannelMagnitudes,
    combine,
    relative_to,
    scales_towards_mean,
)

# No scale goes further: a channel that is almost dead would take its activations out of the range of the type.
_FURTHEST = {"float16": 2.0**5}
_FURTHEST_OTHERWISE = 2.0**16


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
        """Let no scale go below or beyond these; a channel whose two limits are the same is held."""
        self.lowest, self.highest = np.maximum(self.lowest, lowest), np.minimum(self.highest, highest)

    def source_ranges(self) -> Array:
        """The range of every channel in the layers that write it."""
        ranges = []
        for weight, bias in self._ranges.sources:
            ranges.append(weight.of_outputs())
            if self._has_appended_bias and bias is not None:
                ranges[-1] = np.maximum(ranges[-1], bias / weight.divided * BIAS_SHARE)
        if self._has_appended_bias:
            added = (each / self.scales * BIAS_SHARE for each in self._ranges.added)
            ranges[0] = np.max([ranges[0], *added], axis=0)
        return combine(ranges)

    def sink_ranges(self) -> Array:
        """The range of every channel in the layers that read it."""
        return combine(
            [weight.of_inputs().reshape(-1, width).max(axis=1) for weight, width in self._ranges.sinks.items()]
        )

    def scale(self, wanted: Array) -> Array:
        """Scale by what is wanted, as far as it is allowed; what it became."""
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
        """How far the scales may go: what is divided has to stay in the range of its type."""
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
        first, behind = chain[0].source_ranges(), [each.sink_ranges() for each in chain]
        for index, each in enumerate(chain):
            rest = [later.beside_held(ranges) for later, ranges in zip(chain[index:], behind[index:], strict=True)]
            wanted = scales_towards_mean(each.beside_held(first), rest)
            is_small = first + np.sum(behind[index:], axis=0) < weight_threshold
            scales = each.scale(np.where(is_small, 1.0, wanted))
            changes.append(np.abs(scales - 1))
            first = behind[index] * scales  # where the chain goes on, what is behind is a depthwise layer
    every = np.concatenate(changes)
    return float(every.mean()) if every.size else 0.0


def chains_of(sets: Sequence[Set], following: Mapping[Set, Set]) -> list[list[Set]]:
    """The sets in rows, each behind the one that it follows; most are one or two long."""
    chains = [_followed(each, following) for each in sets if each not in following.values()]
    placed = {each for chain in chains for each in chain}
    return chains + [[each] for each in sets if each not in placed]  # a ring of depthwise layers has no start


def _followed(start: Set, following: Mapping[Set, Set]) -> list[Set]:
    chain = [start]
    while chain[-1] in following:
        chain.append(following[chain[-1]])
    return chain


def largest_of_pairs(weight: Array) -> Array:
    """The largest magnitude of each pair of channels, of a weight by group, output, input, and the rest."""
    if weight.shape[3] == 1:
        return np.asarray(np.abs(weight[..., 0]))
    return np.asarray(np.maximum(weight.max(axis=3), -weight.min(axis=3)))
