"""Quantize along blocks that share a power-of-two scale.

For a block with largest magnitude amax, element type with top exponent emax and m mantissa bits:

    e   = floor(log2 amax) - emax, moved up by the scale rule, confined to [-127, 127]
    out = 2^e * round(x * 2^-e) in the element type, saturating

The scale rules are one integer addition: the bits of amax, plus a constant below 2^mantissa, carry into the exponent
field exactly when the rule wants the next exponent. With sub-blocks, the same rule gives each sub-block an exponent,
and the distance D to the block's, at most `max_shift`, makes its spacing 2^-D finer.

`mse` tries floor-1, floor and floor+1 for each block and keeps the least sum of squared errors, the smaller exponent
of equals. Errors are summed in float64 as a balanced tree over the block, so that every backend finds the same sum.

All arithmetic is on arrays of shape (block, lanes): reductions run over the first axis, and neighbouring lanes are
neighbours in memory whatever the axis of the user's array was.
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

# The exponent that a carrying format may reach: its field has no code to spare for NaN, so 255 is 2^128.
CARRY_MAX_EXPONENT = 128


@dataclass(frozen=True)
class BlockQuantizer:
    """A block format with the choices made: all that the arithmetic needs."""

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

    def exponent_increment(self, precision: Precision) -> int:
        """What the scale rule adds to the bits of amax before the mantissa is cut off."""
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
    """What was decided for blocks of shape (block, lanes).

    `elements` are numbers of the element type, times 2^-shift with sub-blocks; `exponents` the scale exponents, shape
    (1, lanes); `shifts` the microexponents, shape (sub-blocks, lanes), all 0 without; `is_bad`, shape (1, lanes),
    marks blocks that held NaN or Inf.
    """

    elements: Any
    exponents: Any
    shifts: Any
    is_bad: Any


def quantize_dequantize_blocks(kind: ArrayKind, x: Any, axis: int, quantizer: BlockQuantizer) -> Any:
    """x quantized along `axis`, same shape and type."""
    out = kind.empty_like(kind.contiguous(x))
    for place, lanes in lane_pieces(kind, x, axis, quantizer.format.block_size):
        place.store(out, _quantize_dequantize_lanes(kind, lanes, quantizer))
    return out


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


def _quantize_dequantize_lanes(kind: ArrayKind, x: Any, quantizer: BlockQuantizer) -> Any:
    """x of shape (block, lanes), quantized along the blocks."""
    precision = kind.precision(x)
    wide = kind.widen(x, precision)
    quantized = quantize_lanes(kind, wide, quantizer, precision)
    values = dequantize_lanes(kind, quantized, quantizer.format, precision)
    if quantizer.nonfinite is NonFinite.PASSTHROUGH and kind.may_hold(quantized.is_bad):
        is_finite = (kind.bits(wide, precision) & precision.exponent_mask) != precision.exponent_mask
        values = kind.xp.where(is_finite, values, wide)
    elif kind.may_hold(quantized.is_bad):
        values = kind.xp.where(quantized.is_bad, float("nan"), values)
    return kind.narrow(values, x)


def dequantize_lanes(kind: ArrayKind, quantized: QuantizedBlocks, fmt: BlockFormat, precision: Precision) -> Any:
    """elements * 2^exponents; beyond float32 that is Inf."""
    with kind.quiet():
        if not fmt.carry:
            return quantized.elements * exp2(kind, quantized.exponents, precision)
        # 2^128 is no float32, half of it is
        first = quantized.exponents >> 1
        halfway = quantized.elements * exp2(kind, first, precision)
        return halfway * exp2(kind, quantized.exponents - first, precision)


def quantize_lanes(kind: ArrayKind, x: Any, quantizer: BlockQuantizer, precision: Precision) -> QuantizedBlocks:
    """Decide scales, shifts and elements for x of shape (block, lanes)."""
    magnitudes = kind.bits(x, precision) & precision.magnitude_mask
    amax = kind.xp.amax(magnitudes, 0, keepdims=True)
    is_bad = amax >= precision.exponent_mask
    if kind.may_hold(is_bad):
        is_finite = magnitudes < precision.exponent_mask
        magnitudes = kind.xp.where(is_finite, magnitudes, 0)
        x = kind.xp.where(is_finite, x, 0)
        amax = kind.xp.amax(magnitudes, 0, keepdims=True)
    with kind.quiet():
        exponents = _block_exponents(kind, amax, x, quantizer, precision)
        if quantizer.format.flush_subnormals:
            x = _flush_subnormals(kind, x, magnitudes, exponents, quantizer.format, precision)
        if quantizer.scale_rule is ScaleRule.MSE:
            exponents = _least_error_exponents(kind, x, magnitudes, exponents, quantizer, precision)
        elements, shifts = _round_elements(kind, x, magnitudes, exponents, quantizer, precision)
    return QuantizedBlocks(elements, exponents, shifts, is_bad)


def _flush_subnormals(
    kind: ArrayKind, x: Any, magnitudes: Any, exponents: Any, fmt: BlockFormat, precision: Precision
) -> Any:
    """x with what lies below 2^-126 made zero; left alone where all of that would round to zero anyway."""
    shift = 0 if fmt.sub_blocks is None else fmt.sub_blocks.max_shift
    smallest = 1 - FLOAT32.exponent_bias
    margin = shift + fmt.element.grid.mantissa_bits + 2  # half a spacing, and the lower exponent that `mse` may take
    if not kind.may_hold(exponents < smallest + margin):
        return x
    smallest_normal = (smallest + precision.exponent_bias) << precision.mantissa_bits
    return kind.xp.where(magnitudes < smallest_normal, 0, x)


def exp2(kind: ArrayKind, exponents: Any, precision: Precision) -> Any:
    """2^exponents exactly, from -128 up; float32's subnormals must be spelled out in bits."""
    biased = exponents + precision.exponent_bias
    bits = biased << precision.mantissa_bits
    is_subnormal = biased < 1
    if kind.may_hold(is_subnormal):
        half = 1 << (precision.mantissa_bits - 1)
        bits = kind.xp.where(is_subnormal, half >> kind.xp.clip(-biased, 0, 1), bits)
    return kind.from_bits(kind.as_int(bits, precision), precision)


