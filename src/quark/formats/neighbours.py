"""The two numbers of a format that a value lies between: what rounding can choose from.

Scales are those that rounding to the nearest would take. Where a value is a number of the format, or beyond its range,
both neighbours are that number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.formats.affine import AffineParameters
from quark.formats.arrays import FLOAT64, array_kind
from quark.formats.block import BlockQuantizer, QuantizedBlocks, quantize_lanes
from quark.formats.granularity import Granularity
from quark.formats.lanes import lane_pieces
from quark.formats.rounding import binade
from quark.formats.spec import ElementFormat, Grid

Array = NDArray[Any]
Pair = tuple[Array, Array]


def affine_neighbours(x: Array, parameters: AffineParameters) -> Pair:
    """The neighbours of a float32 array among integer codes.

    >>> from quark.formats.affine import integer_format
    >>> parameters = AffineParameters(np.float32(0.5), np.int8(0), integer_format("int8"))
    >>> affine_neighbours(np.array([0.7, 1.0, 999.0], np.float32), parameters)
    (array([ 0.5,  1. , 63.5], dtype=float32), array([ 1. ,  1. , 63.5], dtype=float32))
    """
    kind, fmt = array_kind(x), parameters.format
    spread = Granularity(parameters.axis, parameters.group_size).spread
    scale = spread(kind, parameters.scale, x.shape)
    zero_point = spread(kind, parameters.zero_point, x.shape).astype(np.float64)
    steps = (x / scale).astype(np.float64)
    low, high = np.floor(steps), np.ceil(steps)
    lowest, highest = fmt.qmin - zero_point, fmt.qmax - zero_point
    lower, upper = (np.clip(each, lowest, highest) for each in (low, high))
    return (lower.astype(np.float32) * scale).astype(np.float32), (upper.astype(np.float32) * scale).astype(np.float32)


def element_neighbours(x: Array, fmt: ElementFormat) -> Pair:
    """The neighbours among the numbers of a plain format."""
    wide = np.asarray(x, np.float64)
    lower, upper = _on_grid(wide, fmt.grid, binade(array_kind(wide), wide, fmt.grid, FLOAT64), 1.0)
    return lower.astype(np.float32), upper.astype(np.float32)


def block_neighbours(x: Array, axis: int, quantizer: BlockQuantizer) -> Pair:
    """The neighbours of a float32 array whose blocks run along `axis`."""
    kind = array_kind(x)
    lower, upper = np.empty_like(x), np.empty_like(x)
    for place, lanes in lane_pieces(kind, x, axis, quantizer.format.block_size):
        quantized = quantize_lanes(kind, lanes, quantizer, kind.precision(lanes))
        for out, values in zip((lower, upper), _lane_neighbours(lanes, quantized, quantizer), strict=True):
            place.store(out, values.astype(np.float32))
    return lower, upper


def _lane_neighbours(x: Array, quantized: QuantizedBlocks, quantizer: BlockQuantizer) -> Pair:
    fmt, scales = quantizer.format, quantized.scales.astype(np.float64)
    y = x.astype(np.float64) / scales
    units: Any = 1.0
    if fmt.sub_blocks is not None:
        units = np.repeat(quantized.units, min(fmt.sub_blocks.size, len(x)), axis=0)[: len(x)].astype(np.float64)
        spacing = units
    elif quantized.units is not None:
        units = quantized.units.astype(np.float64)
        spacing = units * 2.0**fmt.element.grid.min_exponent
    else:
        spacing = binade(array_kind(y), y, fmt.element.grid, FLOAT64)
    lower, upper = _on_grid(y, fmt.element.grid, spacing, units)
    return lower * scales, upper * scales


def _on_grid(y: Array, grid: Grid, unit: Any, factor: Any) -> Pair:
    """Down and up to multiples of unit * 2^-mantissa_bits, within the grid's limits times the factor."""
    quantum = unit * 2.0**-grid.mantissa_bits
    low = np.floor(y / quantum) * quantum
    high = np.where(low < y, low + quantum, low)
    lowest, highest = grid.lowest * factor, grid.highest * factor
    return np.clip(low, lowest, highest), np.clip(high, lowest, highest)
