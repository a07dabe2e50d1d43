"""Arrays in the bits of their format: `pack` and `unpack`.

`unpack(pack(x, ...))` is `quantize_dequantize(x, ...)` exactly: == everywhere, NaN for NaN. numpy does the work, on the
CPU, for tensors too.

The bits of an element:

    floats                sign, exponent, mantissa, in the order of IEEE 754; Inf and NaN if the format has them
    symmetric integers    sign and magnitude, so there is a -0
    other integers        two's complement; unsigned ones as they are

The packed axis is moved last. Its elements are packed without gaps: element i of b bits takes the bits i*b to i*b+b-1,
bit 0 being the lowest of byte 0. Every row of elements starts at a byte, and a short last block is not filled up. A
block has one scale byte, its exponent + 127; 255 makes the whole block NaN. In a carrying format (bfp16c) 255 is 2^128,
and there is no NaN. With sub-blocks the microexponents follow that byte, packed like elements and filled up to whole
bytes. If scales are floats, the byte is the code of the scale, NaN making the whole block NaN, and the tensor's scale
is kept beside the arrays. So the arrays are

    codes     (other axes..., bytes of a row)
    scales    (other axes..., blocks), or (other axes..., blocks, bytes) with sub-blocks; (0,) for a plain format
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from ml_dtypes import bfloat16 as numpy_bfloat16
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.formats.arrays import CHUNK_ELEMENTS, FLOAT32, FLOAT64, Precision, array_kind, as_index, normalize_axis
from quark.formats.block import (
    BlockQuantizer,
    LanePlace,
    QuantizedBlocks,
    dequantize_lanes,
    find_tensor_scale,
    lane_pieces,
    quantize_lanes,
)
from quark.formats.catalog import get_format, parse_choice
from quark.formats.quantize import refuse_block_options
from quark.formats.rounding import exp2, exponent_of, quantize_dequantize_elements
from quark.formats.spec import (
    SCALE_MAX_EXPONENT,
    SCALE_MIN_EXPONENT,
    SCALE_NAN_CODE,
    BlockFormat,
    ElementFormat,
    FloatFormat,
    Format,
    IntFormat,
    NonFinite,
    Rounding,
    ScaleRule,
    Specials,
)

Codes = NDArray[np.unsignedinteger[Any]]
Floats = NDArray[np.floating[Any]]

_NUMPY = array_kind(np.zeros(0))
_TABLE_BITS = 16  # codes up to this length are decoded with a table of all of them
_FLOAT_DTYPES: dict[Precision, np.dtype[Any]] = {FLOAT32: np.dtype(np.float32), FLOAT64: np.dtype(np.float64)}


@dataclass(frozen=True, eq=False)
class PackedArray:
    """The result of `pack`: the bytes, and what is needed to read them. `dtype` is that of the packed array."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    format: Format
    shape: tuple[int, ...]
    axis: int
    dtype: Any
    tensor_scale: float | None = None

    def __post_init__(self) -> None:
        has_tensor_scale = isinstance(self.format, BlockFormat) and self.format.has_tensor_scale
        if has_tensor_scale == (self.tensor_scale is None):
            expected_scale = "a tensor scale" if has_tensor_scale else "none"
            raise InvalidValueError(f"tensor_scale {self.tensor_scale} of '{self.format}': expected {expected_scale}")
        layout = Layout(self.format, self.shape or (1,), self.axis)
        for name, expected in (("codes", layout.codes_shape), ("scales", layout.scales_shape)):
            array = getattr(self, name)
            if array.dtype != np.uint8 or array.shape != expected:
                raise InvalidValueError(
                    f"{name}: expected uint8 of shape {expected} for '{self.format}' of shape {self.shape} along axis "
                    f"{self.axis}, got {array.dtype} of shape {array.shape}"
                )

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.scales.nbytes + (0 if self.tensor_scale is None else 4))

    @property
    def bits_per_element(self) -> float:
        """The bits in memory; the format's own figure for an array without elements."""
        count = math.prod(self.shape)
        return 8 * self.nbytes / count if count else self.format.bits_per_element


