"""Where tensors have their channels, and where those go when a tensor is rearranged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


class CannotScaleError(Exception):
    """That channels cannot be rescaled here; the text is the reason, about the node that was looked at."""


@dataclass(frozen=True)
class Channels:
    """The axis of a tensor that counts channels; each takes `width` places of it, more than one where the positions of
    an image were flattened into it."""

    axis: int
    width: int = 1


Ends: TypeAlias = tuple[Channels, Channels]
Sizes: TypeAlias = Sequence[int | None] | None  # of a shape, where they are known


def through_permutation(order: Sequence[int], channels: Channels, is_before: bool, name: str) -> Ends:
    """The channels before and behind a transposition, from those of one of the two."""
    if channels.axis >= len(order):
        raise CannotScaleError(f"{name} of a tensor of unknown rank")
    if is_before:
        return channels, Channels(list(order).index(channels.axis), channels.width)
    return Channels(order[channels.axis], channels.width), channels


def through_shapes(
    before: Sequence[int | None] | None,
    after: Sequence[int | None] | None,
    channels: Channels,
    is_before: bool,
    name: str,
) -> Ends:
    """The channels before and behind a reshape that keeps the first axis, from those of one of the two.

    Either the channels stay what they are, as in [N, C, H, W] to [N, C, H*W], or what follows them is flattened into
    their axis, as in [N, C, H, W] to [N, C*H*W], where each is H*W wide. All sizes but the first must be known.
    """
    if before is None or after is None or channels.axis != 1 or len(before) < 2 or len(after) < 2:
        raise CannotScaleError(f"{name} mixes axes")
    inner, outer = [size for size in before[1:] if size], [size for size in after[1:] if size]
    if len(inner) != len(before) - 1 or len(outer) != len(after) - 1 or math.prod(inner) != math.prod(outer):
        raise CannotScaleError(f"{name} mixes axes")
    if inner[0] == outer[0]:
        return channels, channels
    width = math.prod(inner[1:])
    if outer[0] != inner[0] * width or (not is_before and channels.width % width):
        raise CannotScaleError(f"{name} mixes channels")
    narrow = channels.width if is_before else channels.width // width
    return Channels(1, narrow), Channels(1, narrow * width)
