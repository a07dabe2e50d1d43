"""Powers of two and their exponents, exactly."""

from __future__ import annotations

from typing import Any

from quark.formats.arrays import ArrayKind, Precision


def exp2(kind: ArrayKind, exponents: Any, precision: Precision) -> Any:
    """2^exponents exactly, from -128 up; float32's subnormals must be spelled out in bits."""
    biased = exponents + precision.exponent_bias
    bits = biased << precision.mantissa_bits
    is_subnormal = biased < 1
    if kind.may_hold(is_subnormal):
        half = 1 << (precision.mantissa_bits - 1)
        bits = kind.xp.where(is_subnormal, half >> kind.xp.clip(-biased, 0, 1), bits)
    return kind.from_bits(kind.as_int(bits, precision), precision)


def exponent_of(kind: ArrayKind, powers: Any, precision: Precision) -> Any:
    """The exponents of powers of two from 2^-127 up; float32's 2^-127 has a field of 0, as it should."""
    return (kind.bits(powers, precision) >> precision.mantissa_bits) - precision.exponent_bias