@dataclass(frozen=True)
class Layout:
    """The numbers of bytes and the shapes of an array of rank 1 or more that is packed along an axis."""

    format: Format
    shape: tuple[int, ...]
    axis: int

    @property
    def codes_shape(self) -> tuple[int, ...]:
        element = self.format.element if isinstance(self.format, BlockFormat) else self.format
        return (*self._others, -(-self.shape[self.axis] * element.bits // 8))

    @property
    def scales_shape(self) -> tuple[int, ...]:
        if not isinstance(self.format, BlockFormat):
            return (0,)
        return (*self._others, self.blocks, *((self.scale_bytes,) if self.format.sub_blocks else ()))

    @property
    def _others(self) -> tuple[int, ...]:
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]

    @property
    def blocks(self) -> int:
        return -(-self.shape[self.axis] // self.format.block_size) if isinstance(self.format, BlockFormat) else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes per block: one for the exponent, then those of the microexponents."""
        if not isinstance(self.format, BlockFormat) or self.format.sub_blocks is None:
            return 1
        count = -(-self.format.block_size // self.format.sub_blocks.size)
        return 1 - (-count * self.format.sub_blocks.shift_bits // 8)

    def empty_planes(self) -> NDArray[np.uint8]:
        """One plane per byte of a scale, each with the shape of x where blocks take the place of elements."""
        return np.zeros(
            (self.scale_bytes, *self.shape[: self.axis], self.blocks, *self.shape[self.axis + 1 :]), np.uint8
        )

    def scales_of(self, planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        moved = np.moveaxis(np.moveaxis(planes, self.axis + 1, -1), 0, -1)
        return np.ascontiguousarray(moved).reshape(self.scales_shape)

    def planes_of(self, scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
        moved = scales.reshape(*self._others, self.blocks, self.scale_bytes)
        return np.ascontiguousarray(np.moveaxis(np.moveaxis(moved, -1, 0), -1, self.axis + 1))

    def scale_place(self, place: LanePlace) -> LanePlace:
        """The place in a plane of the scales of a piece of blocks."""
        assert isinstance(self.format, BlockFormat)
        outer, _, inner = place.rows_shape
        size = self.format.block_size
        along = slice(place.axis.start // size, -(-place.axis.stop // size))
        return LanePlace(place.outer, along, place.inner, (outer, self.blocks, inner))


def pack(
    x: Any,
    format: str | Format,
    axis: int = -1,
    *,
    block_size: int | None = None,
    scale_rule: str | ScaleRule = ScaleRule.FLOOR,
    rounding: str | Rounding = Rounding.HALF_EVEN,
    nonfinite: str | NonFinite | None = None,
    tensor_scale: float | None = None,
) -> PackedArray:
    """Quantize x to bits; the options are those of `quantize_dequantize`.

    x is a numpy array or a torch tensor on any device; packing itself runs on the CPU. Raises an error that names the
    first NaN or Inf that the policy passes through and the format has no code for.

    >>> pack(np.ones((4, 64), np.float32), "mxfp6_e2m3").bits_per_element
    6.25
    """
    fmt = get_format(format)
    policy = fmt.default_nonfinite if nonfinite is None else parse_choice(NonFinite, nonfinite, "non-finite policy")
    rule = parse_choice(ScaleRule, scale_rule, "scale rule")
    mode = parse_choice(Rounding, rounding, "rounding mode")
    array = _to_numpy(x)
    precision = _NUMPY.precision(array)
    position = normalize_axis(axis, array.ndim)
    array = array.reshape(array.shape or (1,))
    fixed = None
    if isinstance(fmt, BlockFormat):
        if block_size is not None:  # a block longer than the axis is as long as the axis
            length = max(1, array.shape[position])
            fmt = fmt.with_block_size(min(as_index("block_size", block_size), length))
        quantizer = BlockQuantizer(fmt, rule, mode, policy, tensor_scale).fixed(array)
        codes, scales = _encode_blocks(array, position, quantizer)
        fixed = quantizer.tensor_scale
        bits = fmt.element.bits
    else:
        refuse_block_options(fmt, block_size, tensor_scale, rule)
        values = quantize_dequantize_elements(_NUMPY, _NUMPY.widen(array, precision), fmt, mode, policy)
        has_inf, has_nan = (fmt.has_inf, fmt.has_nan) if isinstance(fmt, FloatFormat) else (False, False)
        if not has_inf:
            remedy = "pass nonfinite='block_nan' to make it NaN, or replace it" if has_nan else "replace it first"
            _refuse_where(np.isinf(values) if has_nan else ~np.isfinite(values), values, fmt, remedy)
        codes, scales, bits = np.empty(values.shape, unsigned_dtype(fmt.bits)), np.zeros(0, np.uint8), fmt.bits
        flat, flat_codes = values.reshape(-1), codes.reshape(-1)
        for start in range(0, flat.size, CHUNK_ELEMENTS):
            piece = slice(start, start + CHUNK_ELEMENTS)
            flat_codes[piece] = encode_elements(fmt, flat[piece])
    rows = np.ascontiguousarray(np.moveaxis(codes, position, -1))
    return PackedArray(pack_bits(rows, bits), scales, fmt, tuple(x.shape), position, x.dtype, fixed)


def unpack(packed: PackedArray) -> Any:
    """The values, as the packed kind of array and float type; tensors are on the CPU."""
    fmt = packed.format
    shape = packed.shape or (1,)
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    rows = unpack_bits(packed.codes, element.bits, shape[packed.axis])
    codes = np.ascontiguousarray(np.moveaxis(rows, -1, packed.axis))
    type_name = str(packed.dtype).rpartition(".")[2]  # numpy's name of a type of numpy or torch
    out = np.empty(shape, numpy_bfloat16 if type_name == "bfloat16" else type_name)
    precision = _NUMPY.precision(out)
    if isinstance(fmt, BlockFormat):
        layout = Layout(fmt, shape, packed.axis)
        planes = layout.planes_of(packed.scales)
        for place, lanes in lane_pieces(_NUMPY, codes, packed.axis, fmt.block_size):
            elements = decode_elements(fmt.element, lanes, _FLOAT_DTYPES[precision])
            scale_rows = np.concatenate([layout.scale_place(place).load(plane, 1) for plane in planes])
            blocks = _blocks_of(elements, scale_rows, fmt, precision, packed.tensor_scale)
            values = dequantize_lanes(_NUMPY, blocks)
            place.store(out, _NUMPY.narrow(np.where(blocks.is_bad, np.nan, values), out))
    else:
        out[...] = _NUMPY.narrow(decode_elements(fmt, codes, _FLOAT_DTYPES[precision]), out)
    out = out.reshape(packed.shape)
    if isinstance(packed.dtype, np.dtype):
        return out
    torch = sys.modules["torch"]  # loaded, since a tensor was packed
    if packed.dtype == torch.bfloat16:
        return torch.from_numpy(out.view(np.int16)).view(packed.dtype)
    return torch.from_numpy(out)


def _encode_blocks(x: Any, axis: int, quantizer: BlockQuantizer) -> tuple[Codes, NDArray[np.uint8]]:
    fmt = quantizer.format
    has_nan = not fmt.carry and (fmt.scale is None or fmt.scale.has_nan)
    if not has_nan or quantizer.nonfinite is NonFinite.PASSTHROUGH:
        remedy = (
            "replace it first" if not has_nan else "pass nonfinite='block_nan' to make its block NaN, or replace it"
        )
        _refuse_where(~np.isfinite(x), x, fmt, remedy)
    precision = _NUMPY.precision(x)
    layout = Layout(fmt, x.shape, axis)
    planes = layout.empty_planes()
    codes = np.empty(x.shape, unsigned_dtype(fmt.element.bits))
    tensor_scale = find_tensor_scale(_NUMPY, x, quantizer, precision)
    for place, lanes in lane_pieces(_NUMPY, x, axis, fmt.block_size):
        blocks = quantize_lanes(_NUMPY, _NUMPY.widen(lanes, precision), quantizer, precision, tensor_scale)
        elements = blocks.elements
        if blocks.units is not None:
            elements = elements / _spread(blocks.units, elements, fmt)
        place.store(codes, encode_elements(fmt.element, elements))
        for plane, row in zip(planes, _scale_rows(blocks, fmt, len(planes), precision), strict=True):
            layout.scale_place(place).store(plane, row[None])
    return codes, layout.scales_of(planes)


def _spread(units: Any, elements: Any, fmt: BlockFormat) -> Any:
    """The unit of each element."""
    return units if fmt.sub_blocks is None else np.repeat(units, fmt.sub_blocks.size, axis=0)[: len(elements)]


def _scale_rows(blocks: QuantizedBlocks, fmt: BlockFormat, count: int, precision: Precision) -> NDArray[np.uint8]:
    """The bytes of each block's scale, shape (count, lanes)."""
    rows = np.zeros((count, blocks.scales.shape[1]), np.uint8)
    if fmt.scale is not None:
        is_bad = np.zeros(1, bool) if blocks.is_bad is None else blocks.is_bad[0]
        rows[0] = encode_elements(fmt.scale, np.where(is_bad, np.nan, blocks.scale_numbers[0]))
        return rows
    exponents = exponent_of(_NUMPY, blocks.scales, precision)[0] - SCALE_MIN_EXPONENT
    if fmt.carry:
        exponents = exponents + exponent_of(_NUMPY, blocks.units, precision)[0]
    rows[0] = exponents if blocks.is_bad is None else np.where(blocks.is_bad[0], SCALE_NAN_CODE, exponents)
    if fmt.sub_blocks is not None:
        bits = fmt.sub_blocks.shift_bits
        shifts = -exponent_of(_NUMPY, blocks.units, precision).T
        packed = pack_bits(np.ascontiguousarray(shifts.astype(unsigned_dtype(bits))), bits)
        rows[1 : 1 + packed.shape[1]] = packed.T
    return rows


def _blocks_of(
    elements: Any, rows: NDArray[np.uint8], fmt: BlockFormat, precision: Precision, tensor_scale: float | None
) -> QuantizedBlocks:
    """The inverse of `_scale_rows`: what `quantize_lanes` returned."""
    if fmt.scale is not None:
        numbers = decode_elements(fmt.scale, rows[:1], _FLOAT_DTYPES[precision])
        factor = numbers.dtype.type(1.0 if tensor_scale is None else tensor_scale)
        return QuantizedBlocks(elements, factor * numbers, None, np.isnan(numbers), numbers)
    exponents = _NUMPY.as_int(rows[:1], precision) + SCALE_MIN_EXPONENT
    is_bad = np.zeros(1, bool) if fmt.carry else rows[:1] == SCALE_NAN_CODE
    scales = exp2(_NUMPY, np.minimum(exponents, SCALE_MAX_EXPONENT), precision)
    units = None
    if fmt.carry:
        units = exp2(_NUMPY, np.maximum(exponents - SCALE_MAX_EXPONENT, 0), precision)
    elif fmt.sub_blocks is not None:
        count = -(-len(elements) // fmt.sub_blocks.size)
        stored = unpack_bits(np.ascontiguousarray(rows[1:].T), fmt.sub_blocks.shift_bits, count)
        units = exp2(_NUMPY, -_NUMPY.as_int(stored.T, precision), precision)
    if units is not None:
        elements = elements * _spread(units, elements, fmt)
    return QuantizedBlocks(elements, scales, units, is_bad)


def _refuse_where(is_bad: Any, x: Any, fmt: Format, remedy: str) -> None:
    if is_bad.any():
        index = tuple(int(i) for i in np.argwhere(is_bad)[0])
        raise InvalidValueError(f"x{list(index)} is {x[index]}: format '{fmt}' has no code for it; {remedy}")


def _to_numpy(x: Any) -> NDArray[Any]:
    kind = array_kind(x)
    if kind.name == "numpy":
        return np.asarray(x)
    kind.precision(x)
    tensor = x.detach().resolve_neg().cpu()
    if tensor.dtype == kind.xp.bfloat16:
        return np.asarray(tensor.view(kind.xp.int16).numpy()).view(numpy_bfloat16)
    return np.asarray(tensor.numpy())


def unsigned_dtype(bits: int) -> np.dtype[Any]:
    """The narrowest unsigned type for codes of that many bits."""
    for width in (8, 16, 32):
        if bits <= width:
            return np.dtype(f"uint{width}")
    raise InvalidValueError(f"codes of {bits} bits: expected at most 32")


def encode_elements(fmt: ElementFormat, values: Floats) -> Codes:
    """The codes of numbers of the format. Other values are truncated, not rounded."""
    if isinstance(fmt, FloatFormat):
        bits = _float_magnitudes(fmt, np.abs(values), _NUMPY.precision(values)) | _sign_bits(fmt, values)
    elif fmt.symmetric:
        bits = np.abs(values * 2.0**fmt.fraction_bits).astype(np.int64) | _sign_bits(fmt, values)
    else:
        bits = (values * 2.0**fmt.fraction_bits).astype(np.int64) & ((1 << fmt.bits) - 1)
    codes: Codes = bits.astype(unsigned_dtype(fmt.bits))
    return codes


def decode_elements(fmt: ElementFormat, codes: Codes, dtype: np.dtype[Any]) -> Floats:
    """The numbers of the codes, in a type that holds them."""
    if fmt.bits <= _TABLE_BITS:
        return _numbers_of_all_codes(fmt, dtype)[codes]
    return _decode(fmt, codes).astype(dtype)


def pack_bits(codes: Codes, bits: int) -> NDArray[np.uint8]:
    """Codes (..., n) of `bits` bits each as bytes (..., ceil(n * bits / 8)); the last byte is filled with zeros."""
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
    """The `count` codes in each row of bytes: the inverse of `pack_bits`."""
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
    """The smallest number of elements that fill whole bytes, and the number of bytes."""
    shared = math.gcd(bits, 8)
    return 8 // shared, bits // shared


def _overlaps(bits: int) -> Iterator[tuple[int, int, int]]:
    """(element, byte, shift): the byte holds the element shifted right by shift, or left if it is negative."""
    for element in range(_whole_bytes(bits)[0]):
        first = element * bits
        for byte in range(first // 8, (first + bits - 1) // 8 + 1):
            yield element, byte, 8 * byte - first


def _sign_bits(fmt: ElementFormat, values: Floats) -> NDArray[np.int64]:
    is_signed_number = np.signbit(values) & ~np.isnan(values)
    return is_signed_number.astype(np.int64) << (fmt.bits - 1)


def _float_magnitudes(fmt: FloatFormat, magnitudes: Floats, precision: Precision) -> NDArray[np.int64]:
    """Exponent and mantissa, taken from the bits of the wider float."""
    # added to the smallest normal number, a subnormal one gets its stored mantissa
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
    """The numbers of the codes, by the definition of the format."""
    wide = codes.astype(np.int64)
    sign = wide >> (fmt.bits - 1)
    magnitude = wide & ((1 << (fmt.bits - 1)) - 1)
    if isinstance(fmt, IntFormat) and not fmt.symmetric:
        levels = wide - (sign << fmt.bits) if fmt.signed else wide
        return np.ldexp(levels.astype(np.float64), -fmt.fraction_bits)
    if isinstance(fmt, IntFormat):
        numbers = np.ldexp(magnitude.astype(np.float64), -fmt.fraction_bits)
    else:
        exponent = magnitude >> fmt.mantissa_bits
        implicit_one = (exponent > 0).astype(np.int64) << fmt.mantissa_bits
        mantissa = (magnitude & ((1 << fmt.mantissa_bits) - 1)) | implicit_one
        numbers = np.ldexp(mantissa.astype(np.float64), np.maximum(exponent, 1) - fmt.bias - fmt.mantissa_bits)
        if fmt.specials is Specials.NAN_ONLY:
            numbers = np.where(magnitude == _nan_code(fmt), np.nan, numbers)
        elif fmt.specials is not Specials.NONE:
            numbers = np.where(magnitude == _inf_code(fmt), np.inf, numbers)
            numbers = np.where(magnitude > _inf_code(fmt), np.nan, numbers)
    return np.where(sign == 1, -numbers, numbers)
