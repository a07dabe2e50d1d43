"""The operators of `com.amd.quark` as functions of ordinary ONNX operators, each for a model of one opset.

ExtendedQuantizeLinear and ExtendedDequantizeLinear compute

    quantize     integers: saturate(round_half_even(x / scale) + zero_point), NaN becomes the zero point
                 floats:   x / scale + zero_point in the type; finite values beyond it saturate, NaN and Inf stay
    dequantize   (x - zero_point) * scale

x / scale is a float32 division; the rest is float64, in which sums of 32-bit integers are exact. `scale` and
`zero_point` have one element, or one for each index of `axis`. A float16 x or scale is widened to float32; the
dequantized type is that of the scale.

The quantized type is that of the zero point. Its limits are found by casting: the largest of 0x7F, 0xFF, 0x7FFF, ...
cast to an integer type is the type's maximum, because a number that does not fit keeps its lowest bits. Up to opset 14
there is no CastLike, so the type must be known when the function is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from onnx import FunctionProto, TensorProto

from quark.formats.block import SCALE_FACTORS
from quark.formats.catalog import BFLOAT16, FLOAT16, MX_ELEMENTS, sign_magnitude
from quark.formats.spec import NonFinite, ScaleRule, SubBlocks
from quark.ops.function_body import BOOL, CAST_LIKE_OPSET, DOUBLE, FLOAT, INT64, FunctionBody, Value
from quark.ops.portable_blocks import (
    BLOCK_AXIS,
    FLOAT32_MAX,
    PHI32,
    ROUNDING_FACTOR,
    RULES,
    BlockArithmetic,
    BlockLayout,
    Elements,
    cut_end,
    last_place,
    least_error_scale,
    narrowed,
    pad_end,
    quantize_dequantize,
    shape_part,
    widened_input,
    within_reach,
)
from quark.ops.schema import (
    BFP_METHODS,
    BFP_QUANTIZE_DEQUANTIZE,
    BIT_WIDTH_OVERHEAD,
    BY_METHOD,
    EXTENDED_AXIS,
    EXTENDED_DEQUANTIZE_LINEAR,
    EXTENDED_QUANTIZE_LINEAR,
    FLOAT_SCALE_QUANTIZE_DEQUANTIZE,
    FLOAT_SCALES,
    MX_QUANTIZE_DEQUANTIZE,
    TENSOR_SCALE,
    TO_BFP,
    default_bfp_nonfinite,
)

HIGHEST_CODES = [0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF]
LOWEST_CODES = [-0x80, -0x8000, -0x80000000, 0]


def mx_function(opset: int) -> FunctionProto:
    """MXQuantizeDequantize."""
    body = FunctionBody(opset)
    attribute = MX_QUANTIZE_DEQUANTIZE.attribute
    grids = [element.grid for element in MX_ELEMENTS.values()]
    elements = Elements.of(body, grids, body.place(attribute("element_dtype"), tuple(MX_ELEMENTS)))
    policy = body.place(attribute("nonfinite"), attribute("nonfinite").choices)
    passes = policy.lookup([choice is NonFinite.PASSTHROUGH for choice in NonFinite], BOOL)
    x, wide = widened_input(body)
    block = within_reach(body.integer(attribute("block_size")), elements.is_mse)
    layout = BlockLayout.of(wide, body.integer(attribute("axis")), block)
    arithmetic = BlockArithmetic(elements, layout, passes, lambda y, shape: y.on_flat(elements.quantize, shape))
    out = quantize_dequantize(wide, arithmetic)
    return body.function(MX_QUANTIZE_DEQUANTIZE, narrowed(out, x), MX_QUANTIZE_DEQUANTIZE.defaults)


def float_scale_function(opset: int) -> FunctionProto:
    """FloatScaleQuantizeDequantize; every line of `quark.formats.block` about float scales is one node here."""
    body, operator = FunctionBody(opset), FLOAT_SCALE_QUANTIZE_DEQUANTIZE
    attribute = operator.attribute
    grids = [element.grid for element in MX_ELEMENTS.values()]
    rules = (ScaleRule.FLOOR, ScaleRule.MSE)
    elements = Elements.of(body, grids, body.place(attribute("element_dtype"), tuple(MX_ELEMENTS)), rules)
    scale_place = body.place(attribute("scale_dtype"), FLOAT_SCALES)
    scale_grids = [MX_ELEMENTS[name].grid for name in FLOAT_SCALES]
    scale_highest = scale_place.lookup([grid.highest for grid in scale_grids])
    scale_factor = scale_place.lookup([PHI32 * 2.0**-grid.mantissa_bits for grid in scale_grids])
    least_spacing = scale_place.lookup([2.0 ** (grid.min_exponent - grid.mantissa_bits) for grid in scale_grids])
    policy = body.place(attribute("nonfinite"), attribute("nonfinite").choices)
    passes = policy.lookup([choice is NonFinite.PASSTHROUGH for choice in NonFinite], BOOL)
    x, wide = widened_input(body)
    block = within_reach(body.integer(attribute("block_size")), elements.is_mse)
    layout = BlockLayout.of(wide, body.integer(attribute("axis")), block)
    blocks = layout.split(wide)
    finite = blocks.on_flat(lambda x: (abs(x) <= FLOAT32_MAX).where(x, 0.0), layout.blocks)
    amax = abs(finite).reduce("Max", BLOCK_AXIS)
    shape, row = amax.shape(), amax.reshape([-1])

    # the zero is for tensors without elements
    largest = body.op("Concat", row, body.constant([0.0], FLOAT), axis=0).reduce("Max", 0)
    computed = largest / (elements.highest * scale_highest)
    # Clip ignores limits that are absent, and an absent input of the function is one
    given = body.input(TENSOR_SCALE, FLOAT)
    tensor_scale = body.op("Clip", computed, given, given)
    is_legal = (tensor_scale >= 0.0) & ((tensor_scale * scale_highest) <= FLOAT32_MAX)
    expectation = f"{TENSOR_SCALE}: expected a number of at least 0 that times the largest block scale is finite"
    tensor_scale = body.stop_if(~is_legal, tensor_scale, expectation)
    divisor = tensor_scale.equals(0.0).where(1.0, tensor_scale)
    wanted = row / elements.highest / divisor

    def scales_of(wanted: Value) -> Value:
        bounded = wanted.clip(0.0, scale_highest)
        spacing = body.op("Max", abs(last_place(bounded * scale_factor)), least_spacing)
        large = spacing * ROUNDING_FACTOR
        return ((bounded + large) - large) * tensor_scale

    def quantize(x: Value, scales: Value) -> Value:
        y = x / scales.on_flat(lambda scales: scales.equals(0.0).where(1.0, scales))
        return y.on_flat(lambda y: elements.quantize(y.clip(elements.lowest, elements.highest)))

    def best() -> Value:
        def candidates() -> Value:
            return scales_of(body.op("Concat", *(wanted * factor for factor in SCALE_FACTORS), axis=0))

        return least_error_scale(finite, len(SCALE_FACTORS), candidates, shape, quantize)

    scale = body.branch(elements.is_mse, best, lambda: scales_of(wanted)).reshape(shape)
    rounded = quantize(finite, scale)
    specials = blocks - finite  # zero where the input is finite, else the input
    total = specials.reduce("L1", BLOCK_AXIS)
    kept = body.branch(passes, lambda: scale, lambda: scale + (total - total))
    out = rounded * kept
    out = body.branch(passes, lambda: out + specials, lambda: out)
    return body.function(operator, narrowed(layout.join(out), x), operator.defaults)


def bfp_function(opset: int) -> FunctionProto:
    """BFPQuantizeDequantize."""
    body, attribute = FunctionBody(opset), BFP_QUANTIZE_DEQUANTIZE.attribute
    method = body.place(attribute("bfp_method"), BFP_METHODS)
    is_prime = method.lookup([name != TO_BFP for name in BFP_METHODS], BOOL)
    may_carry = method.lookup([[False, name == TO_BFP] for name in BFP_METHODS], BOOL)
    carries = body.place(attribute("use_compiler_version_cpu_kernel"), (0, 1)).lookup(may_carry)
    # elements are sign and magnitude; two's complement, with -2 as the lowest, if they may carry. Carrying is a scale
    # rule of its own: with any other than floor the runtime stops.
    widths = attribute("bit_width").integers
    grids = [sign_magnitude(width - BIT_WIDTH_OVERHEAD).grid for width in widths]
    elements = Elements.of(body, grids, body.place(attribute("bit_width"), widths))
    expectation = f"scale_rule: expected {RULES[0].value} with use_compiler_version_cpu_kernel"
    factor = body.stop_if(carries & (elements.rule.index > 0), elements.scale_factor.reshape([1]), expectation)
    elements = replace(elements, lowest=carries.where(-2.0, elements.lowest), scale_factor=factor)
    block = within_reach(body.integer(attribute("block_size")), elements.is_mse)
    size = is_prime.where(body.integer(attribute("sub_block_size")), 1)
    shift_bits = attribute("sub_block_shift_bits").integers
    units = [2.0 ** -SubBlocks(1, bits).max_shift for bits in shift_bits]
    finest = body.place(attribute("sub_block_shift_bits"), shift_bits).lookup(
        method.lookup([[1.0 if name == TO_BFP else unit for unit in units] for name in BFP_METHODS], DOUBLE)
    )
    sub_blocks = SubBlockArithmetic(elements, block, size, finest, ~is_prime)
    x, wide = widened_input(body)
    rounds_first = body.place(attribute("convert_to_bfloat_before_bfp"), (0, 1)).lookup([False, True], BOOL)
    source = body.branch(rounds_first, lambda: wide.cast(TensorProto.BFLOAT16).cast(FLOAT), lambda: wide)
    layout = BlockLayout.of(source, body.integer(attribute("axis")), block)
    policies = (*(policy.value for policy in NonFinite), BY_METHOD)
    defaults = [default_bfp_nonfinite(name) for name in BFP_METHODS]
    table = [[(policy or default) == NonFinite.PASSTHROUGH for policy in (*NonFinite, None)] for default in defaults]
    passes = body.place(attribute("nonfinite"), policies).lookup(method.lookup(table, BOOL))
    arithmetic = BlockArithmetic(elements, layout, passes, sub_blocks.quantize, is_prime, carries)
    out = narrowed(quantize_dequantize(source, arithmetic), x)
    return body.function(BFP_QUANTIZE_DEQUANTIZE, out, {**BFP_QUANTIZE_DEQUANTIZE.defaults, "nonfinite": BY_METHOD})


@dataclass(frozen=True)
class SubBlockArithmetic:
    """Rounds blocks by sub-blocks of `size`; a method without sub-blocks is plain, with size and unit 1.

    A sub-block's microexponent is the distance between the block's scale and that of its own largest magnitude, at most
    `max_shift`: in units of the block's scale, its own scale clipped to [2^-max_shift, 1], where `finest` is the
    smallest. The sub-block is rounded in units of it.
    """

    elements: Elements
    block: Value
    size: Value
    finest: Value
    is_plain: Value

    def quantize(self, y: Value, shape: Value) -> Value:
        """Elements from blocks in units of their scale; `shape` is that of the blocks."""
        body, plain = y.body, self.is_plain
        count = (self.block + self.size - 1) // self.size
        padded = count * self.size
        is_even = padded <= self.block
        whole_shape = body.shortcut(is_even, lambda: shape, lambda: _with_dims(shape, padded))
        parts_shape = body.shortcut(plain, lambda: shape, lambda: _with_dims(shape, count, self.size))
        whole = body.shortcut(is_even, lambda: y, lambda: pad_end(y, BLOCK_AXIS, 4, padded - self.block))
        unit = body.shortcut(plain, lambda: whole, lambda: self._units(whole.reshape(parts_shape)))
        parts = body.shortcut(plain, lambda: whole, lambda: whole.reshape(parts_shape) / unit)
        parts = parts.on_flat(self.elements.quantize, parts_shape)
        parts = body.shortcut(plain, lambda: parts, lambda: (parts * unit).reshape(whole_shape))
        return body.shortcut(is_even, lambda: parts, lambda: cut_end(parts, BLOCK_AXIS, self.block))

    def _units(self, parts: Value) -> Value:
        """The spacing of each sub-block relative to that of its block."""
        amax = abs(parts).reduce("Max", BLOCK_AXIS + 1)
        return self.elements.scale(amax.reshape([-1]), self.finest, 1.0).reshape(amax.shape())


def _with_dims(shape: Value, *dims: Value) -> Value:
    """A shape of four with its block dimension replaced."""
    before, after = shape_part(shape, 0, BLOCK_AXIS), shape_part(shape, BLOCK_AXIS + 1, 4)
    return shape.body.op("Concat", before, *dims, after, axis=0)


def quantize_linear_function(opset: int, quantized_type: int | None = None) -> FunctionProto:
    """ExtendedQuantizeLinear; below opset 15 for zero points of `quantized_type` only."""
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
    """ExtendedDequantizeLinear."""
    body = FunctionBody(opset)
    x, scale, zero_point = (body.input(name, FLOAT) for name in EXTENDED_DEQUANTIZE_LINEAR.inputs)
    scale, offset = _along_axis(body, x, scale, zero_point.cast(DOUBLE))
    out = (x.cast(DOUBLE) - offset).cast(FLOAT) * scale.cast(FLOAT)
    if opset >= CAST_LIKE_OPSET:  # to the scale's type; if that is float16, finite values saturate

        def typed(value: Value) -> Value:
            return body.op("CastLike", value, scale)

        product = out
        is_float16 = typed(body.constant(BFLOAT16.max, FLOAT)).cast(FLOAT) > FLOAT32_MAX
        out = typed(body.branch(is_float16, lambda: _saturated_float(product, typed), lambda: product))
    return body.function(EXTENDED_DEQUANTIZE_LINEAR, out, EXTENDED_DEQUANTIZE_LINEAR.defaults)


def _along_axis(body: FunctionBody, x: Value, *parameters: Value) -> list[Value]:
    """The parameters in a shape that broadcasts with x: their elements along `axis`, 1 elsewhere."""
    rank = x.shape().shape()
    axis = body.integer(EXTENDED_AXIS) * (rank > 1).cast(INT64)  # a vector has one axis
    axis = axis + (axis < 0).where(rank, 0)
    positions = body.op("Range", body.constant(0, INT64), rank.reshape([]), 1)
    is_axis = positions.equals(axis)
    return [p.reshape(is_axis.where(body.op("Size", p, type=INT64), 1)) for p in parameters]


def _saturated_float(value: Value, typed: Callable[[Value], Value]) -> Value:
    """value clipped to the range of the float type; Inf stays."""
    is_float16 = typed(value.body.constant(BFLOAT16.max, FLOAT)).cast(FLOAT) > FLOAT32_MAX
    highest = is_float16.where(value.body.constant(FLOAT16.max, FLOAT), BFLOAT16.max)
    return (abs(value) <= FLOAT32_MAX).where(value.clip(-highest, highest), value)


def _saturated_integer(quotient: Value, offset: Value, typed: Callable[[Value], Value]) -> Value:
    """quotient rounded, plus the zero point, clipped to the range of the integer type."""
    body = quotient.body
    highest, lowest = (
        typed(body.constant(codes, INT64)).cast(DOUBLE).reduce(how, 0).reshape([])
        for codes, how in ((HIGHEST_CODES, "Max"), (LOWEST_CODES, "Min"))
    )
    rounded = body.op("Round", quotient)
    rounded = quotient.equals(quotient).where(rounded, 0.0)
    return (rounded + offset).clip(lowest, highest)
