"""The block operators as portable functions for one choice of attributes.

Most models use one format everywhere. A function for that format alone needs 33 to 66 nodes instead of 150 to 220, and
nearly all of the time that a session takes to open goes into the nodes of its functions. Such a function ignores the
attributes of the nodes that call it: after changing them, write the functions again.

The tensor keeps its shape. Only its magnitudes are gathered into blocks, along the axis:

    blocks = Gather(|x|, starts and offsets)     (..., n, ...) -> (..., blocks, block, ...)
    step   = Gather(steps of the blocks, i // block)           -> (..., n, ...)

where a last block that is too short repeats its last element. Both lists of indices are cut from constants by the
length of the axis, which ONNX Runtime does when it creates the session.

A NaN counts as Inf, whose scale is Inf - Inf: the whole block becomes NaN. Elements are rounded in units of `step`: the
spacing of integers, or the block's scale for floats. Powers of two follow from magnitudes in float64 as in
`portable_blocks`. With sub-blocks the magnitude of a sub-block counts, but at least 2^-max_shift times that of its
block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import FunctionProto, TensorProto

from quark.formats.block import BlockQuantizer
from quark.formats.spec import FLOAT32_MAX, SCALE_MIN_EXPONENT, Grid, NonFinite, Rounding, ScaleRule
from quark.ops.function_body import BOOL, CAST_LIKE_OPSET, DOUBLE, FLOAT, INT64, FunctionBody, Value
from quark.ops.portable_blocks import (
    MINUS_BELOW_ONE,
    PHI32,
    ROUNDING_FACTOR,
    SMALLEST_NORMAL,
    scale_factor,
)
from quark.ops.schema import BY_METHOD, OPERATORS

MIN_OPSET = CAST_LIKE_OPSET  # Shape of a part of the dimensions came with the same opset
MAX_LENGTH = 2**16  # length of an axis: constants of this length are in every call
LEAST_STEP_EXPONENT = -149  # exponent of float32's smallest subnormal
LEAST_SUBNORMAL = 2.0**LEAST_STEP_EXPONENT
POWER_OF_TWO_FACTOR = 2.0**23  # rounds a number of the same sign, as ROUNDING_FACTOR rounds numbers of any sign


@dataclass(frozen=True)
class FixedQuantizer:
    """What all nodes that call the function have in common: the quantizer, its axis, whether the input is rounded to
    bfloat16 first; and the longest of their axes. The input is float32 and has that axis."""

    quantizer: BlockQuantizer
    axis: int
    rounds_first: bool
    longest: int

    @property
    def is_supported(self) -> bool:
        """True if `fixed_function` can write the arithmetic."""
        fmt, rule = self.quantizer.format, self.quantizer.scale_rule
        if self.quantizer.rounding is not Rounding.HALF_EVEN or rule is ScaleRule.MSE or self.longest > MAX_LENGTH:
            return False
        if fmt.scale is not None:
            return self.quantizer.nonfinite is NonFinite.BLOCK_NAN
        # not written: clipping a scale above 2^127, raising a block's exponent, steps below float32's subnormals
        grid = fmt.element.grid
        shift = 0 if fmt.sub_blocks is None else fmt.sub_blocks.max_shift
        least = SCALE_MIN_EXPONENT - shift + (grid.min_exponent - grid.mantissa_bits if grid.is_uniform else 0)
        is_bounded = rule is ScaleRule.FLOOR or grid.max_exponent > 0
        return is_bounded and not fmt.carry and least >= LEAST_STEP_EXPONENT


def fixed_function(op_type: str, opset: int, fixed: FixedQuantizer) -> FunctionProto:
    """The operator with these attributes as a function for opset 15 or later."""
    body, fmt = FunctionBody(opset), fixed.quantizer.format
    x = body.input("x", FLOAT)
    if fixed.rounds_first:
        x = x.cast(TensorProto.BFLOAT16).cast(FLOAT)
    arithmetic = _float_scales if fmt.scale is not None else _powers_of_two
    operator = OPERATORS[op_type]
    defaults = {a.name: BY_METHOD if a.default is None else a.default for a in operator.attributes}
    function = body.function(operator, arithmetic(x, fixed), defaults)
    del function.node[-1]  # the last node of the arithmetic writes the output itself, which saves an Identity
    function.node[-1].output[0] = "y"
    return function


class Blocks:
    """Blocks of `size` along an axis whose length is `length`, a vector of one element, and at most `longest`.

    ONNX Runtime takes several milliseconds for each call whose shapes it learns only by folding constants. It knows the
    length of a slice that ends at `length` at once, so that even the number of blocks is found by slicing.
    """

    def __init__(self, axis: int, size: int, length: Value, longest: int) -> None:
        self._axis = axis
        body = length.body
        zero, size = body.constant([0], INT64), min(size, longest)
        indices = body.constant(np.arange(longest).reshape(-1, 1), INT64)
        starts = body.op("Slice", indices, zero, length, zero, body.constant([size], INT64))
        self._members = body.op("Min", starts + body.constant(np.arange(size), INT64), length - 1)
        self._owners = body.op("Slice", body.constant(np.arange(longest) // size, INT64), zero, length)
        self.starts, self.most = starts, -(-longest // size)

    def largest(self, x: Value) -> Value:
        """The largest of each block, (..., blocks, ...)."""
        blocks = x.body.op("Gather", x, self._members, axis=self._axis)
        return blocks.reduce("Max", self._axis + (self._axis >= 0), keeps_axis=False)

    def spread(self, values: Value) -> Value:
        """The value of its block for every element."""
        return values.body.op("Gather", values, self._owners, axis=self._axis)


def _blocks(x: Value, fixed: FixedQuantizer) -> tuple[Blocks, Blocks | None]:
    """The blocks whose largest magnitudes are taken from x; and, if these are sub-blocks, the blocks of sub-blocks."""
    fmt = fixed.quantizer.format
    rest = {} if fixed.axis == -1 else {"end": fixed.axis + 1}
    length = x.body.op("Shape", x, type=INT64, expected="", start=fixed.axis, **rest)
    if fmt.sub_blocks is None:
        return Blocks(fixed.axis, fmt.block_size, length, fixed.longest), None
    inner = Blocks(fixed.axis, fmt.sub_blocks.size, length, fixed.longest)
    count = x.body.op("Shape", inner.starts, type=INT64, end=1)
    return inner, Blocks(fixed.axis, fmt.block_size // fmt.sub_blocks.size, count, inner.most)


def _powers_of_two(x: Value, fixed: FixedQuantizer) -> Value:
    body, quantizer = x.body, fixed.quantizer
    fmt, grid = quantizer.format, quantizer.format.element.grid
    passes = quantizer.nonfinite is NonFinite.PASSTHROUGH
    magnitudes = abs(x)
    if passes:
        is_finite = magnitudes <= FLOAT32_MAX
        counted = is_finite.where(magnitudes, 0.0)
    else:
        counted = body.op("IsNaN", magnitudes, type=BOOL).where(np.inf, magnitudes)
    blocks, outer = _blocks(x, fixed)
    largest = blocks.largest(counted).cast(DOUBLE)
    least = 2.0 ** (SCALE_MIN_EXPONENT + grid.max_exponent)
    if fmt.sub_blocks is not None and outer is not None:
        floor = outer.spread(outer.largest(largest) * 2.0**-fmt.sub_blocks.max_shift)
        largest = body.op("Max", largest, floor, least)
    else:
        largest = body.op("Max", largest, least)
    unit = 2.0 ** (grid.min_exponent - grid.mantissa_bits) if grid.is_uniform else 1.0
    scaled = largest * (scale_factor(grid, quantizer.scale_rule) * unit)
    step = blocks.spread((scaled + scaled * MINUS_BELOW_ONE[DOUBLE]).cast(FLOAT))
    kept = x
    if fmt.flush_subnormals:
        kept = (magnitudes < SMALLEST_NORMAL).where(0.0, x)
    y = kept / step
    if grid.is_uniform:
        out = body.op("Round", y).clip(grid.lowest / unit, grid.highest / unit) * step
    else:
        out = _rounded(y, grid).clip(grid.lowest, grid.highest) * step
    return is_finite.where(out, x) if passes else out


def _rounded(y: Value, grid: Grid) -> Value:
    """y rounded half to even to the grid, beyond its limits too."""
    q = y * (PHI32 * 2.0**-grid.mantissa_bits)
    spacing = abs(q + q * MINUS_BELOW_ONE[FLOAT])
    large = y.body.op("Max", spacing, 2.0 ** (grid.min_exponent - grid.mantissa_bits)) * ROUNDING_FACTOR
    return (y + large) - large


def _float_scales(x: Value, fixed: FixedQuantizer) -> Value:
    body, fmt = x.body, fixed.quantizer.format
    grid = fmt.element.grid
    assert fmt.scale is not None, fmt
    numbers = fmt.scale.grid
    magnitudes = abs(x)
    is_finite = magnitudes <= FLOAT32_MAX
    blocks, _ = _blocks(x, fixed)
    amax = blocks.largest(is_finite.where(magnitudes, np.inf))
    # the zero is for tensors without elements
    row = is_finite.where(magnitudes, 0.0).reduce("Max", fixed.axis, keeps_axis=False).reshape([-1])
    largest = body.op("Concat", row, body.constant([0.0], FLOAT), axis=0).reduce("Max", 0)
    tensor_scale = largest / (grid.highest * numbers.highest)
    divisor = tensor_scale.equals(0.0).where(1.0, tensor_scale)
    bounded = body.op("Min", amax / grid.highest / divisor, numbers.highest)
    q = bounded * (PHI32 * 2.0**-numbers.mantissa_bits * POWER_OF_TWO_FACTOR)
    least = 2.0 ** (numbers.min_exponent - numbers.mantissa_bits) * POWER_OF_TWO_FACTOR
    large = body.op("Max", q + q * MINUS_BELOW_ONE[FLOAT], least)
    # Inf - Inf for blocks that are not finite
    scales = blocks.spread(((bounded + large) - large) * tensor_scale + (amax - amax))
    y = x / body.op("Max", scales, LEAST_SUBNORMAL)  # a scale of 0 makes the result 0 for any y
    return _rounded(y.clip(grid.lowest, grid.highest), grid) * scales
