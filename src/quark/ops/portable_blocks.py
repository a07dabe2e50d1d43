"""The common part of MXQuantizeDequantize and BFPQuantizeDequantize, as ordinary ONNX operators.

    out = scale * elements(x / scale)

with the scale of each block from its largest magnitude (`Elements`). What an attribute switches off is an If that ONNX
Runtime removes when it creates the session. The values are exactly those of `quantize_dequantize`.

float16 is computed in float32. Up to opset 14 no node can follow its input's type, so functions for those opsets accept
float32 only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quark.formats.spec import SCALE_MAX_EXPONENT, SCALE_MIN_EXPONENT, Grid, Rounding, ScaleRule
from quark.ops.function_body import BOOL, CAST_LIKE_OPSET, DOUBLE, FLOAT, INT64, FunctionBody, Place, Value
from quark.ops.schema import ROUNDING_MODE, ROUNDING_MODES, SCALE_RULE

SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class BlockArithmetic:
    """The parts of the pipeline that differ between the two operators."""

    elements: Elements
    layout: BlockLayout
    passes_nonfinite: Value
    quantize: Callable[[Value, Value], Value]  # blocks in units of their scale, and their shape: to elements
    flushes: Value | None = None  # subnormal inputs count as zero
    carries: Value | None = None  # an element that rounds past the top code raises its block's exponent


def widened_input(body: FunctionBody) -> tuple[Value, Value]:
    """The input as it is, and as float32."""
    x = body.input("x", FLOAT)
    return x, x if body.opset < CAST_LIKE_OPSET else x.cast(FLOAT)


def narrowed(out: Value, x: Value) -> Value:
    """out in the type of x."""
    return out if out.body.opset < CAST_LIKE_OPSET else out.body.op("CastLike", out, x)


def quantize_dequantize(x: Value, arithmetic: BlockArithmetic) -> Value:
    """x, float32, quantized in its shape."""
    body, layout, passes = x.body, arithmetic.layout, arithmetic.passes_nonfinite
    blocks = layout.split(x)
    finite = body.branch(
        passes, lambda: blocks.on_flat(lambda x: (abs(x) <= FLOAT32_MAX).where(x, 0.0), layout.blocks), lambda: blocks
    )
    kept = finite
    if arithmetic.flushes is not None:
        kept = body.branch(
            arithmetic.flushes,
            lambda: finite.on_flat(lambda x: (abs(x) < SMALLEST_NORMAL).where(0.0, x), layout.blocks),
            lambda: finite,
        )
    amax = abs(finite).reduce("Max", BLOCK_AXIS)
    shape, elements = amax.shape(), arithmetic.elements
    floor = elements.scale(amax.reshape([-1]), *SCALE_LIMITS)  # arbitrary for blocks with NaN or Inf

    def best() -> Value:
        def candidates() -> Value:
            return body.op("Concat", *(floor * step for step in CANDIDATES), axis=0).clip(*SCALE_LIMITS)

        def quantize(x: Value, scales: Value) -> Value:
            return arithmetic.quantize(x / scales, x.shape())

        return least_error_scale(kept, len(CANDIDATES), candidates, shape, quantize)

    scale = body.branch(elements.is_mse, best, lambda: floor).reshape(shape)  # (outer, blocks, 1, inner)
    out = _quantize_at(scale, kept, arithmetic)
    # blocks - finite is zero where the input is finite, and the input itself elsewhere
    out = body.branch(passes, lambda: out + (blocks - finite), lambda: out)
    return layout.join(out)


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
    """NaN for a block with NaN or Inf, else 0; y is in units of the scale, where no sum overflows.

    A sum of magnitudes is finite if they all are, and s - s is NaN if s is not. ReduceMax would miss a NaN.
    """
    total = y.reduce("L1", BLOCK_AXIS)
    return total - total


def _carry(y: Value, elements: Elements, shape: Value) -> Value:
    """2 for a block whose largest element would round past the top code, else 1.

    Only a positive element can: the lowest code is one further out than the highest. It is a separate factor because
    2^128 is not a float32 number.
    """
    largest = y.reduce("Max", BLOCK_AXIS).reshape([-1])
    is_past = elements.round(largest, elements.least_spacing) > elements.highest
    return is_past.where(y.body.constant(2.0, FLOAT), 1.0).reshape(shape)


# Rounding to an element type and choosing a block's scale, only with sums and products of floats.
#
# With p mantissa bits, the difference q - (1 - 2^-(p+1)) * q is the last place of q, a power of two: the product lies
# between half and one place below q and is rounded to one. This is wrong only for a q that is a power of two. So with
# q = (2^p + 1) * v the difference is the power of two at or below |v| (after Rump).
#
# A scale is found that way in float64, where no float32 overflows. The scale rule takes the next power from some point
# between two float32 numbers on; a factor moves this point to the next power:
#
#     q = amax * (2^52 + 1) / 2^emax * 2/turn      floor, mse   turn = 2, never
#                                                  ceil         just above 1
#                                                  even         just below 2 - 2^-(m+1)
#                                                  rceil        just above the largest element's significand
#
# The spacing of the elements at y is s = 2^-m times the power of two at or below |y|, in float32, and (y + c) - c
# with c = 1.5 * 2^23 * s is y rounded half to even to multiples of s. Other modes differ on ties only.

PHI32, PHI64 = 2.0**23 + 1.0, 2.0**52 + 1.0
# Negative, because ONNX Runtime omits a product with a factor that float32 would round to 1.
MINUS_BELOW_ONE: dict[int, float] = {FLOAT: 2.0**-24 - 1.0, DOUBLE: 2.0**-53 - 1.0}
HALF_FLOAT32_PLACE = 2.0**-24
ROUNDING_FACTOR = 1.5 * 2.0**23
FLOAT32_MAX = float(np.finfo(np.float32).max)
SCALE_LIMITS = (2.0**SCALE_MIN_EXPONENT, 2.0**SCALE_MAX_EXPONENT)
RULES = tuple(ScaleRule)


def last_place(q: Value) -> Value:
    """One unit in the last place of q, with q's sign; q must not be a power of two."""
    return q + q * MINUS_BELOW_ONE[q.type]


