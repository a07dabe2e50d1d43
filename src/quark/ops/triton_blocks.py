"""Block formats as a Triton kernel; `quark.formats.block` has the same arithmetic in array operations.

The array is (outer, n, inner) with blocks along n. A lane is one block: `inner` lanes are neighbours in memory, unless
blocks themselves are, where `inner` is 1. A program takes a tile of whole blocks, (rows, lanes), or (lanes, rows) where
blocks lie along memory: what is next in memory is the last axis. `rows` is the block size rounded up to a power of two.

Powers of two are handled as the bits of floats, where a comparison, a clip and a division by another power are those
of integers. `enable_fp_fusion=False` goes with every launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SMALLEST_NORMAL = tl.constexpr(0x00800000)
MIN_SCALE = tl.constexpr(0x00400000)  # 2^-127
MAX_SCALE = tl.constexpr(0x7F000000)  # 2^127
HALF_AWAY = tl.constexpr(0)
HALF_UP = tl.constexpr(1)
HALF_EVEN = tl.constexpr(2)


@triton.jit
def power_bits(amax, increment: tl.constexpr):
    """The bits of the power of two at or below amax, of the next where the increment carries that far."""
    if increment != 0:
        amax = amax + tl.where(amax < SMALLEST_NORMAL, increment >> 1, increment)
    return amax & INFINITY


@triton.jit
def scale_bits(amax, increment: tl.constexpr, emax: tl.constexpr):
    fields = power_bits(amax, increment) - (emax << 23)
    return tl.minimum(tl.maximum(fields, MIN_SCALE), MAX_SCALE)


@triton.jit
def inverse_of(bits):
    """1 / scale, in the exponent field."""
    field = (254 << 23) - (bits & INFINITY)
    return tl.maximum(field, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def round_to_spacing(y, unit, mantissa_bits: tl.constexpr, rounding: tl.constexpr):
    """y rounded to multiples of unit * 2^-mantissa_bits."""
    magic = unit * (1.5 * (1 << (23 - mantissa_bits)))
    rounded = (y + magic) - magic
    if rounding != HALF_EVEN:
        rest = y - rounded
        half = unit * (1.0 / (1 << (mantissa_bits + 1)))
        if rounding == HALF_UP:
            is_tie = rest == half
        else:
            is_tie = (tl.abs(rest) == half) & ((rest > 0) == (y > 0))
        rounded = tl.where(is_tie, rounded + 2 * rest, rounded)
    return rounded


@triton.jit
def block_maximum(v, axis: tl.constexpr):
    """The largest of each block, in a shape that goes with the tile."""
    return tl.expand_dims(tl.max(v, axis), axis)


@triton.jit
def sub_block_maximum(v, size: tl.constexpr, axis: tl.constexpr):
    """The largest of each run of `size` neighbours in a block, at the place of every one of them."""
    if axis == 0:
        parts = tl.reshape(v, [v.shape[0] // size, size, v.shape[1]])
        largest = tl.expand_dims(tl.max(parts, 1), 1)
        return tl.reshape(tl.broadcast_to(largest, [v.shape[0] // size, size, v.shape[1]]), [v.shape[0], v.shape[1]])
    parts = tl.reshape(v, [v.shape[0], v.shape[1] // size, size])
    largest = tl.expand_dims(tl.max(parts, 2), 2)
    return tl.reshape(tl.broadcast_to(largest, [v.shape[0], v.shape[1] // size, size]), [v.shape[0], v.shape[1]])


@triton.jit
def blocks_kernel(
    x, out, n, inner, blocks_in_row, lanes, block_size, lowest, highest, min_unit,
    increment: tl.constexpr, emax: tl.constexpr, mantissa_bits: tl.constexpr, is_uniform: tl.constexpr,
    sub_block: tl.constexpr, max_shift: tl.constexpr, flushes: tl.constexpr, carries: tl.constexpr,
    rounding: tl.constexpr, passes: tl.constexpr,
    axis: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr, is_long: tl.constexpr,
):  # fmt: skip
    """`axis` is the one of the tile that blocks run along. `min_unit` is the power of two at the grid's lowest
    normal number, `passes` the policy that copies what is not finite. `is_long`: places need more than 31 bits, with
    which a GPU divides slowly."""
    row = tl.expand_dims(tl.arange(0, rows), 1 - axis)
    if is_long:
        first = tl.program_id(0).to(tl.int64) * tile
    else:
        first = tl.program_id(0) * tile
    lane = tl.expand_dims(first + tl.arange(0, tile), axis)
    column = lane % inner
    block = lane // inner
    along = (block % blocks_in_row) * block_size + row
    places = ((block // blocks_in_row) * n + along) * inner + column
    mask = (lane < lanes) & (row < block_size) & (along < n)
    given = tl.load(x + places, mask, 0.0).to(tl.float32)
    magnitudes = given.to(tl.int32, bitcast=True) & MAGNITUDE
    is_finite = magnitudes < INFINITY
    if not passes:
        is_bad = block_maximum(magnitudes, axis) >= INFINITY
    magnitudes = tl.where(is_finite, magnitudes, 0)
    value = tl.where(is_finite, given, 0.0)
    scale = scale_bits(block_maximum(magnitudes, axis), increment, emax)
    if flushes:
        value = tl.where(magnitudes < SMALLEST_NORMAL, 0.0, value)
    y = value * inverse_of(scale)
    if sub_block > 0:
        own = scale_bits(sub_block_maximum(magnitudes, sub_block, axis), increment, emax)
        unit = own.to(tl.float32, bitcast=True) * inverse_of(scale)
        unit = tl.minimum(tl.maximum(unit, 1.0 / (1 << max_shift)), 1.0)
        spacing = unit
    elif carries:
        # only a positive element can round past the top code; as integers, the bits of negative floats are negative
        largest = tl.maximum(block_maximum(value.to(tl.int32, bitcast=True), axis), 0)
        needed = power_bits(largest, 1 << (22 - mantissa_bits)) - (emax << 23)
        unit = tl.where(needed > scale, 2.0, 1.0)
        spacing = unit * min_unit
    elif is_uniform:
        unit = y * 0 + 1.0
        spacing = unit * min_unit
    else:
        unit = y * 0 + 1.0
        spacing = tl.maximum((y.to(tl.int32, bitcast=True) & INFINITY).to(tl.float32, bitcast=True), min_unit)
    rounded = round_to_spacing(y, spacing, mantissa_bits, rounding)
    elements = tl.minimum(tl.maximum(rounded, unit * lowest), unit * highest)
    result = elements * scale.to(tl.float32, bitcast=True)
    if passes:
        result = tl.where(is_finite, result, given)
    else:
        result = tl.where(is_bad, float("nan"), result)
    tl.store(out + places, result.to(out.dtype.element_ty), mask)
