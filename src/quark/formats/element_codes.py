"""The bits of a single number of an element format, and rows of such bits.

    floats                sign, exponent, mantissa, as IEEE 754 orders them; Inf and NaN where the format has them
    symmetric integers    sign and magnitude, so that there is a -0
    other integers        two's complement; unsigned ones as they are

In a row, element i of b bits takes the bits i*b to i*b+b-1, bit 0 being the lowest of byte 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.formats.arrays import Precision, array_kind
from quark.formats.spec import ElementFormat, FloatFormat, IntFormat, Specials

Codes = NDArray[np.unsignedinteger[Any]]
Floats = NDArray[np.floating[Any]]

_NUMPY = array_kind(np.zeros(0))
_TABLE_BITS = 16  # codes up to this length are decoded by a table of all of them


def unsigned_dtype(bits: int) -> np.dtype[Any]:
    """The narrowest unsigned type for codes of that many bits."""
    for width in (8, 16, 32):
        if bits <= width:
            return np.dtype(f"uint{width}")
    raise InvalidValueError(f"codes of {bits} bits: expected at most 32")


def encode_elements(fmt: ElementFormat, values: Floats) -> Codes:
    """The codes of numbers that the format has; what lies between two of them is not rounded but cut."""
    if isinstance(fmt, FloatFormat):
        bits = _float_magnitudes(fmt, np.abs(values), _NUMPY.precision(values)) | _sign_bits(fmt, values)
    elif fmt.symmetric:
        bits = np.abs(values * 2.0**fmt.fraction_bits).astype(np.int64) | _sign_bits(fmt, values)
    else:
        bits = (values * 2.0**fmt.fraction_bits).astype(np.int64) & ((1 << fmt.bits) - 1)
    codes: Codes = bits.astype(unsigned_dtype(fmt.bits))
    return codes


def decode_elements(fmt: ElementFormat, codes: Codes, dtype: np.dtype[Any]) -> Floats:
    """The numbers that the codes stand for, in a type that holds them."""
    if fmt.bits <= _TABLE_BITS:
        return _numbers_of_all_codes(fmt, dtype)[codes]
    return _decode(fmt, codes).astype(dtype)


def pack_bits(codes: Codes, bits: int) -> NDArray[np.uint8]:
    """Codes (..., n) of `bits` bits each as bytes (..., ceil(n * bits / 8)); what fills the last byte is 0."""
    count = codes.shape[-1]
    elements, size = _whole_bytes(bits)
    groups = -(-count // elements)
    fields = _NUMPY.pad_end(codes, codes.ndim - 1, -count % elements).reshape(*codes.shape[:-1], groups, elements)
    out = np.zeros((*codes.shape[:-1], groups, size), np.uint8)
    for element, byte, shift in _overlaps(bits):
        field = fields[..., element]
        out[..., byte] |= (field >> shift if shift >= 0 else field << -shift).astype(np.uint8)
    row = out.reshape(*codes.shape[:-1], groups * size)
    return np.ascontiguousarray(row[..., : -(-count * bits // 8)])


def unpack_bits(packed: NDArray[np.uint8], bits: int, count: int) -> Codes:
    """The `count` codes in each row of bytes; undoes `pack_bits`."""
    elements, size = _whole_bytes(bits)
    dtype = unsigned_dtype(bits)
    groups = -(-count // elements)
    padded = _NUMPY.pad_end(packed[..., : groups * size], packed.ndim - 1, max(0, groups * size - packed.shape[-1]))
    rows = padded.reshape(*packed.shape[:-1], groups, size)
    fields = np.zeros((*packed.shape[:-1], groups, elements), dtype)
    for element, byte, shift in _overlaps(bits):
        part = rows[..., byte].astype(dtype)
        fields[..., element] |= part << shift if shift >= 0 else part >> -shift
    fields &= dtype.type((1 << bits) - 1)
    return fields.reshape(*packed.shape[:-1], groups * elements)[..., :count]


def _whole_bytes(bits: int) -> tuple[int, int]:
    """The least number of elements that fill whole bytes, and how many bytes."""
    shared = math.gcd(bits, 8)
    return 8 // shared, bits // shared


def _overlaps(bits: int) -> Iterator[tuple[int, int, int]]:
    """(element, byte, shift): the byte holds the element moved right by shift, or left where shift is negative."""
    for element in range(_whole_bytes(bits)[0]):
        first = element * bits
        for byte in range(first // 8, (first + bits - 1) // 8 + 1):
            yield element, byte, 8 * byte - first


def _sign_bits(fmt: ElementFormat, values: Floats) -> NDArray[np.int64]:
    is_signed_number = np.signbit(values) & ~np.isnan(values)
    return is_signed_number.astype(np.int64) << (fmt.bits - 1)


def _float_magnitudes(fmt: FloatFormat, magnitudes: Floats, precision: Precision) -> NDArray[np.int64]:
    """Exponent and mantissa, cut out of the bits of the wider float."""
    # added to the smallest normal number, a subnormal one gets the mantissa that it is stored with
    is_subnormal = magnitudes < fmt.min_normal
    aligned = np.where(is_subnormal, magnitudes + magnitudes.dtype.type(fmt.min_normal), magnitudes)
    mantissa = fmt.mantissa_bits
    codes: NDArray[np.int64] = _NUMPY.bits(aligned, precision).astype(np.int64) >> (precision.mantissa_bits - mantissa)
    codes -= (precision.exponent_bias - fmt.bias + is_subnormal) << mantissa
    if fmt.specials is Specials.NONE:
        return codes
    if fmt.has_inf:
        codes = np.where(np.isinf(magnitudes), _inf_code(fmt), codes)
    return np.where(np.isnan(magnitudes), _nan_code(fmt), codes)


def _inf_code(fmt: FloatFormat) -> int:
    return ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits


def _nan_code(fmt: FloatFormat) -> int:
    """The positive quiet NaN."""
    if fmt.specials is Specials.NAN_ONLY:
        return (1 << (fmt.bits - 1)) - 1
    return _inf_code(fmt) | 1 << (fmt.mantissa_bits - 1)


@lru_cache(maxsize=256)
def _numbers_of_all_codes(fmt: ElementFormat, dtype: np.dtype[Any]) -> Floats:
    codes = np.arange(1 << fmt.bits, dtype=np.uint32)
    with np.errstate(over="ignore"):
        return _decode(fmt, codes).astype(dtype)


def _decode(fmt: ElementFormat, codes: Codes) -> NDArray[np.float64]:
    """Codes to numbers, by the definition of the format."""
    wide = codes.astype(np.int64)
    sign = wide >> (fmt.bits - 1)
    magnitude = wide & ((1 << (fmt.bits - 1)) - 1)
    if isinstance(fmt, IntFormat) and not fmt.symmetric:
        levels = wide - (sign << fmt.bits) if fmt.signed else wide
        return np.ldexp(levels.astype(np.float64), -fmt.fraction_bits)
    if isinstance(fmt, IntFormat):
        numbers = np.ldexp(magnitude.astype(np.float64), -fmt.fraction_bits)
    else:
        numbers = _decode_float(fmt, magnitude)
    return np.where(sign == 1, -numbers, numbers)


def _decode_float(fmt: FloatFormat, magnitude: NDArray[np.int64]) -> NDArray[np.float64]:
    exponent = magnitude >> fmt.mantissa_bits
    implicit_one = (exponent > 0).astype(np.int64) << fmt.mantissa_bits
    mantissa = (magnitude & ((1 << fmt.mantissa_bits) - 1)) | implicit_one
    places = np.maximum(exponent, 1) - fmt.bias - fmt.mantissa_bits
    numbers: NDArray[np.float64] = np.ldexp(mantissa.astype(np.float64), places)
    if fmt.specials is Specials.NONE:
        return numbers
    if fmt.specials is Specials.NAN_ONLY:
        return np.where(magnitude == _nan_code(fmt), np.nan, numbers)
    return np.where(magnitude > _inf_code(fmt), np.nan, np.where(magnitude == _inf_code(fmt), np.inf, numbers))