def scale_factor(grid: Grid, rule: ScaleRule) -> float:
    """The factor of amax with which the last place of the product is the scale."""
    turns = {
        ScaleRule.CEIL: 1.0 + HALF_FLOAT32_PLACE,
        ScaleRule.EVEN: 2.0 - 2.0 ** -(grid.mantissa_bits + 1) - HALF_FLOAT32_PLACE,
        ScaleRule.RCEIL: grid.highest * 2.0**-grid.max_exponent + HALF_FLOAT32_PLACE,
    }
    return PHI64 * 2.0**-grid.max_exponent * (2.0 / turns.get(rule, 2.0))


@dataclass(frozen=True)
class Elements:
    """An element type and the rounding options, as scalars of the graph."""

    spacing_factor: Value  # times y, its last place is the spacing; 0 for a uniform type
    least_spacing: Value
    lowest: Value
    highest: Value
    scale_factor: Value  # float64
    rule: Place  # among the rules of the operator
    is_mse: Value
    is_half_even: Value
    tie: Value  # distance of a tie from its neighbours, in spacings; never reached for half even
    least_sign: Value  # 1 for half up, -1 for half away
    is_uniform: Value | None  # None if always

    @classmethod
    def of(
        cls, body: FunctionBody, grids: Sequence[Grid], place: Place, rules: Sequence[ScaleRule] = RULES
    ) -> Elements:
        """The grid at that index; the rest comes from the attributes. `rules` are those that the operator takes."""
        legal = tuple(rule.value for rule in rules)
        rule = body.place(replace(SCALE_RULE, choices=legal), legal)
        mode = body.place(ROUNDING_MODE, ROUNDING_MODE.choices)
        factors = place.lookup([[scale_factor(grid, rule) for rule in rules] for grid in grids], DOUBLE)
        are_uniform = [grid.is_uniform for grid in grids]
        return cls(
            spacing_factor=place.lookup([0.0 if g.is_uniform else PHI32 * 2.0**-g.mantissa_bits for g in grids]),
            least_spacing=place.lookup([2.0 ** (grid.min_exponent - grid.mantissa_bits) for grid in grids]),
            lowest=place.lookup([grid.lowest for grid in grids]),
            highest=place.lookup([grid.highest for grid in grids]),
            scale_factor=rule.lookup(factors),
            rule=rule,
            is_mse=rule.lookup([rule is ScaleRule.MSE for rule in rules], BOOL),
            is_half_even=mode.lookup([rounding is Rounding.HALF_EVEN for rounding in ROUNDING_MODES], BOOL),
            tie=mode.lookup([2.0 if rounding is Rounding.HALF_EVEN else 0.5 for rounding in ROUNDING_MODES]),
            least_sign=mode.lookup([1.0 if rounding is Rounding.HALF_UP else -1.0 for rounding in ROUNDING_MODES]),
            is_uniform=None if all(are_uniform) else place.lookup(are_uniform, BOOL),
        )

    def scale(self, amax: Value, low: Value | float, high: float) -> Value:
        """The scales of blocks with these largest magnitudes, clipped to low..high; both are rows."""
        return last_place(amax.cast(DOUBLE) * self.scale_factor).clip(low, high).cast(FLOAT)

    def quantize(self, y: Value) -> Value:
        """A row of values in units of the scale, rounded to elements."""
        spacing = self.least_spacing  # the spacing of a uniform type
        if self.is_uniform is not None:
            spacing = y.body.shortcut(
                self.is_uniform,
                lambda: self.least_spacing,
                lambda: y.body.op("Max", abs(last_place(y * self.spacing_factor)), self.least_spacing),
            )
        return self.round(y, spacing).clip(self.lowest, self.highest)

    def round(self, y: Value, spacing: Value) -> Value:
        """A row of values rounded to multiples of spacing; the attribute decides ties."""
        large = spacing * ROUNDING_FACTOR
        rounded = (y + large) - large
        return y.body.shortcut(self.is_half_even, lambda: rounded, lambda: self._move_ties(y, rounded, spacing))

    def _move_ties(self, y: Value, rounded: Value, spacing: Value) -> Value:
        """Turn half even into half up or half away: a tie that was rounded the other way moves on."""
        sign = y.body.op("Max", y.body.op("Sign", y), self.least_sign)
        is_against = ((y - rounded) * sign).equals(spacing * self.tie)
        return is_against.where(rounded + spacing * sign, rounded)


