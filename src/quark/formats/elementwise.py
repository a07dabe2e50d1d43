"""Round each value to a plain format: an integer or a small float, with no scale.

Finite values beyond the range saturate, also where the format has an Inf. NaN stays NaN. Inf stays Inf where the
format has one, and becomes NaN where it has none (policy `block_nan`, an element being its own block); `passthrough`
copies it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quark.formats.arrays import FLOAT32, FLOAT64, ArrayKind, Precision
from quark.formats.rounding import round_to_grid
from quark.formats.spec import ElementFormat, Grid, NonFinite, Rounding


def working_precision(grid: Grid, precision: Precision) -> Precision:
    """float64 where rounding by addition would overflow or run out of bits in float32 (bfloat16, wide integers)."""
    fits = grid.mantissa_bits < FLOAT32.mantissa_bits - 1
    fits &= grid.max_exponent + 2 + FLOAT32.mantissa_bits - grid.mantissa_bits <= FLOAT32.exponent_bias
    return precision if fits else FLOAT64


def representable_limits(grid: Grid, precision: Precision) -> tuple[float, float]:
    """The grid's limits, moved inward to numbers of the output type: 2^31 - 1 is none of float32."""
    if precision == FLOAT64:
        return grid.lowest, grid.highest
    highest = np.float32(grid.highest)
    if float(highest) > grid.highest:
        highest = np.nextafter(highest, np.float32(0))
    return grid.lowest, float(highest)


def quantize_dequantize_elements(
    kind: ArrayKind, x: Any, fmt: ElementFormat, rounding: Rounding, nonfinite: NonFinite
) -> Any:
    """x with every element rounded to `fmt`, same shape and type."""
    own = kind.precision(x)
    lowest, highest = representable_limits(fmt.grid, own)
    grid = Grid(fmt.grid.mantissa_bits, fmt.grid.min_exponent, fmt.grid.max_exponent, lowest, highest)
    precision = working_precision(grid, own)
    flat = kind.contiguous(x).reshape(-1)
    out = kind.empty_like(flat)
    step = kind.chunk_elements(x)
    for start in range(0, flat.shape[0], step):
        part = flat[start : start + step]
        wide = kind.widen(part, precision)
        # saturating first keeps the sums of rounding in range; the limits are on the grid, so nothing rounds past them
        rounded = round_to_grid(kind, kind.xp.clip(wide, lowest, highest), grid, rounding, precision)
        is_finite = abs(wide) < float("inf")
        if kind.may_hold(~is_finite):
            special = wide if nonfinite is NonFinite.PASSTHROUGH else wide * float("nan")
            rounded = kind.xp.where(is_finite, rounded, special)
        out[start : start + step] = kind.narrow(rounded, part)
    return out.reshape(x.shape)
