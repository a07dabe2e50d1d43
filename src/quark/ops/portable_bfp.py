"""BFPQuantizeDequantize as a function of ordinary ONNX operators.

A sub-block's microexponent is the distance between the block's scale and the one that its own largest magnitude asks
for, at most `max_shift`: in units of the block's scale, that scale itself, confined to [2^-max_shift, 1]. The sub-block
is rounded in units of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnx import FunctionProto, TensorProto

from quark.formats.catalog import sign_magnitude
from quark.formats.spec import NonFinite, SubBlocks
from quark.ops.function_body import BOOL, DOUBLE, FLOAT, FunctionBody, Place, Value
from quark.ops.portable_blocks import BlockArithmetic, narrowed, quantize_dequantize, widened_input
from quark.ops.portable_elements import RULES, Elements
from quark.ops.portable_layout import BLOCK_AXIS, BlockLayout, cut_end, pad_end, shape_part
from quark.ops.portable_mse import within_reach
from quark.ops.schema import BFP_METHODS, BFP_QUANTIZE_DEQUANTIZE, BIT_WIDTH_OVERHEAD, TO_BFP, default_bfp_nonfinite

# Absent, `nonfinite` depends on the method. A function's attribute must have a default; this word stands for absence.
BY_METHOD = ""

attribute = BFP_QUANTIZE_DEQUANTIZE.attribute


def bfp_function(opset: int) -> FunctionProto:
    """The function for a model of that opset."""
    body = FunctionBody(opset)
    method = body.place(attribute("bfp_method"), BFP_METHODS)
    is_prime = method.lookup([name != TO_BFP for name in BFP_METHODS], BOOL)
    may_carry = method.lookup([[False, name == TO_BFP] for name in BFP_METHODS], BOOL)
    carries = body.place(attribute("use_compiler_version_cpu_kernel"), (0, 1)).lookup(may_carry)
    elements = _elements(body, carries)
    block = within_reach(body.integer(attribute("block_size")), elements.is_mse)
    size = is_prime.where(body.integer(attribute("sub_block_size")), 1)
    sub_blocks = SubBlockArithmetic(elements, block, size, _finest_unit(body, method), ~is_prime)
    x, wide = widened_input(body)
    wide = _rounded_to_bfloat(wide)
    layout = BlockLayout.of(wide, body.integer(attribute("axis")), block)
    arithmetic = BlockArithmetic(
        elements, layout, _passes_nonfinite(body, method), sub_blocks.quantize, is_prime, carries
    )
    out = narrowed(quantize_dequantize(wide, arithmetic), x)
    return body.function(BFP_QUANTIZE_DEQUANTIZE, out, {**BFP_QUANTIZE_DEQUANTIZE.defaults, "nonfinite": BY_METHOD})


def _passes_nonfinite(body: FunctionBody, method: Place) -> Value:
    defaults = [default_bfp_nonfinite(name) for name in BFP_METHODS]
    table = [[(policy or default) == NonFinite.PASSTHROUGH for policy in (*NonFinite, None)] for default in defaults]
    policies = (*(policy.value for policy in NonFinite), BY_METHOD)
    return body.place(attribute("nonfinite"), policies).lookup(method.lookup(table, BOOL))


def _elements(body: FunctionBody, carries: Value) -> Elements:
    """A sign and a magnitude; two's complement, whose lowest is -2, where an element may carry. That is a scale rule
    of its own: every other than floor stops the runtime."""
    widths = attribute("bit_width").integers
    grids = [sign_magnitude(width - BIT_WIDTH_OVERHEAD).grid for width in widths]
    elements = Elements.of(body, grids, body.place(attribute("bit_width"), widths))
    expectation = f"scale_rule: expected {RULES[0].value} with use_compiler_version_cpu_kernel"
    factor = body.stop_if(carries & (elements.rule.index > 0), elements.scale_factor.reshape([1]), expectation)
    return replace(elements, lowest=carries.where(-2.0, elements.lowest), scale_factor=factor)


def _finest_unit(body: FunctionBody, method: Place) -> Value:
    shift_bits = attribute("sub_block_shift_bits").integers
    units = [2.0 ** -SubBlocks(1, bits).max_shift for bits in shift_bits]
    table = [[1.0 if name == TO_BFP else unit for unit in units] for name in BFP_METHODS]
    return body.place(attribute("sub_block_shift_bits"), shift_bits).lookup(method.lookup(table, DOUBLE))


def _rounded_to_bfloat(x: Value) -> Value:
    flag = x.body.place(attribute("convert_to_bfloat_before_bfp"), (0, 1))
    rounded = lambda: x.cast(TensorProto.BFLOAT16).cast(FLOAT)  # noqa: E731
    return x.body.branch(flag.lookup([False, True], BOOL), rounded, lambda: x)


@dataclass(frozen=True)
class SubBlockArithmetic:
    """The rounding of blocks by sub-blocks of `size`, with `finest` the smallest unit. A method that has none is plain:
    its size and unit are 1, and all that concerns sub-blocks can be left out."""

    elements: Elements
    block: Value
    size: Value
    finest: Value
    is_plain: Value

    def quantize(self, y: Value, shape: Value) -> Value:
        """From blocks in units of their scale, and their shape, to elements."""
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
        """The spacing of each sub-block relative to its block's."""
        amax = abs(parts).reduce("Max", BLOCK_AXIS + 1)
        return self.elements.scale(amax.reshape([-1]), self.finest, 1.0).reshape(amax.shape())


def _with_dims(shape: Value, *dims: Value) -> Value:
    """A shape of four with its block dimension replaced."""
    before, after = shape_part(shape, 0, BLOCK_AXIS), shape_part(shape, BLOCK_AXIS + 1, 4)
    return shape.body.op("Concat", before, *dims, after, axis=0)
