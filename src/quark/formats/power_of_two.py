"""Power-of-two scales: one position for a whole tensor, scale = 2^-position.

A rule derives the position from the extremes of the data:

    position = the largest p with  max(x) * 2^p <= highest_limit  and  -min(x) * 2^p <= lowest_limit

For b bits, `NON_OVERFLOW` has the limits 2^(b-1) -+ 1/2: all values within round to a code, so nothing overflows. The
`NEAREST` rules round -log2(2 max|x| / (qmax - qmin)) to the nearest integer. Half way between two positions is a factor
of sqrt(2), so their limits are (qmax - qmin) / 2 * sqrt(2), and values up to that factor beyond the range are clipped.
Comparing the significands of frexp is exact, unlike a logarithm: sqrt(2) is irrational, so rounding a limit down to
float64 moves no number across it.

`min_mse_position` tries the rule's `offsets` from there and keeps the smallest sum of (x_hat - x)^2, the largest scale
of equals. Codes are all of -2^(b-1)..2^(b-1)-1; an unsigned format with the middle as zero point has the same ones.
Errors are exact for float32 data and summed in float64.

All zeros (or no elements) have the rule's `zero_position`. Positions are limited to those of float32 scales, which
matters for subnormal data: 2^-127 is subnormal itself. NaN and Inf are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.formats.arrays import FLOAT64, ArrayKind, array_kind, as_index
from quark.formats.rounding import exp2

_FLOAT32_TINY = float(np.finfo(np.float32).tiny)
MAX_SCALE_POSITION = 1022  # beyond, 2^-position is not a normal float64


@dataclass(frozen=True)
class PositionRule:
    """How a position is derived from the data.

    A nearest rule rounds to the nearest position and may clip. With `is_signed` its range is that of a symmetric signed
    format (2^b - 2 steps), else of an unsigned one (2^b - 1). `offsets` are the candidates of `min_mse_position`,
    smallest first; for others, use `dataclasses.replace(rule, offsets=(-2, -1, 0, 1, 2))`.
    """

    name: str
    is_nearest: bool
    is_signed: bool
    offsets: tuple[int, ...]
    zero_position: int
    min_position: int
    max_position: int

    def limits(self, bits: int) -> tuple[float, float]:
        """(lowest_limit, highest_limit) for that many bits, as float64 numbers not above the true ones."""
        half = 1 << (bits - 1)
        if not self.is_nearest:
            return half + 0.5, half - 0.5
        reach = Fraction(half - 1) if self.is_signed else Fraction(2 * half - 1, 2)
        square = 2 * reach * reach
        limit = math.sqrt(square)  # rounded down, to the largest float64 whose square is not above it
        while Fraction(limit) ** 2 > square:
            limit = math.nextafter(limit, 0.0)
        while Fraction(math.nextafter(limit, math.inf)) ** 2 <= square:
            limit = math.nextafter(limit, math.inf)
        return limit, limit

    def smallest_magnitude(self, bits: int) -> float:
        """Data below this count as zero: a nearest rule has no scales below float32's normal numbers."""
        if not self.is_nearest:
            return 0.0
        return _FLOAT32_TINY * ((1 << (bits - 1)) - (1.0 if self.is_signed else 0.5))

    def __str__(self) -> str:
        return self.name


NON_OVERFLOW = PositionRule("non_overflow", False, True, (0, 1, 2, 3, 4), 127, -128, 127)
NEAREST_SIGNED = PositionRule("nearest_signed", True, True, (-1, 0, 1, 2, 3), 0, -127, 127)
NEAREST_UNSIGNED = PositionRule("nearest_unsigned", True, False, (-1, 0, 1, 2, 3), 0, -127, 127)

POSITION_RULES = (NON_OVERFLOW, NEAREST_SIGNED, NEAREST_UNSIGNED)


def non_overflow_position(x: Any, bits: int = 8) -> int:
    """The largest position at which no element of x is clipped by more than rounding.

    >>> non_overflow_position(np.array([1.4, -0.2]))
    6
    """
    return find_position(x, bits, NON_OVERFLOW)


