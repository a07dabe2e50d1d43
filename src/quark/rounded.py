"""Arrays rounded as a choice of the plan says: the numbers that the quantized network computes with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.errors import ModelError
from quark.formats.affine import (
    AffineParameters,
    Granularity,
    code_dtype,
    dequantize_affine,
    integer_format,
    quantize_affine,
)
from quark.formats.arrays import array_kind
from quark.formats.catalog import get_format
from quark.formats.quantize import quantize_dequantize
from quark.formats.spec import IntFormat
from quark.plan import AffineChoice, BlockChoice, Choice, FloatChoice

Array = NDArray[Any]

_CHUNK = 1 << 16  # elements: intermediate results of numpy stay in the processor's cache


def rounded(array: Array, choice: Choice) -> Array:
    """Return the array as the quantized network sees it, in float32."""
    wide = array.astype(np.float32, copy=False)
    if isinstance(choice, AffineChoice):
        if choice.axis is None:
            return wide + rounding_error(wide, choice)
        parameters = parameters_of(choice, wide.shape)
        return np.asarray(dequantize_affine(quantize_affine(wide, parameters), parameters))
    if isinstance(choice, BlockChoice):
        return block_values(wide, choice)
    if isinstance(choice, FloatChoice):
        scale = float_scale(choice, wide.ndim)
        highest = float(get_format(choice.format).max)
        if choice.format == "float16":
            small = np.clip(wide / scale, -highest, highest).astype(np.float16).astype(np.float32)
        elif choice.is_eight_bits:  # Inf saturates
            small = np.asarray(quantize_dequantize(np.clip(wide / scale, -highest, highest), choice.format))
        else:
            small = np.asarray(quantize_dequantize(wide / scale, choice.format))
        return np.asarray(small * scale)
    raise ModelError(f"{choice}: its scale is not known before run time")


def rounding_error(x: Array, choice: Choice) -> Array:
    """Return what rounding adds to every number of a float32 array."""
    if not isinstance(choice, AffineChoice) or choice.axis is not None:
        error: Array = rounded(x, choice) - x
        return error
    fmt = get_format(choice.format)
    assert isinstance(fmt, IntFormat)
    scale, zero_point = np.float32(choice.scale[0]), choice.zero_point[0]
    low, high = np.float32(fmt.qmin - zero_point), np.float32(fmt.qmax - zero_point)
    flat = np.ascontiguousarray(x).reshape(-1)
    out = np.empty_like(flat)
    for start in range(0, flat.size, _CHUNK):
        source, target = flat[start : start + _CHUNK], out[start : start + _CHUNK]
        np.divide(source, scale, out=target)
        np.rint(target, out=target)
        np.clip(target, low, high, out=target)
        np.multiply(target, scale, out=target)
        np.subtract(target, source, out=target)
    return out.reshape(x.shape)


def block_values(array: Array, choice: BlockChoice) -> Array:
    """Return the array rounded to the block format, in its own type."""
    quantizer = choice.quantizer
    wide = quantize_dequantize(array, "bfloat16") if choice.to_bfloat16_first else array
    kept = quantize_dequantize(
        wide,
        quantizer.format,
        choice.axis if array.ndim > 1 else 0,
        scale_rule=quantizer.scale_rule,
        rounding=quantizer.rounding,
        nonfinite=quantizer.nonfinite,
        tensor_scale=quantizer.tensor_scale,
    )
    return np.asarray(kept)


def float_scale(choice: FloatChoice, rank: int) -> Array:
    """Return the scale of a small float, in a shape that broadcasts with data of that rank."""
    scale = np.array(choice.scale, np.float32)
    if choice.axis is None:
        return scale.reshape(())
    return scale.reshape([-1 if axis == choice.axis % rank else 1 for axis in range(rank)])


def parameters_of(choice: AffineChoice, shape: tuple[int, ...]) -> AffineParameters:
    """Return the choice as arrays for data of that shape."""
    fmt = integer_format(choice.format)
    groups = parameter_shape(choice, shape)
    scale = np.array(choice.scale, np.float32).reshape(groups)
    zero_point = np.array(choice.zero_point, code_dtype(array_kind(scale), fmt)).reshape(groups)
    return AffineParameters(scale, zero_point, fmt, choice.axis, choice.group_size)


def parameter_shape(choice: AffineChoice, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales for data of that shape, on which only groups depend."""
    if choice.axis is None:
        return ()
    return (-1,) if choice.group_size is None else Granularity(choice.axis, choice.group_size).parameter_shape(shape)
