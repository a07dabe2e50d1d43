"""Exact rounding to the numbers of a format, and exact powers of two.

Adding 1.5 * 2^mantissa * q to y and subtracting it again leaves y rounded to a multiple of q, half to even, because the
sum has no bits below q. q is the spacing of the grid at y: u * 2^-m, where u is the power of two at or below |y|, given
by the exponent bits of y. This is exact while |y| < 2^(mantissa - 1) * q and nothing overflows, which callers ensure.

The other two modes differ only on ties: there d = y - rounded is exactly q/2 in magnitude, and adding 2d leads to the
other neighbour.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quark.formats.arrays import FLOAT32, FLOAT64, ArrayKind, Precision
from quark.formats.spec import ElementFormat, Grid, NonFinite, Rounding


def binade(kind: ArrayKind, y: Any, grid: Grid, precision: Precision) -> Any:
    """The power of two at or below |y|, not below the grid's smallest normal: a float for a uniform grid."""
    if grid.is_uniform:
        return 2.0**grid.min_exponent
    power = kind.from_bits(kind.bits(y, precision) & precision.exponent_mask, precision)
    return kind.xp.clip(power, 2.0**grid.min_exponent, None)


def round_to_spacing(
    kind: ArrayKind, y: Any, unit: Any, mantissa_bits: int, rounding: Rounding, precision: Precision
) -> Any:
    """y rounded to multiples of unit * 2^-mantissa_bits."""
    magic = unit * (1.5 * 2.0 ** (precision.mantissa_bits - mantissa_bits))
    rounded = y + magic
    rounded -= magic
    if rounding is Rounding.HALF_EVEN:
        return rounded
    rest = y - rounded
    half = unit * 2.0 ** (-mantissa_bits - 1)
    is_tie = rest == half if rounding is Rounding.HALF_UP else (abs(rest) == half) & ((rest > 0) == (y > 0))
    return kind.xp.where(is_tie, rounded + 2 * rest, rounded)


def exp2(kind: ArrayKind, exponents: Any, precision: Precision) -> Any:
    """2^exponents exactly, from -128 up; float32's subnormals are composed bit by bit."""
    biased = exponents + precision.exponent_bias
    bits = biased << precision.mantissa_bits
    is_subnormal = biased < 1
    if kind.may_hold(is_subnormal):
        half = 1 << (precision.mantissa_bits - 1)
        bits = kind.xp.where(is_subnormal, half >> kind.xp.clip(-biased, 0, 1), bits)
    return kind.from_bits(kind.as_int(bits, precision), precision)


def exponent_of(kind: ArrayKind, powers: Any, precision: Precision) -> Any:
    """The exponents of powers of two from 2^-127 up, which has an exponent field of 0 in float32."""
    return (kind.bits(powers, precision) >> precision.mantissa_bits) - precision.exponent_bias


def working_precision(grid: Grid, precision: Precision) -> Precision:
    """float64 if rounding by addition would overflow or run out of bits in float32 (bfloat16, wide integers)."""
    fits = grid.mantissa_bits < FLOAT32.mantissa_bits - 1
    fits &= grid.max_exponent + 2 + FLOAT32.mantissa_bits - grid.mantissa_bits <= FLOAT32.exponent_bias
    return precision if fits else FLOAT64


def representable_limits(grid: Grid, precision: Precision) -> tuple[float, float]:
    """The grid's limits, moved inward to numbers of the output type: 2^31 - 1 is not a float32 number."""
    if precision == FLOAT64:
        return grid.lowest, grid.highest
    highest = np.float32(grid.highest)
    if float(highest) > grid.highest:
        highest = np.nextafter(highest, np.float32(0))
    return grid.lowest, float(highest)


def quantize_dequantize_elements(
    kind: ArrayKind, x: Any, fmt: ElementFormat, rounding: Rounding, nonfinite: NonFinite
) -> Any:
    """x with every element rounded to a plain format, an integer or a small float without a scale; same shape and type.

    Finite values beyond the range saturate, even if the format has an Inf. NaN stays NaN. Inf stays Inf if the format
    has one, else becomes NaN (policy `block_nan`, an element being its own block); `passthrough` copies it.
    """
    own = kind.precision(x)
    lowest, highest = representable_limits(fmt.grid, own)
    grid = fmt.grid
    precision = working_precision(grid, own)
    flat = kind.contiguous(x).reshape(-1)
    out = kind.empty_like(flat)
    step = kind.chunk_elements(x)
    for start in range(0, flat.shape[0], step):
        part = flat[start : start + step]
        wide = kind.widen(part, precision)
        # saturating first keeps the sums of rounding in range; the limits are on the grid, so nothing rounds past them
        clipped = kind.xp.clip(wide, lowest, highest)
        unit = binade(kind, clipped, grid, precision)
        rounded = round_to_spacing(kind, clipped, unit, grid.mantissa_bits, rounding, precision)
        is_finite = abs(wide) < float("inf")
        if kind.may_hold(~is_finite):
            special = wide if nonfinite is NonFinite.PASSTHROUGH else wide * float("nan")
            rounded = kind.xp.where(is_finite, rounded, special)
        out[start : start + step] = kind.narrow(rounded, part)
    return out.reshape(x.shape)
