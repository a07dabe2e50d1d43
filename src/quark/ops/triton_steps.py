"""Affine, LSQ and TQT quantizers as Triton kernels; `fake_quantize` has the formulas, `fused_cuda` the launches.

Arrays are (channels, inner), contiguous, each channel with its own parameter. A program takes `rounds` blocks of one
channel, one after the other; `pieces` programs share a channel. What the gradient of a parameter is made of is summed
in float64 by each program for itself and then in the order of the programs, so that the same inputs give the same bits.

Numbers are those of the CPU: division rounds to nearest, nothing is contracted (`enable_fp_fusion=False` goes with
every launch), and rounding is two additions, which no library for one vendor's devices is needed for.
"""

from __future__ import annotations

import triton
import triton.language as tl

AFFINE = tl.constexpr(0)
STEP = tl.constexpr(1)
THRESHOLD = tl.constexpr(2)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
LN2 = tl.constexpr(0.69314718055994530942)


@triton.jit
def round_half_even(u):
    """From 2^23 on there are whole numbers only; NaN stays."""
    size = tl.abs(u)
    whole = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)
    return tl.where(u < 0, -whole, whole)


@triton.jit
def step_of(parameter, channel, kind: tl.constexpr, step_shift: tl.constexpr):
    """The step of a channel, and its inverse where that is exact; else 1, which is not used."""
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
    """The limits of the levels, which are codes less the zero point."""
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
    """The sums of a channel's programs, added up in their order."""
    channel = tl.program_id(0).to(tl.int64)
    step, _ = step_of(parameter, channel, kind, step_shift)
    total = tl.zeros([block], tl.float64)
    for turn in range(rounds):
        places = turn * block + tl.arange(0, block)
        total += tl.load(sums + channel * pieces + places, places < pieces, 0.0)
    tl.store(slopes + channel, (tl.sum(total) * factor_of(step, slope_factor, kind)).to(tl.float32))


@triton.jit
def factor_of(step, slope_factor, kind: tl.constexpr):
    """What turns the sum of slopes, in steps, into the gradient of the parameter."""
    if kind == THRESHOLD:
        factor = step.to(tl.float64) * LN2
    else:
        factor = slope_factor
    return factor
