"""Quantize along blocks that share a scale.

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

Scales that are floats (NVFP4), with M the largest element and S the largest number of the scale's format; every line is
one float32 operation, rounded to nearest even:

    t = amax(tensor) / (M * S)         if the format has a tensor scale and none is given; over finite values; else 1
    q = amax / M,   q = q / t          the wanted scale of a block
    s = q, at most S, rounded          in the scale's format, half to even whatever the rounding mode
    d = t * s                          the scale of the block
    y = x / d, at most M in magnitude
    out = d * round(y)                 round(y) in the element type

Where t or d is 0, as in a tensor of zeros or a block far below the largest one, the values are 0. A given t that is too
small saturates. For float64 arrays t is a float32 number and the rest is float64. `mse` tries q times each of
SCALE_FACTORS.

All arithmetic is on pieces of shape (block, lanes), whatever the axis of the blocks: reductions then run over the first
axis, neighbouring lanes are neighbours in memory, and every operation works on contiguous rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quark.errors import InvalidValueError
from quark.formats.arrays import FLOAT32, FLOAT64, ArrayKind, Precision, array_kind
from quark.formats.rounding import binade, round_to_spacing
from quark.formats.spec import (
    FLOAT32_MAX,
    SCALE_MAX_EXPONENT,
    SCALE_MIN_EXPONENT,
    BlockFormat,
    NonFinite,
    Rounding,
    ScaleRule,
)

MIN_SCALE, MAX_SCALE = 2.0**SCALE_MIN_EXPONENT, 2.0**SCALE_MAX_EXPONENT

# Tried by `mse` for scales that are floats: from the largest element at the top of its binade down to the next numbers
# that a large element could be rounded to. Finer steps gain less than 0.1 dB on weights. With 1.5 and 2, a block of
# four-bit floats whose largest element was rounded to 4 or 3 gets its scale back when it is quantized again.
SCALE_FACTORS = (0.75, 0.8125, 0.875, 0.9375, 1.0, 1.125, 1.25, 1.375, 1.5, 2.0)


@dataclass(frozen=True)
class BlockQuantizer:
    """A block format with its options: everything that the arithmetic needs.

    `tensor_scale` is for formats that have one, a float32 number; None: found for every tensor, from its largest finite
    magnitude. A scale of 0 makes every value 0.
    """

    format: BlockFormat
    scale_rule: ScaleRule = ScaleRule.FLOOR
    rounding: Rounding = Rounding.HALF_EVEN
    nonfinite: NonFinite = NonFinite.BLOCK_NAN
    tensor_scale: float | None = None

    def __post_init__(self) -> None:
        fmt = self.format
        if fmt.scale is not None and self.scale_rule not in fmt.scale_rules:
            raise InvalidValueError(
                f"format '{fmt}' rounds its scales to {fmt.scale}; scale_rule must be 'floor', the nearest number, or "
                f"'mse', not '{self.scale_rule.value}'"
            )
        if self.tensor_scale is not None:
            object.__setattr__(self, "tensor_scale", check_tensor_scale(fmt, self.tensor_scale))
        if self.scale_rule not in fmt.scale_rules:
            raise InvalidValueError(
                f"format '{self.format}' raises a block's exponent by its own rule; scale_rule must be 'floor', "
                f"not '{self.scale_rule.value}'"
            )

    def increment(self, precision: Precision) -> int:
        """The number that the scale rule adds to the bits of amax before the mantissa is removed."""
        one = 1 << precision.mantissa_bits  # adds 1 to the exponent
        grid = self.format.element.grid
        if self.scale_rule is ScaleRule.CEIL:
            return one - 1
        if self.scale_rule is ScaleRule.EVEN:
            return one >> (grid.mantissa_bits + 1)
        if self.scale_rule is ScaleRule.RCEIL:
            significand = grid.highest * 2.0**-grid.max_exponent
            return one - 1 - int((significand - 1.0) * one)
        return 0

    @property
    def is_fixed(self) -> bool:
        """True if no tensor scale has to be found from the values: it is given, or the format has none."""
        return self.tensor_scale is not None or not self.format.has_tensor_scale

    def fixed(self, x: Any) -> BlockQuantizer:
        """The same with the tensor scale that x has, a numpy array or an eager tensor; unchanged if it has one, or if
        the format has none."""
        if self.is_fixed:
            return self
        kind = array_kind(x)
        scale = find_tensor_scale(kind, x, self, kind.precision(x))
        return replace(self, tensor_scale=0.0 if scale is None else float(scale[0, 0]))


def check_tensor_scale(fmt: BlockFormat, value: float) -> float:
    """The value as a float32 number; an error if the format has no tensor scale, or scales would leave float32."""
    if not fmt.has_tensor_scale or fmt.scale is None:
        raise InvalidValueError(f"tensor_scale: format '{fmt}' has none; leave it out")
    with np.errstate(over="ignore"):
        number = float(np.float32(value))
    highest = FLOAT32_MAX / fmt.scale.max
    if not 0 <= number <= highest:
        raise InvalidValueError(f"tensor_scale {value!r} of format '{fmt}': expected a number from 0 to {highest:.6g}")
    return number


@dataclass(frozen=True)
class QuantizedBlocks:
    """The result for blocks of shape (block, lanes).

    `elements` are in units of the scale: numbers of the element type times their unit. `scales` has the shape (1,
    lanes). `scale_numbers`, of the same shape, are the numbers of the format's `scale` if it has one. `units` has
    (sub-blocks, lanes), or (1, lanes) in a carrying format; None if all are 1. `is_bad`, shape (1, lanes), marks
    blocks with NaN or Inf; None if there are none.
    """

    elements: Any
    scales: Any
    units: Any = None
    is_bad: Any = None
    scale_numbers: Any = None


def quantize_dequantize_blocks(kind: ArrayKind, x: Any, axis: int, quantizer: BlockQuantizer) -> Any:
    """x quantized along `axis`, same shape and type."""
    out = kind.empty_like(kind.contiguous(x))
    precision = kind.precision(x)
    tensor_scale = find_tensor_scale(kind, x, quantizer, precision)
    for place, lanes in lane_pieces(kind, x, axis, quantizer.format.block_size):
        wide = kind.widen(lanes, precision)
        quantized = quantize_lanes(kind, wide, quantizer, precision, tensor_scale)
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


def find_tensor_scale(kind: ArrayKind, x: Any, quantizer: BlockQuantizer, precision: Precision) -> Any:
    """The tensor scale for x, of shape (1, 1) in the working type; None if scales are powers of two, or x is empty."""
    fmt = quantizer.format
    if fmt.scale is None or not math.prod(x.shape):
        return None
    if quantizer.tensor_scale is not None or not fmt.has_tensor_scale:
        return kind.scalar(1.0 if quantizer.tensor_scale is None else quantizer.tensor_scale, x, precision)
    flat, step, largest = kind.contiguous(x).reshape(-1), kind.chunk_elements(x), None
    for start in range(0, flat.shape[0], step):
        magnitudes = kind.bits(kind.widen(flat[start : start + step], precision), precision) & precision.magnitude_mask
        magnitudes = kind.xp.where(magnitudes < precision.exponent_mask, magnitudes, 0)
        own = kind.xp.amax(magnitudes.reshape(-1, 1), 0, keepdims=True)
        largest = own if largest is None else kind.xp.maximum(largest, own)
    amax = kind.widen(kind.xp.clip(kind.from_bits(largest, precision), None, FLOAT32_MAX), FLOAT32)
    with kind.quiet():
        return kind.widen(kind.divide(amax, fmt.reach), precision)


def quantize_lanes(
    kind: ArrayKind, x: Any, quantizer: BlockQuantizer, precision: Precision, tensor_scale: Any = None
) -> QuantizedBlocks:
    """Decide scales, units and elements for x of shape (block, lanes). If scales are floats, `tensor_scale` is what
    `find_tensor_scale` returned for the whole array."""
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
    if quantizer.format.scale is not None:
        with kind.quiet():
            largest = kind.from_bits(amax, precision)
            return replace(_with_float_scales(kind, x, largest, tensor_scale, quantizer, precision), is_bad=is_bad)
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


def _with_float_scales(
    kind: ArrayKind, x: Any, amax: Any, tensor_scale: Any, quantizer: BlockQuantizer, precision: Precision
) -> QuantizedBlocks:
    """x, finite and of shape (block, lanes), at scales that are the tensor's scale times numbers of a float format."""
    fmt, grid = quantizer.format, quantizer.format.element.grid
    assert fmt.scale is not None, fmt
    scale_grid = fmt.scale.grid
    divisor = kind.xp.where(tensor_scale == 0, 1, tensor_scale)
    wanted = kind.divide(kind.divide(amax, grid.highest), divisor)
    best, least = None, None
    for factor in SCALE_FACTORS if quantizer.scale_rule is ScaleRule.MSE else (1.0,):
        bounded = kind.xp.clip(wanted * factor, None, scale_grid.highest)
        unit = binade(kind, bounded, scale_grid, precision)
        numbers = round_to_spacing(kind, bounded, unit, scale_grid.mantissa_bits, Rounding.HALF_EVEN, precision)
        scales = tensor_scale * numbers
        is_zero = scales == 0
        y = kind.xp.where(is_zero, 0, kind.divide(x, kind.xp.where(is_zero, 1, scales)))
        y = kind.xp.clip(y, grid.lowest, grid.highest)  # the limits are on the grid, so nothing rounds past them
        unit = binade(kind, y, grid, precision)
        elements = round_to_spacing(kind, y, unit, grid.mantissa_bits, quantizer.rounding, precision)
        blocks = QuantizedBlocks(elements, scales, scale_numbers=numbers)
        if quantizer.scale_rule is not ScaleRule.MSE:
            return blocks
        error = kind.widen(elements, FLOAT64) * kind.widen(scales, FLOAT64) - kind.widen(x, FLOAT64)
        total = tree_sum(kind, error * error)
        if best is None:
            best, least = blocks, total
        else:
            is_less = total < least
            best = QuantizedBlocks(
                kind.xp.where(is_less, elements, best.elements),
                kind.xp.where(is_less, scales, best.scales),
                scale_numbers=kind.xp.where(is_less, numbers, best.scale_numbers),
            )
            least = kind.xp.where(is_less, total, least)
    assert best is not None
    return best


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
    sub_size = max(1, min(sub_blocks.size, size))  # a longer sub-block would only contain more zeros
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
