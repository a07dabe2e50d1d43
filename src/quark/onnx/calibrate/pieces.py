"""Large batches in pieces, so that their activations fit the memory that may be used.

Where the batch axis of every input is free, a batch is cut into as many rows as fit, found by running the first row
alone. A model of a fixed batch size gets several batches one after the other. Anything else runs as it is; so do
networks with a recurrence whose first axis may be time: a piece of that would be another input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quark.errors import InvalidValueError

Feeds = Mapping[str, npt.NDArray[Any]]
Shapes = Mapping[str, tuple[int | str | None, ...]]


class Cutter:
    """Cuts samples for inputs of these shapes. `row_bytes` is what a row of the batch leaves in activations; it can be
    told after the first piece, and until then pieces of a free batch are single rows. `has_batch_first` is False where
    the first axis may be something else."""

    def __init__(self, shapes: Shapes, limit_bytes: int, *, has_batch_first: bool = True) -> None:
        self._shapes = shapes
        self._limit = limit_bytes
        self._has_batch_first = has_batch_first
        self.row_bytes: int | None = None

    def cut(self, sample: Feeds) -> Iterator[Feeds]:
        fixed = {name: shape[0] for name, shape in self._shapes.items() if shape and isinstance(shape[0], int)}
        if not fixed:
            yield from self._cut_free(sample) if self._has_batch_first else (sample,)
            return
        counts = {name: len(sample[name]) // size for name, size in fixed.items() if size}
        if set(counts.values()) <= {1}:
            yield sample
        elif len(counts) == len(self._shapes) == len(sample) and len(set(counts.values())) == 1:
            for i in range(next(iter(counts.values()))):
                yield {name: array[i * fixed[name] : (i + 1) * fixed[name]] for name, array in sample.items()}
        else:
            raise InvalidValueError(f"inputs of different numbers of batches: {counts}; feed one batch at a time")

    def _cut_free(self, sample: Feeds) -> Iterator[Feeds]:
        rows = {len(array) if array.ndim else 0 for array in sample.values()}
        if len(rows) != 1 or rows <= {0, 1}:
            yield sample
            return
        total, start = rows.pop(), 0
        while start < total:
            step = 1 if self.row_bytes is None else max(1, self._limit // max(1, self.row_bytes))
            yield {name: array[start : start + step] for name, array in sample.items()}
            start += step


def rows_of(piece: Feeds) -> int:
    """The rows of its batch; 1 where there is no batch axis."""
    return max((len(array) for array in piece.values() if np.ndim(array)), default=1) or 1
