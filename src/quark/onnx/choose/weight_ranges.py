"""The extremes of a weight, found piece by piece: a weight may be larger than the memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.formats.affine import find_ranges
from quark.onnx.large_tensors import pieces

Array = NDArray[Any]


def weight_extremes(
    weight: ir.TensorProtocol, axis: int | None = None, group_size: int | None = None
) -> tuple[Array, Array]:
    """(lowest, highest), one after the other: of the whole, of each channel of `axis`, or of each group along it in the
    order of the groups' array. 0 and 0 where there are no elements."""
    dims = tuple(weight.shape.numpy())
    if not math.prod(dims) or not dims:
        low, high = find_ranges(weight.numpy().astype(np.float32), axis, group_size)
        return np.atleast_1d(low).ravel(), np.atleast_1d(high).ravel()
    shape = _shape(dims, axis, group_size)
    low, high = np.full(shape, np.inf, np.float32), np.full(shape, -np.inf, np.float32)
    for piece in pieces(weight, axis, group_size or 1):
        place = _place(piece.outer, piece.along, axis, group_size)
        lowest, highest = find_ranges(
            piece.array.astype(np.float32, copy=False), None if axis is None else 1, group_size
        )
        low[place], high[place] = np.minimum(low[place], lowest), np.maximum(high[place], highest)
    return low.ravel(), high.ravel()


def _shape(dims: tuple[int, ...], axis: int | None, group_size: int | None) -> tuple[int, ...]:
    if axis is None:
        return (1,)
    axis %= len(dims)
    if group_size is None:
        return (dims[axis],)
    return math.prod(dims[:axis]), -(-dims[axis] // group_size), math.prod(dims[axis + 1 :])


def _place(outer: slice, along: slice, axis: int | None, group_size: int | None) -> slice | tuple[slice, slice]:
    """Where the extremes of a piece belong."""
    if axis is None:
        return slice(None)
    return along if group_size is None else (outer, slice(along.start // group_size, -(-along.stop // group_size)))
