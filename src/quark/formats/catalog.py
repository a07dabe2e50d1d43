"""The table of number formats, one row each. All other code that knows a format derives it from its row."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import TypeVar

from quark.errors import UnsupportedTypeError, unknown_name
from quark.formats.spec import BlockFormat, FloatFormat, Format, IntFormat, NonFinite, Specials, SubBlocks

Choice = TypeVar("Choice", bound=Enum)

FLOAT16 = FloatFormat("float16", exponent_bits=5, mantissa_bits=10, specials=Specials.IEEE)
BFLOAT16 = FloatFormat("bfloat16", exponent_bits=8, mantissa_bits=7, specials=Specials.IEEE)
FP8_E5M2 = FloatFormat("fp8_e5m2", exponent_bits=5, mantissa_bits=2, specials=Specials.IEEE)
FP8_E4M3 = FloatFormat("fp8_e4m3", exponent_bits=4, mantissa_bits=3, specials=Specials.NAN_ONLY)
FP6_E3M2 = FloatFormat("fp6_e3m2", exponent_bits=3, mantissa_bits=2)
FP6_E2M3 = FloatFormat("fp6_e2m3", exponent_bits=2, mantissa_bits=3)
FP4_E2M1 = FloatFormat("fp4_e2m1", exponent_bits=2, mantissa_bits=1)

# The integers inside blocks carry six fraction bits, so that 1.0 is their largest power of two.
BLOCK_INT8 = IntFormat("int8", bits=8, fraction_bits=6)
BLOCK_INT8SYM = IntFormat("int8sym", bits=8, fraction_bits=6, symmetric=True)


def sign_magnitude(magnitude_bits: int) -> IntFormat:
    """A sign and a magnitude without an implicit one; 1.0 is its largest power of two."""
    return IntFormat(f"int{magnitude_bits + 1}sym", magnitude_bits + 1, True, magnitude_bits - 1, symmetric=True)


def _microexponent(name: str, magnitude_bits: int) -> BlockFormat:
    return BlockFormat(name, sign_magnitude(magnitude_bits), 16, SubBlocks(2, shift_bits=1), flush_subnormals=True)


PLAIN_FLOATS = (FLOAT16, BFLOAT16, FP8_E5M2, FP8_E4M3, FP6_E3M2, FP6_E2M3, FP4_E2M1)
PLAIN_INTEGERS = tuple(
    IntFormat(f"{'' if signed else 'u'}int{bits}", bits, signed) for signed in (True, False) for bits in range(2, 33)
)
BLOCK_FORMATS = (
    BlockFormat("mxfp8_e5m2", FP8_E5M2, 32),
    BlockFormat("mxfp8_e4m3", FP8_E4M3, 32),
    BlockFormat("mxfp6_e3m2", FP6_E3M2, 32),
    BlockFormat("mxfp6_e2m3", FP6_E2M3, 32),
    BlockFormat("mxfp4_e2m1", FP4_E2M1, 32),
    BlockFormat("mxint8", BLOCK_INT8, 32),
    BlockFormat("mxint8sym", BLOCK_INT8SYM, 32),
    _microexponent("mx4", magnitude_bits=2),
    _microexponent("mx6", magnitude_bits=4),
    _microexponent("mx9", magnitude_bits=7),
    BlockFormat("bfp16", BLOCK_INT8SYM, 8, default_nonfinite=NonFinite.PASSTHROUGH),
    BlockFormat("bfp16c", BLOCK_INT8, 8, carry=True, default_nonfinite=NonFinite.PASSTHROUGH),
    BlockFormat("nvfp4", FP4_E2M1, 16, scale=FP8_E4M3, has_tensor_scale=True),
)

_ROWS: tuple[Format, ...] = (*BLOCK_FORMATS, *PLAIN_FLOATS, *PLAIN_INTEGERS)

FORMATS: Mapping[str, Format] = MappingProxyType({str(fmt): fmt for fmt in _ROWS})

# Legal values of the operator attribute `element_dtype`: the elements of the OCP rows above.
MX_ELEMENTS: Mapping[str, FloatFormat | IntFormat] = MappingProxyType(
    {str(fmt.element): fmt.element for fmt in BLOCK_FORMATS if fmt.name.startswith(("mxfp", "mxint"))}
)


def get_format(format: str | Format) -> Format:
    """The format of that name; a format passes unchanged.

    >>> get_format("mxfp4_e2m1").bits_per_element
    4.25
    """
    if isinstance(format, (FloatFormat, IntFormat, BlockFormat)):
        return format
    if not isinstance(format, str):
        raise UnsupportedTypeError(f"format: expected a name or a format, got {type(format).__name__}")
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    return FORMATS[format]


def parse_choice(choices: type[Choice], value: str | Choice, what: str) -> Choice:
    """The member with that value; the error for an unknown one suggests the nearest names.

    >>> from quark.formats.spec import ScaleRule
    >>> parse_choice(ScaleRule, "rceil", "scale rule")
    <ScaleRule.RCEIL: 'rceil'>
    """
    try:
        return choices(value)
    except ValueError:
        raise unknown_name(what, value, [str(choice.value) for choice in choices]) from None
