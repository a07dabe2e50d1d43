"""Encode a weight that is already rounded to a block format as codes, exactly; and codes in whole bytes.

The scales that numbers were rounded with are no longer known, and not needed: on each of our grids, halving the scale
keeps all numbers that stay in range. So each block gets the smallest scale at which its largest number fits, and each
sub-block the finest unit. The result is compared with the weight byte by byte. A weight in the format is restored
exactly, whatever the scale rule and the rounding were, and any other weight is refused.

Scales that are floats are found again with the tensor's scale, which is known: the largest number of a block is one of
the few elements times its scale. The first of these scales that restores the whole block is taken.

Tensors are viewed as [outer, length, inner], with the blocks along the middle; the last block may be short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.formats.packing import decode_elements, encode_elements
from quark.formats.quantize import quantize_dequantize
from quark.formats.spec import SCALE_MIN_EXPONENT, BlockFormat, ElementFormat, FloatFormat, IntFormat
from quark.onnx.large_tensors import pieces

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

MAX_CODE_BITS = 8
# 2^(byte - 127) for every byte; the last one would be 2^128, which no finite number needs
POWERS = np.ldexp(np.float32(1), np.clip(np.arange(256) + SCALE_MIN_EXPONENT, None, 127)).astype(np.float32)


@dataclass(frozen=True)
class Geometry:
    """The layout of a format's blocks in a tensor."""

    shape: tuple[int, ...]
    axis: int
    size: int  # size of a block, at most the length of its axis
    sub_size: int = 0  # size of a sub-block; 0 if a block has at most one
    shift_bits: int = 0  # bits of a stored microexponent: a divisor of 8, or 0

    @classmethod
    def of(cls, fmt: BlockFormat, shape: tuple[int, ...], axis: int) -> Geometry:
        """The geometry that the operators use: for tensors of rank 1 the axis is ignored."""
        axis = axis % len(shape) if len(shape) > 1 else 0
        size = min(fmt.block_size, shape[axis])
        sub_size = 0 if fmt.sub_blocks is None or fmt.sub_blocks.size >= size else fmt.sub_blocks.size
        bits = 0 if fmt.sub_blocks is None or not sub_size else fmt.sub_blocks.shift_bits
        return cls(shape, axis, size, sub_size, 4 if bits == 3 else bits)

    @property
    def outer(self) -> int:
        return math.prod(self.shape[: self.axis])

    @property
    def length(self) -> int:
        return self.shape[self.axis]

    @property
    def inner(self) -> int:
        return math.prod(self.shape[self.axis + 1 :])

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def blocks(self) -> int:
        return -(-self.length // self.size)

    @property
    def sub_blocks(self) -> int:
        return -(-self.length // self.sub_size) if self.sub_size else 0

    @property
    def shift_bits_of_block(self) -> int:
        """Bits of all microexponents of a block."""
        return -(-self.size // self.sub_size) * self.shift_bits if self.sub_size else 0

    @property
    def is_even(self) -> bool:
        """True if all blocks, and all sub-blocks, have the same length."""
        return self.length % self.size == 0 and (not self.sub_size or self.size % self.sub_size == 0)


@dataclass(frozen=True, eq=False)
class BlockCodes:
    """A weight in codes: one byte an element, [outer, length, inner]; one an exponent (+ 127), [outer, blocks, inner];
    one a microexponent, [outer, sub-blocks, inner], where blocks have several sub-blocks. If scales are floats,
    `exponents` are their codes, and `tensor_scale` is what all of them are multiplied by."""

    format: BlockFormat
    geometry: Geometry
    elements: Bytes
    exponents: Bytes
    shifts: Bytes | None = None
    tensor_scale: float = 1.0

    @property
    def scales_of_codes(self) -> NDArray[np.float32]:
        """The scale of every byte of `exponents`."""
        fmt = self.format
        scales = POWERS if fmt.scale is None else np.float32(self.tensor_scale) * float_scales(fmt.scale)
        return np.asarray(scales, np.float32)

    @property
    def has_minus_zero(self) -> bool:
        """True if the codes hold -0, which two's complement cannot express."""
        element = self.format.element
        has_one = isinstance(element, IntFormat) and element.symmetric
        return has_one and bool((self.elements == 1 << (element.bits - 1)).any())

    def values(self, outer: slice, along: slice) -> NDArray[np.float32]:
        """The numbers of a part of the codes; `along` begins at a block."""
        numbers = _numbers(self.format.element)[self.elements[outer, along]]
        size, last = self.geometry.size, along.stop
        exponents = self.exponents[outer, along.start // size : -(-last // size)]
        scales = _spread(self.scales_of_codes[exponents], size, last - along.start)
        if self.shifts is not None:
            sub = self.geometry.sub_size
            shifts = self.shifts[outer, along.start // sub : -(-last // sub)]
            scales = scales * _spread(_fractions()[shifts], sub, last - along.start)
        return np.asarray(numbers * scales, np.float32)


def obstacle(fmt: BlockFormat, shape: tuple[int, ...]) -> str:
    """The reason why a weight of that shape cannot be in codes; empty if it can."""
    if fmt.element.bits > MAX_CODE_BITS:
        return f"elements of '{fmt}' have {fmt.element.bits} bits, more than the {MAX_CODE_BITS} that are packed"
    if not shape or not math.prod(shape):
        return "it has no elements to pack" if shape else "it is a single number"
    if fmt.sub_blocks is not None and fmt.block_size % fmt.sub_blocks.size:
        return f"blocks of {fmt.block_size} do not divide into sub-blocks of {fmt.sub_blocks.size}"
    return ""


def encode(
    tensor: ir.TensorProtocol, fmt: BlockFormat, axis: int, tensor_scale: float | None = None
) -> BlockCodes | None:
    """The codes for exactly this weight, of float32, float16 or bfloat16; None if it is not in the format."""
    geometry = Geometry.of(fmt, tuple(tensor.shape.numpy()), axis)
    outer, inner = geometry.outer, geometry.inner
    codes = BlockCodes(
        fmt,
        geometry,
        np.empty((outer, geometry.length, inner), np.uint8),
        np.empty((outer, geometry.blocks, inner), np.uint8),
        np.empty((outer, geometry.sub_blocks, inner), np.uint8) if geometry.sub_size else None,
        1.0 if tensor_scale is None else tensor_scale,
    )
    for piece in pieces(tensor, geometry.axis, geometry.size):
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            _encode_piece(piece.array, codes, piece.outer, piece.along)
            decoded = codes.values(piece.outer, piece.along).astype(piece.array.dtype, copy=False)
        if decoded.tobytes() != piece.array.tobytes():
            return None
    return codes


def _encode_piece(array: Array, codes: BlockCodes, outer: slice, along: slice) -> None:
    fmt, size = codes.format, codes.geometry.size
    x = array.astype(np.float32, copy=False)
    if fmt.scale is not None:
        scale_codes, elements = _with_float_scales(_padded(array, size), fmt, np.float32(codes.tensor_scale))
        codes.exponents[outer, along.start // size : -(-along.stop // size)] = scale_codes
        codes.elements[outer, along] = elements.reshape(x.shape[0], -1, x.shape[2])[:, : x.shape[1]]
        return
    exponents = _exponents(_padded(x, size), fmt.element)
    codes.exponents[outer, along.start // size : -(-along.stop // size)] = exponents - SCALE_MIN_EXPONENT
    element_exponents = _spread(exponents, size, x.shape[1])
    if codes.shifts is not None and fmt.sub_blocks is not None:
        sub = fmt.sub_blocks.size
        own = _exponents(_padded(x, sub), fmt.element)
        shifts = np.clip(element_exponents[:, ::sub] - own, 0, fmt.sub_blocks.max_shift)  # below 0 where NaN is
        codes.shifts[outer, along.start // sub : -(-along.stop // sub)] = shifts
        element_exponents = element_exponents - _spread(shifts, sub, x.shape[1])
    units = x * np.ldexp(np.float32(1), -element_exponents)
    codes.elements[outer, along] = _codes(fmt.element)[units.view(np.uint32) >> 16]


def _with_float_scales(blocks: Array, fmt: BlockFormat, tensor_scale: np.float32) -> tuple[Bytes, Bytes]:
    """The codes of scales, [outer, blocks, inner], and of elements, in the shape of the blocks. A block that no scale
    restores gets codes of other numbers."""
    assert fmt.scale is not None
    scale, numbers, dtype = fmt.scale, _numbers(fmt.element), blocks.dtype
    blocks = blocks.astype(np.float32, copy=False)
    largest = np.abs(blocks).max(axis=2)
    table = tensor_scale * float_scales(scale)
    # codes for blocks of zeros
    codes = np.full(largest.shape, encode_elements(scale, np.ones(1, np.float32))[0], np.uint8)
    elements = np.zeros(blocks.shape, np.uint8)
    is_open = largest > 0
    for element in sorted({float(number) for number in numbers if number > 0}, reverse=True):
        wanted = np.clip(largest / np.float32(element) / tensor_scale, 0, scale.max)
        tried = encode_elements(scale, np.asarray(quantize_dequantize(np.nan_to_num(wanted), scale))).astype(np.uint8)
        steps = table[tried][:, :, None]
        units = np.clip(np.nan_to_num(blocks / steps), fmt.element.grid.lowest, fmt.element.grid.highest)
        own = encode_elements(fmt.element, np.asarray(quantize_dequantize(units, fmt.element))).astype(np.uint8)
        restored = (numbers[own] * steps).astype(dtype, copy=False)  # a 16-bit weight was rounded to its type
        is_found = is_open & (restored == blocks).all(axis=2)
        codes, elements = np.where(is_found, tried, codes), np.where(is_found[:, :, None], own, elements)
        is_open &= ~is_found
        if not is_open.any():
            break
    # zeros keep their sign
    is_minus_zero = (blocks == 0) & np.signbit(blocks)
    elements[is_minus_zero] = encode_elements(fmt.element, np.array([-0.0], np.float32))[0]
    return codes, elements


@lru_cache(maxsize=8)
def float_scales(scale: FloatFormat) -> NDArray[np.float32]:
    """The number of every code of a scale; codes of NaN and Inf, which no finite number needs, are 0."""
    numbers = _numbers(scale)
    return np.asarray(np.where(np.isfinite(numbers), numbers, 0), np.float32)


def _padded(x: Array, size: int) -> Array:
    """Whole blocks, zeros at the end: [outer, blocks, size, inner]."""
    missing = -x.shape[1] % size
    whole = np.pad(x, ((0, 0), (0, missing), (0, 0))) if missing else x
    return whole.reshape(x.shape[0], -1, size, x.shape[2])


def _spread(values: Array, size: int, length: int) -> Array:
    """One value for each element along the axis."""
    return np.repeat(values, size, axis=1)[:, :length]


def _exponents(blocks: Array, element: ElementFormat) -> NDArray[np.int32]:
    """The smallest scale exponent at which each block's numbers are in range. 0 if all of them are zero: multiplying
    with the smallest scale, a subnormal number, takes processors a hundred times as long."""
    grid, highest, lowest = element.grid, blocks.max(axis=2), blocks.min(axis=2)
    needed = np.maximum(_fitting(highest, grid.highest), _fitting(-lowest, -grid.lowest))
    return np.where((highest == 0) & (lowest == 0), 0, needed).astype(np.int32)


def _fitting(largest: Array, limit: float) -> NDArray[np.int32]:
    """The smallest e with largest <= limit * 2^e, of those that a scale can have."""
    fraction, exponent = np.frexp(largest)
    limit_fraction, limit_exponent = math.frexp(limit)
    needed = exponent - limit_exponent + (fraction > limit_fraction)
    return np.where(largest > 0, np.clip(needed, SCALE_MIN_EXPONENT, 127), SCALE_MIN_EXPONENT).astype(np.int32)


@lru_cache(maxsize=32)
def _codes(element: ElementFormat) -> Bytes:
    """The code for every upper half of a float32: numbers of up to 8 bits have nothing in the lower half. A number that
    is not in the format gets the code of another one."""
    with np.errstate(all="ignore"):
        numbers = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
        inside = np.clip(np.nan_to_num(numbers, nan=0.0), element.grid.lowest, element.grid.highest)
        codes: Bytes = encode_elements(element, inside).astype(np.uint8)
    return codes


@lru_cache(maxsize=32)
def _numbers(element: ElementFormat) -> NDArray[np.float32]:
    """The number of every code; bits beyond the code are ignored."""
    codes = np.arange(256, dtype=np.uint8) & np.uint8((1 << element.bits) - 1)
    return np.asarray(decode_elements(element, codes, np.dtype(np.float32)), np.float32)


@lru_cache(maxsize=1)
def _fractions() -> NDArray[np.float32]:
    """2^-shift."""
    return np.asarray(np.ldexp(np.float32(1), -np.arange(16)), np.float32)


def filled(codes: Bytes, multiple: int) -> Bytes:
    """The codes, flat, and zeros up to a multiple."""
    flat = np.ascontiguousarray(codes).reshape(-1)
    return np.pad(flat, (0, -flat.size % multiple)) if flat.size % multiple else flat


def joined(codes: Bytes, bits: int) -> Bytes:
    """Bytes of codes of that many bits, a divisor of 8; an even number of bytes."""
    codes_per_byte = 8 // bits
    parts = filled(codes, 2 * codes_per_byte).reshape(-1, codes_per_byte)
    result = np.zeros(len(parts), np.uint8)
    for index in range(codes_per_byte):
        result |= parts[:, index] << np.uint8(bits * index)
    return result


def parted(stored: Bytes, bits: int) -> Bytes:
    """The inverse of `joined`, with the zeros that filled it up."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.asarray((stored[:, None] >> shifts) & np.uint8((1 << bits) - 1), np.uint8).reshape(-1)


@lru_cache(maxsize=32)
def integers(element: IntFormat) -> NDArray[np.int8]:
    """Every code as an integer. Not for weights that hold -0, which becomes 0."""
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    numbers = decode_elements(element, codes, np.dtype(np.float32)) * np.float32(2.0**element.fraction_bits)
    return np.asarray(numbers, np.int8)


def numbers_of_bytes(element: ElementFormat, bits: int) -> NDArray[np.float32]:
    """The numbers in every byte: [256, 8 / bits]. Codes of NaN or Inf are never looked up; they are 0."""
    codes = parted(np.arange(256, dtype=np.uint8), bits).reshape(256, -1)
    numbers = np.asarray(decode_elements(element, codes, np.dtype(np.float32)), np.float32)
    return np.asarray(np.where(np.isfinite(numbers), numbers, 0), np.float32)


def magnitudes_of_bytes(element: ElementFormat, bits: int) -> NDArray[np.float32]:
    """The magnitudes in every byte, each filled up to that many bits: [256, 8 / bits]."""
    codes = parted(np.arange(256, dtype=np.uint8), bits).reshape(256, -1) & np.uint8((1 << (element.bits - 1)) - 1)
    return np.asarray(decode_elements(element, codes, np.dtype(np.float32)), np.float32)


def words_to_codes(words: NDArray[np.uint16], bits: int) -> Bytes:
    """The codes in words of 12 bits, the first one lowest: [words, 12 / bits]."""
    shifts = np.arange(0, 12, bits, dtype=np.uint16)
    return np.asarray((words[:, None] >> shifts) & np.uint16((1 << bits) - 1), np.uint8)


def numbers_of_words(element: ElementFormat) -> NDArray[np.float32]:
    """The numbers in every word of 12 bits: [4096, 12 / bits]."""
    codes = words_to_codes(np.arange(4096, dtype=np.uint16), element.bits)
    return np.asarray(decode_elements(element, codes, np.dtype(np.float32)), np.float32)


def signs_of_bytes() -> NDArray[np.float32]:
    """-1 for every bit that is set, else 1: [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.asarray(np.where(bits == 1, -1, 1), np.float32)
