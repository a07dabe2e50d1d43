"""ExtendedQuantizeLinear and ExtendedDequantizeLinear as functions of ordinary ONNX operators.

    quantize     integers: saturate(round_half_even(x / scale) + zero_point), NaN becomes the zero point
                 floats:   x / scale + zero_point in the type; finite values beyond it saturate, NaN and Inf stay
    dequantize   (x - zero_point) * scale

x / scale is a float32 division; what follows is float64, in which sums of 32-bit integers are exact. `scale` and
`zero_point` have one element, or one for each index of `axis`. A float16 x or scale is widened to float32; the
dequantized type is the scale's.

The quantized type is that of the zero point. Its limits are found by casting: the greatest of 0x7F, 0xFF, 0x7FFF, ...
cast to an integer type is the type's maximum, because a number that does not fit keeps its lowest bits. Up to opset 14
there is no CastLike, so that the type must be given when the function is written.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import FunctionProto

from quark.formats.catalog import BFLOAT16, FLOAT16
from quark.ops.function_body import CAST_LIKE_OPSET, DOUBLE, FLOAT, INT64, FunctionBody, Value
from quark.ops.portable_elements import FLOAT32_MAX
from quark.ops.schema import EXTENDED_AXIS, EXTENDED_DEQUANTIZE_LINEAR, EXTENDED_QUANTIZE_LINEAR

HIGHEST_CODES = [0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF]
LOWEST_CODES = [-0x80, -0x8000, -0x80000000, 0]


def quantize_linear_function(opset: int, quantized_type: int | None = None) -> FunctionProto:
    """The function for a model of that opset; below 15, for zero points of `quantized_type` only."""
    body = FunctionBody(opset)
    x, scale, zero_point = (body.input(name, FLOAT) for name in EXTENDED_QUANTIZE_LINEAR.inputs)

    def typed(value: Value) -> Value:
        if quantized_type is not None:
            return value.cast(quantized_type)
        return body.op("CastLike", value, zero_point)

    scale, offset = _along_axis(body, x, scale, zero_point.cast(DOUBLE))
    quotient = x.cast(FLOAT) / scale.cast(FLOAT)
    is_float = typed(body.constant(0.5, FLOAT)).cast(FLOAT) > 0.0
    code = body.branch(
        is_float,
        lambda: _saturated_float(quotient + offset.cast(FLOAT), typed).cast(DOUBLE),
        lambda: _saturated_integer(quotient.cast(DOUBLE), offset, typed),
    )
    return body.function(EXTENDED_QUANTIZE_LINEAR, typed(code), EXTENDED_QUANTIZE_LINEAR.defaults)


def dequantize_linear_function(opset: int) -> FunctionProto:
    """The function for a model of that opset."""
    body = FunctionBody(opset)
    x, scale, zero_point = (body.input(name, FLOAT) for name in EXTENDED_DEQUANTIZE_LINEAR.inputs)
    scale, offset = _along_axis(body, x, scale, zero_point.cast(DOUBLE))
    out = (x.cast(DOUBLE) - offset).cast(FLOAT) * scale.cast(FLOAT)
    if opset >= CAST_LIKE_OPSET:
        out = _like_scale(out, scale)
    return body.function(EXTENDED_DEQUANTIZE_LINEAR, out, EXTENDED_DEQUANTIZE_LINEAR.defaults)


def _like_scale(out: Value, scale: Value) -> Value:
    """out in the scale's type; where that is float16, finite values saturate."""

    def typed(value: Value) -> Value:
        return out.body.op("CastLike", value, scale)

    is_float16 = typed(out.body.constant(BFLOAT16.max, FLOAT)).cast(FLOAT) > FLOAT32_MAX
    return typed(out.body.branch(is_float16, lambda: _saturated_float(out, typed), lambda: out))


def _along_axis(body: FunctionBody, x: Value, *parameters: Value) -> list[Value]:
    """The parameters in a shape that broadcasts with x: their elements along `axis`, 1 everywhere else."""
    rank = x.shape().shape()
    axis = body.integer(EXTENDED_AXIS) * (rank > 1).cast(INT64)  # a vector has one axis
    axis = axis + (axis < 0).where(rank, 0)
    positions = body.op("Range", body.constant(0, INT64), rank.reshape([]), 1)
    is_axis = positions.equals(axis)
    return [p.reshape(is_axis.where(body.op("Size", p, type=INT64), 1)) for p in parameters]


def _saturated_float(value: Value, typed: Callable[[Value], Value]) -> Value:
    """value in the range of the float type; Inf stays."""
    is_float16 = typed(value.body.constant(BFLOAT16.max, FLOAT)).cast(FLOAT) > FLOAT32_MAX
    highest = is_float16.where(value.body.constant(FLOAT16.max, FLOAT), BFLOAT16.max)
    return (abs(value) <= FLOAT32_MAX).where(value.clip(-highest, highest), value)


def _saturated_integer(quotient: Value, offset: Value, typed: Callable[[Value], Value]) -> Value:
    """quotient rounded, plus the zero point, in the range of the integer type."""
    body = quotient.body
    highest, lowest = (
        typed(body.constant(codes, INT64)).cast(DOUBLE).reduce(how, 0).reshape([])
        for codes, how in ((HIGHEST_CODES, "Max"), (LOWEST_CODES, "Min"))
    )
    rounded = body.op("Round", quotient)
    rounded = quotient.equals(quotient).where(rounded, 0.0)
    return (rounded + offset).clip(lowest, highest)
