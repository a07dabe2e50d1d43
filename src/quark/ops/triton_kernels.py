"""Triton kernels: affine, LSQ and TQT quantizers, and block formats. `fused_fake_quantize` launches them.

The formulas are those of `fake_quantize` and `quark.formats.block`, and the numbers are those of the CPU: division
rounds to nearest, nothing is contracted (every launch has `enable_fp_fusion=False`), and rounding is two additions, so
no vendor's math library is needed.

Trained quantizers see arrays as (channels, inner), contiguous, each channel with its own parameter. A program handles
`rounds` blocks of one channel, one after the other; `pieces` programs share a channel. The terms of a parameter's
gradient are summed in float64, first within each program and then in the order of the programs, so the same inputs give
the same bits.

Block formats see arrays as (outer, n, inner) with blocks along n. A lane is one block: `inner` lanes are neighbours in
memory; if `inner` is 1, blocks themselves are contiguous. A program handles a tile of whole blocks, (rows, lanes), or
(lanes, rows) if blocks are contiguous: the last axis is the one along memory. `rows` is the block size rounded up to a
power of two. Powers of two are handled as the bits of floats, where comparing, clipping and dividing by another power
are integer operations.
"""

from __future__ import annotations

import triton
import triton.language as tl

AFFINE = tl.constexpr(0)
STEP = tl.constexpr(1)
THRESHOLD = tl.constexpr(2)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
LN2 = tl.constexpr(0.69314718055994530942)
INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SMALLEST_NORMAL_BITS = tl.constexpr(0x00800000)
MIN_SCALE = tl.constexpr(0x00400000)  # 2^-127
MAX_SCALE = tl.constexpr(0x7F000000)  # 2^127
HALF_AWAY = tl.constexpr(0)
HALF_UP = tl.constexpr(1)
HALF_EVEN = tl.constexpr(2)


@triton.jit
def round_half_even(u):
    """From 2^23 on, all numbers are whole; NaN stays."""
    size = tl.abs(u)
    whole = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)
    return tl.where(u < 0, -whole, whole)


@triton.jit
def step_of(parameter, channel, kind: tl.constexpr, step_shift: tl.constexpr):
    """The step of a channel, and its inverse if that is exact; else 1, which is not used."""
    value = tl.load(parameter + channel).to(tl.float32)
    inverse = value * 0 + 1
    if kind == STEP:
        value = tl.where(value < SMALLEST_NORMAL, SMALLEST_NORMAL, value)
    if kind == THRESHOLD:
        whole = round_half_even(value)
        # tl.ceil would read subnormal numbers as zero
        wanted = tl.where(whole < value, whole + 1, whole) - step_shift
        exponent = tl.where(wanted < -126, -126, tl.where(wanted > 126, 126, wanted))
        exponent = tl.where(value == value, exponent, 0).to(tl.int32)
        inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        value = tl.where(value == value, ((127 + exponent) << 23).to(tl.float32, bitcast=True), value)
    return value, inverse


@triton.jit
def steps_of(x, step, inverse, kind: tl.constexpr):
    """x in units of the step."""
    if kind == THRESHOLD:
        steps = tl.where(step == step, x * inverse, step)
    else:
        steps = tl.div_rn(x, step + tl.zeros_like(x))
    return steps


@triton.jit
def clip(u, lowest, highest):
    """NaN stays."""
    return tl.where(u < lowest, lowest, tl.where(u > highest, highest, u))


@triton.jit
def limits_of(zero_point, channel, lowest, highest, kind: tl.constexpr):
    """The limits of the levels, which are codes minus the zero point."""
    if kind == AFFINE:
        middle = tl.load(zero_point + channel).to(tl.float32)
        lowest = lowest - middle
        highest = highest - middle
    return lowest, highest