def find_position(x: Any, bits: int = 8, rule: PositionRule = NON_OVERFLOW) -> int:
    """The rule's position for all of x, a numpy array or a torch tensor."""
    kind = array_kind(x)
    kind.precision(x)
    if not math.prod(x.shape):
        return rule.zero_position
    return int(position_of_range(x.min(), x.max(), bits, rule))


def position_of_range(lowest: Any, highest: Any, bits: int = 8, rule: PositionRule = NON_OVERFLOW) -> Any:
    """The positions for ranges of any shape, as integers: for channels, or for ranges collected over batches."""
    kind = array_kind(lowest)
    low, high = -kind.widen(lowest, FLOAT64), kind.widen(highest, FLOAT64)
    if not bool((kind.xp.isfinite(low) & kind.xp.isfinite(high)).all()):
        raise InvalidValueError("x: NaN or Inf has no position; remove it, or find where it comes from")
    if not 2 <= as_index("bits", bits) <= 32:
        raise InvalidValueError(f"bits {bits}: expected 2 to 32")
    lowest_limit, highest_limit = rule.limits(bits)
    position = kind.xp.minimum(_largest_fit(kind, low, lowest_limit), _largest_fit(kind, high, highest_limit))
    position = kind.xp.clip(position, rule.min_position, rule.max_position)
    largest = kind.xp.maximum(low, high)
    is_zero = (largest <= 0) | (largest < rule.smallest_magnitude(bits))
    return kind.xp.where(is_zero, rule.zero_position, position)


def min_mse_position(x: Any, bits: int = 8, rule: PositionRule = NON_OVERFLOW) -> int:
    """The candidate of the rule with the smallest squared error for x; the smallest of equals.

    >>> min_mse_position(np.array([1.02] + 100 * [0.1]))  # without overflow it is 6
    7
    """
    kind = array_kind(x)
    start = find_position(x, bits, rule)
    candidates = [min(max(start + step, rule.min_position), rule.max_position) for step in rule.offsets]
    half, flat = 1 << (bits - 1), x.reshape(-1)
    step = kind.chunk_elements(flat)
    totals = []
    for position in candidates:
        total: Any = 0.0  # sum of (x_hat - x)^2, in float64
        for start in range(0, flat.shape[0], step):
            wide = kind.widen(flat[start : start + step], FLOAT64)
            codes = kind.xp.clip(kind.rint(wide * math.ldexp(1.0, position)), -half, half - 1)
            error = codes * math.ldexp(1.0, -position) - wide
            total = total + (error * error).sum()
        totals.append(float(total))
    return candidates[totals.index(min(totals))]


def scale_of_position(position: Any) -> Any:
    """2^-position exactly: a float for an integer, float64 for an array of integers.

    >>> scale_of_position(7)
    0.0078125
    """
    if isinstance(position, int):
        if abs(position) > MAX_SCALE_POSITION:
            raise InvalidValueError(f"position {position}: expected -{MAX_SCALE_POSITION}..{MAX_SCALE_POSITION}")
        return math.ldexp(1.0, -position)
    kind = array_kind(position)
    if not str(position.dtype).rpartition(".")[2].startswith(("int", "uint")):
        raise UnsupportedTypeError(f"position: expected integers, got {position.dtype}")
    if kind.may_hold(abs(kind.as_int(position, FLOAT64)) > MAX_SCALE_POSITION):
        raise InvalidValueError(f"position: expected -{MAX_SCALE_POSITION}..{MAX_SCALE_POSITION}")
    return exp2(kind, -kind.as_int(position, FLOAT64), FLOAT64)


def _largest_fit(kind: ArrayKind, magnitude: Any, limit: float) -> Any:
    """The largest p with magnitude * 2^p <= limit; very large if the magnitude is not positive."""
    significand, exponent = kind.xp.frexp(magnitude)
    limit_significand, limit_exponent = math.frexp(limit)
    fit = limit_exponent - exponent - kind.xp.where(significand > limit_significand, 1, 0)
    return kind.xp.where(magnitude > 0, fit, 1 << 20)
