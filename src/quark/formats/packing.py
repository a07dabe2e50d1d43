"""Arrays in the bits that their format says: `pack` and `unpack`.

`unpack(pack(x, ...))` is `quantize_dequantize(x, ...)` exactly: == everywhere, NaN for NaN. How the bytes lie is said
in `packed_array`, which bits a number has in `element_codes`. The work is done by numpy on the CPU, whatever the array
was.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from ml_dtypes import bfloat16 as numpy_bfloat16
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.formats.arrays import CHUNK_ELEMENTS, FLOAT32, FLOAT64, Precision, array_kind
from quark.formats.block import BlockQuantizer, QuantizedBlocks, dequantize_lanes, quantize_lanes
from quark.formats.catalog import get_format
from quark.formats.element_codes import Codes, decode_elements, encode_elements, pack_bits, unpack_bits, unsigned_dtype
from quark.formats.elementwise import quantize_dequantize_elements
from quark.formats.lanes import lane_pieces
from quark.formats.packed_array import Layout, PackedArray
from quark.formats.powers import exp2, exponent_of
from quark.formats.quantize import as_index, normalize_axis, parse_choice, refuse_block_options
from quark.formats.spec import (
    SCALE_MAX_EXPONENT,
    SCALE_MIN_EXPONENT,
    SCALE_NAN_CODE,
    BlockFormat,
    ElementFormat,
    FloatFormat,
    Format,
    NonFinite,
    Rounding,
    ScaleRule,
)

_NUMPY = array_kind(np.zeros(0))


def pack(
    x: Any,
    format: str | Format,
    axis: int = -1,
    *,
    block_size: int | None = None,
    scale_rule: str | ScaleRule = ScaleRule.FLOOR,
    rounding: str | Rounding = Rounding.HALF_EVEN,
    nonfinite: str | NonFinite | None = None,
) -> PackedArray:
    """Quantize x and keep the bits; the options are those of `quantize_dequantize`.

    x is a numpy array or a torch tensor, on any device; packing itself runs on the CPU. A NaN or Inf that the policy
    passes through and the format has no code for is an error that names the first one.

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
    if isinstance(fmt, BlockFormat):
        if block_size is not None:  # a block longer than the axis is one of its length
            length = max(1, array.shape[position])
            fmt = fmt.with_block_size(min(as_index("block_size", block_size), length))
        codes, scales = _encode_blocks(array, position, BlockQuantizer(fmt, rule, mode, policy))
        bits = fmt.element.bits
    else:
        refuse_block_options(fmt, block_size, rule)
        values = quantize_dequantize_elements(_NUMPY, _NUMPY.widen(array, precision), fmt, mode, policy)
        codes, scales, bits = _encode_plain(values, fmt), np.zeros(0, np.uint8), fmt.bits
    rows = np.ascontiguousarray(np.moveaxis(codes, position, -1))
    return PackedArray(pack_bits(rows, bits), scales, fmt, tuple(x.shape), position, x.dtype)


def unpack(packed: PackedArray) -> Any:
    """The values, as the kind of array and the float type that were packed; a tensor comes back on the CPU."""
    fmt = packed.format
    shape = packed.shape or (1,)
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    rows = unpack_bits(packed.codes, element.bits, shape[packed.axis])
    codes = np.ascontiguousarray(np.moveaxis(rows, -1, packed.axis))
    out = np.empty(shape, _numpy_dtype(packed.dtype))
    precision = _NUMPY.precision(out)
    if isinstance(fmt, BlockFormat):
        _decode_blocks(codes, packed, out)
    else:
        values = decode_elements(fmt, codes, _float_dtype(precision))
        out[...] = _NUMPY.narrow(values, out)
    return _from_numpy(out.reshape(packed.shape), packed.dtype)


def _encode_blocks(x: Any, axis: int, quantizer: BlockQuantizer) -> tuple[Codes, NDArray[np.uint8]]:
    fmt = quantizer.format
    if fmt.carry or quantizer.nonfinite is NonFinite.PASSTHROUGH:
        remedy = "replace it first" if fmt.carry else "pass nonfinite='block_nan' to make its block NaN, or replace it"
        _refuse_where(~np.isfinite(x), x, fmt, remedy)
    precision = _NUMPY.precision(x)
    layout = Layout(fmt, x.shape, axis)
    planes = layout.empty_planes()
    codes = np.empty(x.shape, unsigned_dtype(fmt.element.bits))
    for place, lanes in lane_pieces(_NUMPY, x, axis, fmt.block_size):
        blocks = quantize_lanes(_NUMPY, _NUMPY.widen(lanes, precision), quantizer, precision)
        place.store(codes, encode_elements(fmt.element, _in_own_units(blocks, fmt)))
        for plane, row in zip(planes, _scale_rows(blocks, fmt, len(planes), precision), strict=True):
            layout.scale_place(place).store(plane, row[None])
    return codes, layout.scales_of(planes)


