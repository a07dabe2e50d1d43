"""What MXQuantizeDequantize and BFPQuantizeDequantize have in common, as ordinary ONNX operators.

    out = scale * elements(x / scale)

with the scale of each block from its largest magnitude, see portable_elements. What an attribute switches off is an If
that ONNX Runtime removes when it makes the session. The values are those of `quantize_dequantize`, exactly.

float16 is computed in float32. Up to opset 14 no node can follow its input's type, so that a function for those opsets
takes float32 only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quark.ops.function_body import CAST_LIKE_OPSET, FLOAT, FunctionBody, Value
from quark.ops.portable_elements import FLOAT32_MAX, SCALE_LIMITS, Elements
from quark.ops.portable_layout import BLOCK_AXIS, BlockLayout
from quark.ops.portable_mse import least_error_scale

SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class BlockArithmetic:
    """What one operator puts into the common pipeline."""

    elements: Elements
    layout: BlockLayout
    passes_nonfinite: Value
    quantize: Callable[[Value, Value], Value]  # blocks in units of their scale, and their shape: to elements
    flushes: Value | None = None  # subnormal inputs count as zero
    carries: Value | None = None  # an element that rounds past the top code raises its block's exponent


def widened_input(body: FunctionBody) -> tuple[Value, Value]:
    """The input as it comes, and as float32."""
    x = body.input("x", FLOAT)
    return x, x if body.opset < CAST_LIKE_OPSET else x.cast(FLOAT)


def narrowed(out: Value, x: Value) -> Value:
    """out in the type that x came in."""
    return out if out.body.opset < CAST_LIKE_OPSET else out.body.op("CastLike", out, x)


def quantize_dequantize(x: Value, arithmetic: BlockArithmetic) -> Value:
    """x, float32, quantized in its shape."""
    body, layout, passes = x.body, arithmetic.layout, arithmetic.passes_nonfinite
    blocks = layout.split(x)
    finite = body.branch(passes, lambda: blocks.on_flat(_zero_unless_finite, layout.blocks), lambda: blocks)
    kept = finite
    if arithmetic.flushes is not None:
        flushed = lambda: finite.on_flat(_zero_if_subnormal, layout.blocks)  # noqa: E731
        kept = body.branch(arithmetic.flushes, flushed, lambda: finite)
    scale = _scale(finite, kept, arithmetic)
    out = _quantize_at(scale, kept, arithmetic)
    # blocks - finite is zero where the input is finite, and the input itself elsewhere
    out = body.branch(passes, lambda: out + (blocks - finite), lambda: out)
    return layout.join(out)


def _zero_unless_finite(x: Value) -> Value:
    return (abs(x) <= FLOAT32_MAX).where(x, 0.0)


def _zero_if_subnormal(x: Value) -> Value:
    return (abs(x) < SMALLEST_NORMAL).where(0.0, x)


def _scale(finite: Value, kept: Value, arithmetic: BlockArithmetic) -> Value:
    """The scales of the blocks, shape (outer, blocks, 1, inner); any number where NaN or Inf came in."""
    elements = arithmetic.elements
    amax = abs(finite).reduce("Max", BLOCK_AXIS)
    shape = amax.shape()
    scale = elements.scale(amax.reshape([-1]), *SCALE_LIMITS)
    best = lambda: least_error_scale(kept, scale, shape, arithmetic.quantize)  # noqa: E731
    return finite.body.branch(elements.is_mse, best, lambda: scale).reshape(shape)


def _quantize_at(scale: Value, x: Value, arithmetic: BlockArithmetic) -> Value:
    """x quantized at these scales; a block with NaN or Inf becomes NaN."""
    body, carries, shape = x.body, arithmetic.carries, arithmetic.layout.blocks
    y = x / scale
    scale = body.branch(arithmetic.passes_nonfinite, lambda: scale, lambda: scale + _nan_if_bad(y))
    if carries is None:
        return arithmetic.quantize(y, shape) * scale
    raised = body.branch(carries, lambda: _carry(y, arithmetic.elements, scale.shape()), lambda: scale)
    y = body.branch(carries, lambda: y / raised, lambda: y)
    out = arithmetic.quantize(y, shape) * scale
    return body.branch(carries, lambda: out * raised, lambda: out)


def _nan_if_bad(y: Value) -> Value:
    """NaN for a block that holds NaN or Inf, else 0; y is in units of the scale, where no sum overflows.

    A sum of magnitudes is finite if they all are, and s - s is NaN if s is not. ReduceMax would overlook a NaN.
    """
    total = y.reduce("L1", BLOCK_AXIS)
    return total - total


def _carry(y: Value, elements: Elements, shape: Value) -> Value:
    """2 for a block whose largest element would round past the top code, else 1.

    Only a positive element can: the lowest code is one further out than the highest. This stays a factor of its own
    because a scale of 2^128 is no float32.
    """
    largest = y.reduce("Max", BLOCK_AXIS).reshape([-1])
    is_past = elements.round(largest, elements.least_spacing) > elements.highest
    return is_past.where(y.body.constant(2.0, FLOAT), 1.0).reshape(shape)
