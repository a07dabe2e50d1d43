"""Round to an element type and choose a block's scale with nothing but sums and products of floats.

With p mantissa bits, the difference q - (1 - 2^-(p+1)) * q is the last place of q, a power of two: the product lies
between half and one place below q and is rounded to one. Only a q that is itself a power of two would be wrong. So
with q = (2^p + 1) * v the difference is the power of two at or below |v| (after Rump).

A scale is found that way in float64, where no float32 overflows. The scale rule wants the next power from some point
between two float32 numbers on; a factor moves this point to the next power:

    q = amax * (2^52 + 1) / 2^emax * 2/turn      floor, mse   turn = 2, never
                                                 ceil         just above 1
                                                 even         just below 2 - 2^-(m+1)
                                                 rceil        just above the largest element's significand

The spacing of the elements at y is s = 2^-m times the power of two at or below |y|, in float32, and (y + c) - c with
c = 1.5 * 2^23 * s is y rounded half to even to multiples of s. Other modes differ on ties only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quark.formats.spec import SCALE_MAX_EXPONENT, SCALE_MIN_EXPONENT, Grid, Rounding, ScaleRule
from quark.ops.function_body import BOOL, DOUBLE, FLOAT, FunctionBody, Place, Value
from quark.ops.schema import ROUNDING_MODE, ROUNDING_MODES, SCALE_RULE

PHI32, PHI64 = 2.0**23 + 1.0, 2.0**52 + 1.0
# Negative, because ONNX Runtime takes a factor that float32 would round to 1 for 1, and leaves the product out.
MINUS_BELOW_ONE: dict[int, float] = {FLOAT: 2.0**-24 - 1.0, DOUBLE: 2.0**-53 - 1.0}
HALF_FLOAT32_PLACE = 2.0**-24
ROUNDING_FACTOR = 1.5 * 2.0**23
FLOAT32_MAX = float(np.finfo(np.float32).max)
SCALE_LIMITS = (2.0**SCALE_MIN_EXPONENT, 2.0**SCALE_MAX_EXPONENT)
RULES = tuple(ScaleRule)


def last_place(q: Value) -> Value:
    """What one unit in the last place of q is worth, with q's sign; q must be no power of two."""
    return q + q * MINUS_BELOW_ONE[q.type]


def scale_factor(grid: Grid, rule: ScaleRule) -> float:
    """What amax is multiplied with, so that the last place of the product is the scale."""
    turns = {
        ScaleRule.CEIL: 1.0 + HALF_FLOAT32_PLACE,
        ScaleRule.EVEN: 2.0 - 2.0 ** -(grid.mantissa_bits + 1) - HALF_FLOAT32_PLACE,
        ScaleRule.RCEIL: grid.highest * 2.0**-grid.max_exponent + HALF_FLOAT32_PLACE,
    }
    return PHI64 * 2.0**-grid.max_exponent * (2.0 / turns.get(rule, 2.0))


@dataclass(frozen=True)
class Elements:
    """An element type and the choices about rounding, as scalars of the graph."""

    spacing_factor: Value  # what y is multiplied with, so that the last place is the spacing; 0 in a uniform type
    least_spacing: Value
    lowest: Value
    highest: Value
    scale_factor: Value  # float64
    rule: Place  # among RULES
    is_mse: Value
    is_half_even: Value
    tie: Value  # how far a tie is from its neighbours, in spacings; out of reach for half even
    least_sign: Value  # 1 for half up, -1 for half away
    is_uniform: Value | None  # None: known to be

    @classmethod
    def of(cls, body: FunctionBody, grids: Sequence[Grid], place: Place) -> Elements:
        """The grid at that place; the rest is read from the attributes."""
        rule = body.place(SCALE_RULE, SCALE_RULE.choices)
        mode = body.place(ROUNDING_MODE, ROUNDING_MODE.choices)
        factors = place.lookup([[scale_factor(grid, rule) for rule in RULES] for grid in grids], DOUBLE)
        are_uniform = [grid.is_uniform for grid in grids]
        return cls(
            spacing_factor=place.lookup([0.0 if g.is_uniform else PHI32 * 2.0**-g.mantissa_bits for g in grids]),
            least_spacing=place.lookup([2.0 ** (grid.min_exponent - grid.mantissa_bits) for grid in grids]),
            lowest=place.lookup([grid.lowest for grid in grids]),
            highest=place.lookup([grid.highest for grid in grids]),
            scale_factor=rule.lookup(factors),
            rule=rule,
            is_mse=rule.lookup([rule is ScaleRule.MSE for rule in RULES], BOOL),
            is_half_even=mode.lookup([rounding is Rounding.HALF_EVEN for rounding in ROUNDING_MODES], BOOL),
            tie=mode.lookup([2.0 if rounding is Rounding.HALF_EVEN else 0.5 for rounding in ROUNDING_MODES]),
            least_sign=mode.lookup([1.0 if rounding is Rounding.HALF_UP else -1.0 for rounding in ROUNDING_MODES]),
            is_uniform=None if all(are_uniform) else place.lookup(are_uniform, BOOL),
        )

    def scale(self, amax: Value, low: Value | float, high: float) -> Value:
        """The scales of blocks with these largest magnitudes, confined to low..high; a row each."""
        return last_place(amax.cast(DOUBLE) * self.scale_factor).clip(low, high).cast(FLOAT)

    def quantize(self, y: Value) -> Value:
        """A row of values in units of the scale, rounded to elements."""
        return self.round(y, self._spacing(y)).clip(self.lowest, self.highest)

    def _spacing(self, y: Value) -> Value:
        """How far apart the elements are at y: one number in a uniform type."""
        if self.is_uniform is None:
            return self.least_spacing
        return y.body.shortcut(
            self.is_uniform,
            lambda: self.least_spacing,
            lambda: y.body.op("Max", abs(last_place(y * self.spacing_factor)), self.least_spacing),
        )

    def round(self, y: Value, spacing: Value) -> Value:
        """A row of values to the nearest multiples of spacing; ties as the attribute says."""
        large = spacing * ROUNDING_FACTOR
        rounded = (y + large) - large
        return y.body.shortcut(self.is_half_even, lambda: rounded, lambda: self._move_ties(y, rounded, spacing))

    def _move_ties(self, y: Value, rounded: Value, spacing: Value) -> Value:
        """From half even to half up or half away: a tie that was rounded against that direction moves on."""
        sign = y.body.op("Max", y.body.op("Sign", y), self.least_sign)
        is_against = ((y - rounded) * sign).equals(spacing * self.tie)
        return is_against.where(rounded + spacing * sign, rounded)