# Splitting a tensor of any rank into blocks along an axis, and joining it again.
#
#     (..., n, ...)  ->  (outer, n, inner)  ->  (outer, blocks, block, inner)
#
# A last block that is too short is filled up with zeros, which are cut off at the end. A tensor of rank 0 or 1 has one
# axis, whatever the attribute says; otherwise an axis out of range stops the runtime. With static shapes all of this is
# done when the session is created, and a tensor that divides evenly is not copied.

END = 2**62
BLOCK_AXIS = 2  # index among the four axes


@dataclass(frozen=True)
class BlockLayout:
    """The intermediate shapes; `n` and `padded` are the length of the axis without and with the zeros."""

    shape: Value
    rows: Value
    padded_rows: Value
    blocks: Value
    n: Value
    padded: Value
    is_even: Value

    @classmethod
    def of(cls, x: Value, axis: Value, block: Value) -> BlockLayout:
        """The layout for blocks along `axis`; both are vectors of one element."""
        body, shape = x.body, x.shape()
        rank = shape.shape()
        zero, one, end = (body.constant([number], INT64) for number in (0, 1, END))
        # a scalar counts as one element: the slice is [1] for rank 0 and empty for any other
        dims = body.op("Concat", shape, body.op("Slice", one, zero, 1 - rank), axis=0)
        axis = axis * (rank > 1).cast(INT64)
        n = body.op("Gather", dims, axis, axis=0, expected="axis: expected a dimension of the input")
        after = axis + (axis < 0).where(rank, 0) + 1
        framed = body.op("Concat", one, dims, one, axis=0)
        outer = body.op("Slice", framed, zero, after).reduce("Prod", 0)
        inner = body.op("Slice", framed, after + 1, end).reduce("Prod", 0)
        count = (n + block - 1) // block
        padded = count * block
        rows, padded_rows, blocks = (
            body.op("Concat", *dims, axis=0)
            for dims in ((outer, n, inner), (outer, padded, inner), (outer, count, block, inner))
        )
        return cls(shape, rows, padded_rows, blocks, n, padded, padded <= n)

    def split(self, x: Value) -> Value:
        """x as (outer, blocks, block, inner)."""
        rows = x.reshape(self.rows)
        rows = x.body.shortcut(self.is_even, lambda: rows, lambda: pad_end(rows, 1, 3, self.padded - self.n))
        return rows.reshape(self.blocks)

    def join(self, blocks: Value) -> Value:
        """The inverse of split."""
        rows = blocks.reshape(self.padded_rows)
        rows = blocks.body.shortcut(self.is_even, lambda: rows, lambda: cut_end(rows, 1, self.n))
        return rows.reshape(self.shape)


