"""An array seen as blocks in lanes: pieces of shape (block, lanes), whatever the axis that its blocks run along.

Reductions then run over the first axis, and neighbouring lanes are neighbours in memory, so that every operation of
the block arithmetic goes through contiguous rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quark.formats.arrays import ArrayKind


@dataclass(frozen=True)
class LanePlace:
    """Where a piece of shape (block, lanes) belongs in an array seen as (outer, n, inner)."""

    outer: slice
    axis: slice
    inner: slice
    rows_shape: tuple[int, int, int]

    def load(self, x: Any, size: int) -> Any:
        part = x.reshape(self.rows_shape)[self.outer, self.axis, self.inner]
        blocks = part.reshape(part.shape[0], -1, size, part.shape[2])
        return blocks.swapaxes(1, 2).swapaxes(0, 1).reshape(size, -1)

    def store(self, out: Any, lanes: Any) -> None:
        part = out.reshape(self.rows_shape)[self.outer, self.axis, self.inner]
        blocks = lanes.reshape(lanes.shape[0], part.shape[0], -1, part.shape[2])
        part[...] = blocks.swapaxes(0, 1).swapaxes(1, 2).reshape(part.shape)


def lane_pieces(kind: ArrayKind, x: Any, axis: int, block_size: int) -> Iterator[tuple[LanePlace, Any]]:
    """All blocks of x along `axis`, as pieces of shape (block, lanes) that fit a cache; the last may be shorter."""
    n = x.shape[axis] if x.shape else 1
    inner = math.prod(x.shape[axis + 1 :])
    outer = math.prod(x.shape[:axis])
    if not outer * n * inner:
        return
    rows = kind.contiguous(x)
    whole = n - n % min(block_size, n)
    for start, stop, size in ((0, whole, min(block_size, n)), (whole, n, n - whole)):
        if stop == start:
            continue
        budget = max(1, kind.chunk_elements(x) // size)
        columns = min(inner, budget)
        blocks = min((stop - start) // size, max(1, budget // columns))
        count = max(1, budget // (columns * blocks))
        for row in range(0, outer, count):
            for begin in range(start, stop, blocks * size):
                for column in range(0, inner, columns):
                    along = slice(begin, min(stop, begin + blocks * size))
                    place = LanePlace(
                        slice(row, row + count), along, slice(column, column + columns), (outer, n, inner)
                    )
                    # neighbouring lanes must be neighbours in memory, or every operation strides
                    yield place, kind.contiguous(place.load(rows, size))