@triton.jit
def values_kernel(
    x, out, parameter, zero_point, inner, pieces, lowest, highest,
    kind: tl.constexpr, step_shift: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Quantize x into `out`."""
    program = tl.program_id(0)
    channel = (program // pieces).to(tl.int64)
    columns = (program % pieces).to(tl.int64) * block + tl.arange(0, block)
    mask = columns < inner
    places = channel * inner + columns
    step, inverse = step_of(parameter, channel, kind, step_shift)
    low, high = limits_of(zero_point, channel, lowest, highest, kind)
    steps = steps_of(tl.load(x + places, mask, 0.0).to(tl.float32), step, inverse, kind)
    levels = round_half_even(clip(steps, low, high))
    if kind == AFFINE:
        levels = tl.where(levels == levels, levels, 0.0)
    tl.store(out + places, (levels * step).to(out.dtype.element_ty), mask)


@triton.jit
def gradients_kernel(
    x, gradient, x_gradient, parameter, zero_point, sums, slopes,
    inner, pieces, lowest, highest, slope_factor,
    kind: tl.constexpr, step_shift: tl.constexpr, is_whole: tl.constexpr, rounds: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """`is_whole`: a program has its channel to itself, and writes the gradient of the parameter."""
    program = tl.program_id(0)
    channel = (program // pieces).to(tl.int64)
    first = (program % pieces).to(tl.int64) * (rounds * block)
    step, inverse = step_of(parameter, channel, kind, step_shift)
    low, high = limits_of(zero_point, channel, lowest, highest, kind)
    total = tl.zeros([block], tl.float64)
    for turn in range(rounds):
        columns = first + turn * block + tl.arange(0, block)
        mask = columns < inner
        places = channel * inner + columns
        given = tl.load(gradient + places, mask, 0.0)
        steps = steps_of(tl.load(x + places, mask, 0.0).to(tl.float32), step, inverse, kind)
        rounded = round_half_even(steps)
        if kind == STEP:
            is_inside = (steps > low) & (steps < high)
        else:
            is_inside = (rounded >= low) & (rounded <= high)
        tl.store(x_gradient + places, tl.where(is_inside, given, 0.0).to(x_gradient.dtype.element_ty), mask)
        if kind != AFFINE:
            slope = tl.where(is_inside, rounded - steps, clip(steps, low, high))
            slope = tl.where(slope == slope, slope, 0.0)
            total += given.to(tl.float64) * slope.to(tl.float64)
    if kind != AFFINE:
        if is_whole:
            tl.store(slopes + channel, (tl.sum(total) * factor_of(step, slope_factor, kind)).to(tl.float32))
        else:
            tl.store(sums + program, tl.sum(total))


@triton.jit
def slopes_kernel(
    sums, slopes, parameter, pieces, slope_factor,
    kind: tl.constexpr, step_shift: tl.constexpr, rounds: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Add up the sums of a channel's programs, in their order."""
    channel = tl.program_id(0).to(tl.int64)
    step, _ = step_of(parameter, channel, kind, step_shift)
    total = tl.zeros([block], tl.float64)
    for turn in range(rounds):
        places = turn * block + tl.arange(0, block)
        total += tl.load(sums + channel * pieces + places, places < pieces, 0.0)
    tl.store(slopes + channel, (tl.sum(total) * factor_of(step, slope_factor, kind)).to(tl.float32))


@triton.jit
def factor_of(step, slope_factor, kind: tl.constexpr):
    """The factor from the sum of slopes, in steps, to the gradient of the parameter."""
    if kind == THRESHOLD:
        factor = step.to(tl.float64) * LN2
    else:
        factor = slope_factor
    return factor


@triton.jit
def power_bits(amax, increment: tl.constexpr):
    """The bits of the power of two at or below amax, or of the next one if the increment carries that far."""
    if increment != 0:
        amax = amax + tl.where(amax < SMALLEST_NORMAL_BITS, increment >> 1, increment)
    return amax & INFINITY


@triton.jit
def scale_bits(amax, increment: tl.constexpr, emax: tl.constexpr):
    """The bits of the scale of a block with that largest magnitude."""
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
    """The maximum of each block, in a shape that broadcasts with the tile."""
    return tl.expand_dims(tl.max(v, axis), axis)


@triton.jit
def sub_block_maximum(v, size: tl.constexpr, axis: tl.constexpr):
    """The maximum of each run of `size` neighbours in a block, repeated for each of them."""
    if axis == 0:
        parts = tl.reshape(v, [v.shape[0] // size, size, v.shape[1]])
        largest = tl.expand_dims(tl.max(parts, 1), 1)
        return tl.reshape(tl.broadcast_to(largest, [v.shape[0] // size, size, v.shape[1]]), [v.shape[0], v.shape[1]])
    parts = tl.reshape(v, [v.shape[0], v.shape[1] // size, size])
    largest = tl.expand_dims(tl.max(parts, 2), 2)
    return tl.reshape(tl.broadcast_to(largest, [v.shape[0], v.shape[1] // size, size]), [v.shape[0], v.shape[1]])


@triton.jit
def float_scale(amax, tensor_scale, highest, scale_highest, scale_min_unit, scale_mantissa_bits: tl.constexpr):
    """The bits of the float scale of a block with that largest magnitude: the tensor's scale times a small float."""
    largest = amax.to(tl.float32, bitcast=True)
    factor = tl.load(tensor_scale)
    divisor = tl.where(factor == 0, 1.0, factor)
    wanted = tl.div_rn(tl.div_rn(largest, highest + tl.zeros_like(largest)), divisor + tl.zeros_like(largest))
    bounded = tl.minimum(wanted, scale_highest)
    unit = tl.maximum((bounded.to(tl.int32, bitcast=True) & INFINITY).to(tl.float32, bitcast=True), scale_min_unit)
    scale = round_to_spacing(bounded, unit, scale_mantissa_bits, HALF_EVEN) * factor
    return scale.to(tl.int32, bitcast=True)


@triton.jit
def quotient(value, scale, lowest, highest):
    """value over a float scale, given by its bits, within the limits; 0 if the scale is 0."""
    divisor = scale.to(tl.float32, bitcast=True)
    y = tl.div_rn(value, tl.where(divisor == 0, 1.0, divisor) + tl.zeros_like(value))
    return tl.where(divisor == 0, 0.0, tl.minimum(tl.maximum(y, lowest), highest))


@triton.jit
def blocks_kernel(
    x, out, tensor_scale, n, inner, blocks_in_row, lanes, block_size, lowest, highest, min_unit,
    scale_highest, scale_min_unit, scale_mantissa_bits: tl.constexpr, has_float_scale: tl.constexpr,
    increment: tl.constexpr, emax: tl.constexpr, mantissa_bits: tl.constexpr, is_uniform: tl.constexpr,
    sub_block: tl.constexpr, max_shift: tl.constexpr, flushes: tl.constexpr, carries: tl.constexpr,
    rounding: tl.constexpr, passes: tl.constexpr,
    axis: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr, is_long: tl.constexpr,
):  # fmt: skip
    """`axis` is the axis of blocks in the tile. `min_unit` is the power of two at the grid's lowest normal number, and
    `scale_min_unit` that of float scales. `tensor_scale` points to the tensor's scale, and matters for these only.
    `passes`: NaN and Inf are copied. `is_long`: places need more than 31 bits, with which a GPU divides slowly."""
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
    amax = block_maximum(magnitudes, axis)
    scale = (
        float_scale(amax, tensor_scale, highest, scale_highest, scale_min_unit, scale_mantissa_bits)
        if has_float_scale
        else scale_bits(amax, increment, emax)
    )
    if flushes:
        value = tl.where(magnitudes < SMALLEST_NORMAL_BITS, 0.0, value)
    y = quotient(value, scale, lowest, highest) if has_float_scale else value * inverse_of(scale)
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