def pad_end(x: Value, axis: int, rank: int, count: Value) -> Value:
    """x, of that rank, with `count` zeros after it along axis."""
    before = x.body.constant([0] * (rank + axis), INT64)
    after = x.body.constant([0] * (rank - axis - 1), INT64)
    return x.body.op("Pad", x, x.body.op("Concat", before, count, after, axis=0))


def cut_end(x: Value, axis: int, count: Value) -> Value:
    """The first `count` of x along axis."""
    return x.body.op("Slice", x, x.body.constant([0], INT64), count, x.body.constant([axis], INT64))


def shape_part(shape: Value, start: int, stop: int) -> Value:
    """The dimensions start..stop of a shape."""
    return shape.body.op("Slice", shape, shape.body.constant([start], INT64), shape.body.constant([stop], INT64))


# The scale rule `mse`: half, once or twice the floor rule's scale, whichever is best.
#
# The three candidates are stacked on the outer axis and quantized at once. Their errors are squared and summed in
# float64, along the balanced tree that all implementations use: zeros fill the block up to a power of two, then the
# upper half is added to the lower until one is left. The block size is an attribute, so the number of halvings is not
# known here. But a block of shape 2 x 2 x ... x 2 is halved by summing its first axis, and axes of size 1 stand for
# halvings that are not needed. (A Loop would not be folded for constant inputs.)
#
# A block of more than MAX_BLOCK elements stops the runtime.

LEVELS = 16
MAX_BLOCK = 2**LEVELS
CANDIDATES = (0.5, 1.0, 2.0)


def within_reach(block: Value, is_mse: Value) -> Value:
    """The block size, a vector of one element; the runtime stops if it is too large for `mse`."""
    expectation = f"block_size: expected at most {MAX_BLOCK} with scale_rule mse"
    return block.body.stop_if(is_mse & (block > MAX_BLOCK), block, expectation)


def least_error_scale(
    x: Value, count: int, candidates: Callable[[], Value], scale_shape: Value, quantize: Callable[[Value, Value], Value]
) -> Value:
    """The best scales of x, shape (outer, blocks, block, inner), as a row. `candidates` writes the rows of `count`
    scales for each block, one after the other; `scale_shape` is the shape that broadcasts with x. Of equal errors the
    first scale wins."""
    body = x.body
    stacked = body.op("Concat", *[x] * count, axis=0)
    row = candidates()
    scales = row.reshape(scale_shape * body.constant([count, 1, 1, 1], INT64))
    elements = quantize(stacked, scales)
    error = elements.cast(DOUBLE) * scales.cast(DOUBLE) - stacked.cast(DOUBLE)
    totals = tree_sum(error * error).reshape([count, -1])
    best = body.op("ArgMin", totals, type=INT64, axis=0, keepdims=1)
    return body.op("GatherElements", row.reshape([count, -1]), best, axis=0).reshape([-1])


def tree_sum(x: Value) -> Value:
    """The sums over the block axis, which is removed, in the fixed order."""
    body = x.body
    shape = x.shape()
    outer, size, inner = (shape_part(shape, *ends) for ends in ((0, 2), (2, 3), (3, 4)))
    powers = body.constant([2**level for level in reversed(range(LEVELS))], INT64)
    halves = (powers < size).where(body.constant(2, INT64), 1)
    x = pad_end(x, BLOCK_AXIS, 4, halves.reduce("Prod", 0) - size)
    x = x.reshape(body.op("Concat", outer, halves, inner, axis=0))
    for _ in range(LEVELS):
        x = body.op("ReduceSum", x, body.constant([BLOCK_AXIS], INT64), keepdims=0)
    return x
