"""Quantize along blocks that share a power-of-two scale.

For a block with largest magnitude amax, element type with top exponent emax and m mantissa bits:

    scale = 2^(floor(log2 amax) - emax), twice that if the scale rule says so, clipped to [2^-127, 2^127]
    out   = scale * round(x / scale) in the element type, saturating

The bits of a float without its mantissa are the power of two at or below it. A scale rule is one integer addition
before that: the bits of amax plus a constant below 2^mantissa carry into the exponent field exactly if the rule takes
the next power.

The spacing of the elements may be wider or finer in part of a block, by a factor called its unit. A sub-block has a
scale of its own by the same rule; its ratio to the block's, at least 2^-max_shift, is its unit. In a carrying format, a
block in which an element would round past the top code has the unit 2.

`mse` tries half, once and twice the floor rule's scale for each block and keeps the smallest sum of squared errors, the
smallest scale of equals. Errors are summed in float64 as a balanced tree over the block, so every backend gets the same
sum.

All arithmetic is on pieces of shape (block, lanes), whatever the axis of the blocks: reductions then run over the first
axis, neighbouring lanes are neighbours in memory, and every operation works on contiguous rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quark.errors import InvalidValueError
from quark.formats.arrays import FLOAT32, FLOAT64, ArrayKind, Precision
from quark.formats.rounding import binade, round_to_spacing
from quark.formats.spec import SCALE_MAX_EXPONENT, SCALE_MIN_EXPONENT, BlockFormat, NonFinite, Rounding, ScaleRule

MIN_SCALE, MAX_SCALE = 2.0**SCALE_MIN_EXPONENT, 2.0**SCALE_MAX_EXPONENT


@dataclass(frozen=True)
class BlockQuantizer:
    """A block format with its options: everything that the arithmetic needs."""

    format: BlockFormat
    scale_rule: ScaleRule = ScaleRule.FLOOR
    rounding: Rounding = Rounding.HALF_EVEN
    nonfinite: NonFinite = NonFinite.BLOCK_NAN

    def __post_init__(self) -> None:
        if self.format.carry and self.scale_rule is not ScaleRule.FLOOR:
            raise InvalidValueError(
                f"format '{self.format}' raises a block's exponent by its own rule; scale_rule must be 'floor', "
                f"not '{self.scale_rule.value}'"
            )

    def increment(self, precision: Precision) -> int:
        """What the scale rule adds to the bits of amax before the mantissa is removed."""
        one = 1 << precision.mantissa_bits
        grid = self.format.element.grid
        if self.scale_rule is ScaleRule.CEIL:
            return one - 1
        if self.scale_rule is ScaleRule.EVEN:
            return one >> (grid.mantissa_bits + 1)
        if self.scale_rule is ScaleRule.RCEIL:
            significand = grid.highest * 2.0**-grid.max_exponent
            return one - 1 - int((significand - 1.0) * one)
        return 0


@dataclass(frozen=True)
class QuantizedBlocks:
    """The result for blocks of shape (block, lanes).

    `elements` are in units of the scale: numbers of the element type times their unit. `scales` has the shape
    (1, lanes). `units` has (sub-blocks, lanes), or (1, lanes) in a carrying format; None if all are 1. `is_bad`, shape
    (1, lanes), marks blocks with NaN or Inf; None if there are none.
    """

    elements: Any
    scales: Any
    units: Any = None
    is_bad: Any = None


def quantize_dequantize_blocks(kind: ArrayKind, x: Any, axis: int, quantizer: BlockQuantizer) -> Any:
    """x quantized along `axis`, same shape and type."""
    out = kind.empty_like(kind.contiguous(x))
    precision = kind.precision(x)
    for place, lanes in lane_pieces(kind, x, axis, quantizer.format.block_size):
        wide = kind.widen(lanes, precision)
        quantized = quantize_lanes(kind, wide, quantizer, precision)
        values = dequantize_lanes(kind, quantized)
        if quantized.is_bad is not None:
            if quantizer.nonfinite is NonFinite.PASSTHROUGH:
                is_finite = (kind.bits(wide, precision) & precision.exponent_mask) != precision.exponent_mask
                values = kind.xp.where(is_finite, values, wide)
            else:
                values = kind.xp.where(quantized.is_bad, float("nan"), values)
        place.store(out, kind.narrow(values, lanes))
    return out


def dequantize_lanes(kind: ArrayKind, quantized: QuantizedBlocks) -> Any:
    """The values of the elements; Inf beyond float32."""
    with kind.quiet():
        return quantized.elements * quantized.scales


def quantize_lanes(kind: ArrayKind, x: Any, quantizer: BlockQuantizer, precision: Precision) -> QuantizedBlocks:
    """Decide scales, units and elements for x of shape (block, lanes)."""
    magnitudes = kind.bits(x, precision) & precision.magnitude_mask
    amax = kind.xp.amax(magnitudes, 0, keepdims=True)
    is_bad = amax >= precision.exponent_mask
    if kind.may_hold(is_bad):
        is_finite = magnitudes < precision.exponent_mask
        magnitudes = kind.xp.where(is_finite, magnitudes, 0)
        x = kind.xp.where(is_finite, x, 0)
        amax = kind.xp.amax(magnitudes, 0, keepdims=True)
    else:
        is_bad = None
    with kind.quiet():
        scales = _rule_scales(kind, amax, quantizer, precision)
        if quantizer.format.flush_subnormals:
            # values below 2^-126 become zero, unless all of them would round to zero anyway
            fmt, smallest = quantizer.format, 1 - FLOAT32.exponent_bias
            margin = 0 if fmt.sub_blocks is None else fmt.sub_blocks.max_shift
            margin += fmt.element.grid.mantissa_bits + 2  # half a spacing, and the lower scale that `mse` may choose
            if kind.may_hold(scales < 2.0 ** (smallest + margin)):
                smallest_normal = (smallest + precision.exponent_bias) << precision.mantissa_bits
                x = kind.xp.where(magnitudes < smallest_normal, 0, x)
        if quantizer.scale_rule is ScaleRule.MSE:
            scales = _least_error_scales(kind, x, magnitudes, scales, quantizer, precision)
        elements, units = _round_elements(kind, x, magnitudes, scales, quantizer, precision)
    return QuantizedBlocks(elements, scales, units, is_bad)


def _power_bits(kind: ArrayKind, amax: Any, increment: int, precision: Precision) -> Any:
    """The bits of the power of two at or below amax, of the next where the increment carries that far: that may be
    2^128, whose bits are those of Inf. 0 for subnormal numbers."""
    if increment and precision is FLOAT32:
        # Among float32's subnormals only [2^-127, 2^-126) matters: a binade with half as many mantissa steps.
        is_subnormal = amax < (1 << precision.mantissa_bits)
        amax = amax + kind.as_int(kind.xp.where(is_subnormal, increment >> 1, increment), precision)
    elif increment:
        amax = amax + increment
    return amax & precision.exponent_mask


def _rule_scales(kind: ArrayKind, amax: Any, quantizer: BlockQuantizer, precision: Precision) -> Any:
    """The scales of the rule for the bits of amax, clipped to the legal range."""
    powers = _power_bits(kind, amax, quantizer.increment(precision), precision)
    # divided by 2^emax in the exponent field, where 2^128 is an ordinary number; below the field, values are too small
    fields = kind.xp.clip(powers - (quantizer.format.element.emax << precision.mantissa_bits), 0, None)
    return kind.xp.clip(kind.from_bits(fields, precision), MIN_SCALE, MAX_SCALE)


def _round_elements(
    kind: ArrayKind, x: Any, magnitudes: Any, scales: Any, quantizer: BlockQuantizer, precision: Precision
) -> tuple[Any, Any]:
    """Elements in units of their scale, and the units of their spacing."""
    fmt, grid = quantizer.format, quantizer.format.element.grid
    y = x * _inverse(kind, scales, precision)
    if fmt.sub_blocks is not None:
        return _round_sub_blocks(kind, y, magnitudes, scales, quantizer, precision)
    units = None
    if fmt.carry:
        # 2 for a block with an element that would round past the top code, else 1. Only a positive element can (the
        # lowest code is one further out), from half a spacing below that code on, whatever the rounding mode. As
        # integers, the bits of a negative float are negative.
        largest = kind.xp.clip(kind.xp.amax(kind.bits(x, precision), 0, keepdims=True), 0, None)
        half_spacing = 1 << (precision.mantissa_bits - grid.mantissa_bits - 1)
        needed = _power_bits(kind, largest, half_spacing, precision) - (fmt.element.emax << precision.mantissa_bits)
        units = kind.widen(needed > kind.bits(scales, precision), precision) + 1
    spacing = binade(kind, y, grid, precision) if units is None else units * 2.0**grid.min_exponent
    rounded = round_to_spacing(kind, y, spacing, grid.mantissa_bits, quantizer.rounding, precision)
    factor = 1 if units is None else units
    return kind.xp.clip(rounded, grid.lowest * factor, grid.highest * factor, out=rounded), units


def _inverse(kind: ArrayKind, scales: Any, precision: Precision) -> Any:
    """1 / scales in the exponent field: a division by 2^-127 would fail if the thread flushes subnormals to zero."""
    field = (2 * precision.exponent_bias << precision.mantissa_bits) - (
        kind.bits(scales, precision) & precision.exponent_mask
    )
    return kind.from_bits(kind.xp.clip(field, 1 << (precision.mantissa_bits - 1), None), precision)


def _round_sub_blocks(
    kind: ArrayKind, y: Any, magnitudes: Any, scales: Any, quantizer: BlockQuantizer, precision: Precision
) -> tuple[Any, Any]:
    """Elements and units of y, in units of the scale, rounded sub-block by sub-block."""
    grid, sub_blocks = quantizer.format.element.grid, quantizer.format.sub_blocks
    assert sub_blocks is not None
    size, lanes = y.shape
    sub_size = max(1, min(sub_blocks.size, size))  # a longer sub-block would only hold more zeros
    y = kind.pad_end(y, 0, -size % sub_size).reshape(-1, sub_size, lanes)
    padded = kind.pad_end(magnitudes, 0, -size % sub_size).reshape(y.shape)
    own = _rule_scales(kind, kind.xp.amax(padded, 1), quantizer, precision)
    units = kind.xp.clip(own * _inverse(kind, scales, precision), 2.0**-sub_blocks.max_shift, 1.0)
    unit = units[:, None]
    rounded = round_to_spacing(kind, y, unit, grid.mantissa_bits, quantizer.rounding, precision)
    highest = grid.highest * unit
    elements = kind.xp.clip(rounded, -highest, highest, out=rounded)
    return elements.reshape(-1, lanes)[:size], units


def _least_error_scales(
    kind: ArrayKind, x: Any, magnitudes: Any, floor: Any, quantizer: BlockQuantizer, precision: Precision
) -> Any:
    """Half, once or twice the floor rule's scale, whichever has the smallest sum of squared errors."""
    best, least = None, None
    for step in (0.5, 1.0, 2.0):
        scales = kind.xp.clip(floor * step, MIN_SCALE, MAX_SCALE)
        elements, _ = _round_elements(kind, x, magnitudes, scales, quantizer, precision)
        error = kind.widen(elements, FLOAT64) * kind.widen(scales, FLOAT64) - kind.widen(x, FLOAT64)
        total = tree_sum(kind, error * error)
        if best is None:
            best, least = scales, total
        else:
            is_less = total < least
            best = kind.xp.where(is_less, scales, best)
            least = kind.xp.where(is_less, total, least)
    return best


def tree_sum(kind: ArrayKind, x: Any) -> Any:
    """The sum over the first axis in a fixed order: zeros up to a power of two, then upper half onto lower half."""
    length = x.shape[0]
    x = kind.pad_end(x, 0, (1 << (length - 1).bit_length()) - length)
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        x = x[:half] + x[half:]
    return x


@dataclass(frozen=True)
class LanePlace:
    """The place of a piece of shape (block, lanes) in an array of shape (outer, n, inner)."""

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