def _decode_blocks(codes: Codes, packed: PackedArray, out: Any) -> None:
    fmt = packed.format
    assert isinstance(fmt, BlockFormat)
    precision = _NUMPY.precision(out)
    layout = Layout(fmt, out.shape, packed.axis)
    planes = layout.planes_of(packed.scales)
    for place, lanes in lane_pieces(_NUMPY, codes, packed.axis, fmt.block_size):
        elements = decode_elements(fmt.element, lanes, _float_dtype(precision))
        rows = np.concatenate([layout.scale_place(place).load(plane, 1) for plane in planes])
        blocks = _blocks_of(elements, rows, fmt, precision)
        values = dequantize_lanes(_NUMPY, blocks)
        place.store(out, _NUMPY.narrow(np.where(blocks.is_bad, np.nan, values), out))


def _in_own_units(blocks: QuantizedBlocks, fmt: BlockFormat) -> Any:
    """The elements as numbers of the element type."""
    return blocks.elements if blocks.units is None else blocks.elements / _spread(blocks.units, blocks.elements, fmt)


def _spread(units: Any, elements: Any, fmt: BlockFormat) -> Any:
    """The unit of each element."""
    return units if fmt.sub_blocks is None else np.repeat(units, fmt.sub_blocks.size, axis=0)[: len(elements)]


def _scale_rows(blocks: QuantizedBlocks, fmt: BlockFormat, count: int, precision: Precision) -> NDArray[np.uint8]:
    """The bytes of each block's scale, shape (count, lanes)."""
    rows = np.zeros((count, blocks.scales.shape[1]), np.uint8)
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


def _blocks_of(elements: Any, rows: NDArray[np.uint8], fmt: BlockFormat, precision: Precision) -> QuantizedBlocks:
    """What `quantize_lanes` had decided, from the elements and the bytes of their scales."""
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


def _encode_plain(values: Any, fmt: ElementFormat) -> Codes:
    has_inf, has_nan = (fmt.has_inf, fmt.has_nan) if isinstance(fmt, FloatFormat) else (False, False)
    if not has_inf:
        remedy = "pass nonfinite='block_nan' to make it NaN, or replace it" if has_nan else "replace it first"
        _refuse_where(np.isinf(values) if has_nan else ~np.isfinite(values), values, fmt, remedy)
    codes: Codes = np.empty(values.shape, unsigned_dtype(fmt.bits))
    flat, flat_codes = values.reshape(-1), codes.reshape(-1)
    for start in range(0, flat.size, CHUNK_ELEMENTS):
        piece = slice(start, start + CHUNK_ELEMENTS)
        flat_codes[piece] = encode_elements(fmt, flat[piece])
    return codes


def _refuse_where(is_bad: Any, x: Any, fmt: Format, remedy: str) -> None:
    if is_bad.any():
        index = tuple(int(i) for i in np.argwhere(is_bad)[0])
        raise InvalidValueError(f"x{list(index)} is {x[index]}: format '{fmt}' has no code for it; {remedy}")


def _float_dtype(precision: Precision) -> np.dtype[Any]:
    return np.dtype({FLOAT32: np.float32, FLOAT64: np.float64}[precision])


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """numpy's type for a float type of numpy or torch."""
    name = str(dtype).rpartition(".")[2]
    return np.dtype(numpy_bfloat16 if name == "bfloat16" else name)


def _to_numpy(x: Any) -> NDArray[Any]:
    kind = array_kind(x)
    if kind.name == "numpy":
        return np.asarray(x)
    kind.precision(x)
    tensor = x.detach().resolve_neg().cpu()
    if tensor.dtype == kind.xp.bfloat16:
        return np.asarray(tensor.view(kind.xp.int16).numpy()).view(numpy_bfloat16)
    return np.asarray(tensor.numpy())


def _from_numpy(x: Any, dtype: Any) -> Any:
    if isinstance(dtype, np.dtype):
        return x
    torch = sys.modules["torch"]  # whoever holds one of its types has loaded it
    return torch.from_numpy(x.view(np.int16)).view(dtype) if dtype == torch.bfloat16 else torch.from_numpy(x)
