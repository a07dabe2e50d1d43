"""Round values to a grid, exactly.

Adding 1.5 * 2^mantissa * q to y and taking it away again leaves y rounded to a multiple of q, half to even: the sum
has no bits below q. q is the spacing of the grid at y, u * 2^-m with u the power of two at or below |y|, which is what
the exponent bits of y say. Exact while |y| < 2^(mantissa - 1) * q and nothing overflows, which the callers see to.

The other two modes differ only on ties: there d = y - rounded is exactly q/2 in magnitude, and 2d leads to the other
neighbour.
"""

from __future__ import annotations

from typing import Any

from quark.formats.arrays import ArrayKind, Precision
from quark.formats.spec import Grid, Rounding


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


def round_to_grid(kind: ArrayKind, y: Any, grid: Grid, rounding: Rounding, precision: Precision) -> Any:
    """y, which lies between the grid's limits, rounded to the nearest number of it."""
    unit = binade(kind, y, grid, precision)
    return round_to_spacing(kind, y, unit, grid.mantissa_bits, rounding, precision)
