"""The constants of the NPU that differ from those of the float operators.

It divides by multiplying with an integer and shifting: a mean over n numbers is their sum times k / 2^s, which is the
true mean times a factor close to one,

    factor = n * k / 2^s,   k = round(2^s / n),   s of 0..6 + ceil(log2 n) the first with the least |k / 2^s - 1 / n|

For some window sizes the pair is fixed. Slopes and bounds are integers over a power of two as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

from quark.errors import InvalidValueError

HARD_SIGMOID_FACTOR = 2731 / 16384 * 6  # the slope is 2731 / 2^14 instead of 1 / 6

# exp(x) for x of 0..ln 2 as a polynomial, from the third power down to the constant; exact in bfloat16
EXPONENTIAL = (0.21875, 0.486328125, 1.0, 1.0)

# Side of a square window: (k, 2^s)
_FIXED_WINDOWS: Mapping[int, tuple[int, int]] = MappingProxyType(
    {3: (7, 64), 5: (10, 256), 6: (7, 256), 7: (21, 1024), 14: (21, 4096)}
)
_LARGEST_SIDE = 255  # larger means are not computed on the NPU


def leaky_relu_alpha(alpha: float) -> float:
    """The slope as a multiple of 1 / 256.

    >>> leaky_relu_alpha(0.1) == 26 / 256
    True
    """
    return round(256 * alpha) / 256


def average_pool_factor(height: int, width: int) -> float:
    """The NPU's mean over a window as a multiple of the true mean; 1 if a side exceeds 255.

    >>> average_pool_factor(7, 7) == 49 * 21 / 1024
    True
    """
    if min(height, width) < 1:
        raise InvalidValueError(f"a window of {height} x {width}: expected sides of 1 or more")
    if max(height, width) > _LARGEST_SIDE:
        return 1.0
    if height == width and height in _FIXED_WINDOWS:
        multiplier, power = _FIXED_WINDOWS[height]
        return height * width * multiplier / power
    return mean_factor(height * width)


def mean_factor(count: int) -> float:
    """The NPU's mean over `count` numbers as a multiple of the true mean.

    >>> mean_factor(64), mean_factor(3)
    (1.0, 0.99609375)
    """
    if count < 1:
        raise InvalidValueError(f"a mean over {count} numbers: expected 1 or more")
    shifts = range(7 + (count - 1).bit_length())
    # k / 2^shift, the nearest to 1 / count; a tie goes to the even k
    multipliers = [Fraction(round(Fraction(1 << shift, count)), 1 << shift) for shift in shifts]
    return float(count * min(multipliers, key=lambda multiplier: abs(multiplier - Fraction(1, count))))


def clip_bound(bound: float) -> float:
    """A bound of Clip, rounded to an integer of the NPU.

    >>> clip_bound(6.4), clip_bound(1e9)
    (6.0, 127.0)
    """
    return float(round(max(-128.0, min(127.0, bound))))