def _exponents_after(kind: ArrayKind, amax: Any, increment: int, fmt: BlockFormat, precision: Precision) -> Any:
    """floor(log2 amax) - emax, one more where adding the increment to the bits of amax carries into the exponent."""
    if increment and precision is FLOAT32:
        # Among float32's subnormals only [2^-127, 2^-126) matters: a binade with half as many mantissa steps.
        amax = kind.xp.where(amax < (1 << precision.mantissa_bits), increment >> 1, increment) + amax
    else:
        amax = amax + increment
    offset = precision.exponent_bias + fmt.element.grid.max_exponent
    return kind.as_int(amax >> precision.mantissa_bits, precision) - offset


def _rule_exponents(kind: ArrayKind, amax: Any, quantizer: BlockQuantizer, precision: Precision) -> Any:
    """The exponents that the scale rule gives for the bits of amax, not confined yet."""
    return _exponents_after(kind, amax, quantizer.exponent_increment(precision), quantizer.format, precision)


def _block_exponents(kind: ArrayKind, amax: Any, x: Any, quantizer: BlockQuantizer, precision: Precision) -> Any:
    """The scale exponents, shape (1, lanes)."""
    exponents = _rule_exponents(kind, amax, quantizer, precision)
    exponents = kind.xp.clip(exponents, SCALE_MIN_EXPONENT, SCALE_MAX_EXPONENT)
    if not quantizer.format.carry:
        return exponents
    # Only a positive element can round past the top code (the lowest code is one further out), and does so from half a
    # spacing below it, whatever the rounding mode. As integers, the bits of a negative float are negative.
    largest = kind.xp.clip(kind.xp.amax(kind.bits(x, precision), 0, keepdims=True), 0, None)
    half_spacing = 1 << (precision.mantissa_bits - quantizer.format.element.grid.mantissa_bits - 1)
    needed = _exponents_after(kind, largest, half_spacing, quantizer.format, precision)
    return kind.xp.maximum(exponents, kind.xp.clip(needed, None, CARRY_MAX_EXPONENT))


def _round_elements(
    kind: ArrayKind, x: Any, magnitudes: Any, exponents: Any, quantizer: BlockQuantizer, precision: Precision
) -> tuple[Any, Any]:
    """Elements in units of their scale, and the shifts of the sub-blocks."""
    grid = quantizer.format.element.grid
    y = x * exp2(kind, -exponents, precision)
    sub_blocks = quantizer.format.sub_blocks
    if sub_blocks is None:
        unit = binade(kind, y, grid, precision)
        rounded = round_to_spacing(kind, y, unit, grid.mantissa_bits, quantizer.rounding, precision)
        return kind.xp.clip(rounded, grid.lowest, grid.highest, out=rounded), 0 * exponents
    size, lanes = x.shape
    y = kind.pad_end(y, 0, -size % sub_blocks.size).reshape(-1, sub_blocks.size, lanes)
    padded = kind.pad_end(magnitudes, 0, -size % sub_blocks.size).reshape(y.shape)
    own = _rule_exponents(kind, kind.xp.amax(padded, 1), quantizer, precision)
    shifts = kind.xp.clip(exponents - own, 0, sub_blocks.max_shift)
    unit = exp2(kind, -shifts, precision)[:, None]
    rounded = round_to_spacing(kind, y, unit, grid.mantissa_bits, quantizer.rounding, precision)
    elements = kind.xp.clip(rounded, grid.lowest * unit, grid.highest * unit, out=rounded)
    return elements.reshape(-1, lanes)[:size], shifts


def _least_error_exponents(
    kind: ArrayKind, x: Any, magnitudes: Any, floor: Any, quantizer: BlockQuantizer, precision: Precision
) -> Any:
    """Of floor-1, floor and floor+1 the exponent with the least sum of squared errors."""
    best, least = None, None
    for step in (-1, 0, 1):
        exponents = kind.xp.clip(floor + step, SCALE_MIN_EXPONENT, SCALE_MAX_EXPONENT)
        elements, _ = _round_elements(kind, x, magnitudes, exponents, quantizer, precision)
        scale = exp2(kind, kind.as_int(exponents, FLOAT64), FLOAT64)
        error = kind.widen(elements, FLOAT64) * scale - kind.widen(x, FLOAT64)
        total = tree_sum(kind, error * error)
        if best is None:
            best, least = exponents, total
        else:
            is_less = total < least
            best = kind.xp.where(is_less, exponents, best)
            least = kind.xp.where(is_less, total, least)
    return best


def tree_sum(kind: ArrayKind, x: Any) -> Any:
    """The sum over the first axis, always in one order: zeros up to a power of two, then upper half onto lower half."""
    length = x.shape[0]
    x = kind.pad_end(x, 0, (1 << (length - 1).bit_length()) - length)
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        x = x[:half] + x[half:]
    return x
