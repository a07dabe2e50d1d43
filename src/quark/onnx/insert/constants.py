"""A constant in the numbers that a plan chose for it, and the nodes that read them."""

from __future__ import annotations

import onnx_ir as ir

from quark.errors import ModelError
from quark.onnx.graph import add_initializer
from quark.onnx.insert.constant_pieces import block_numbers, codes, small_floats, stored
from quark.onnx.insert.options import InsertOptions
from quark.onnx.insert.pairs import affine_pair, block_node, cast, dequantizer, quantizer_behind
from quark.ops.constant_marks import CONSTANT_DOMAIN
from quark.plan import AffineChoice, BlockChoice, Choice, FloatChoice


def quantized_constant(model: ir.Model, value: ir.Value, choice: Choice, options: InsertOptions) -> ir.Value:
    """What readers of the constant read instead."""
    source = value.const_value
    assert source is not None, value.name
    if isinstance(choice, AffineChoice):
        if options.has_pairs_on_weights and choice.group_size is None and choice.format != "int32":
            return affine_pair(model, value, choice)
        integers = add_initializer(model, f"{value.name}_quantized", stored(model, codes(source, choice)))
        return dequantizer(model, integers, choice, value)
    if isinstance(choice, BlockChoice):
        numbers = stored(model, block_numbers(source, choice))
        return block_node(
            model, add_initializer(model, f"{value.name}_{choice.format}", numbers), choice, CONSTANT_DOMAIN
        )
    if isinstance(choice, FloatChoice):
        if choice.scale != 1.0:
            return quantizer_behind(model, value, choice, options)
        numbers = stored(model, small_floats(source, choice))
        small = add_initializer(model, f"{value.name}_{choice.format}", numbers)
        return cast(model, small, value.dtype or ir.DataType.FLOAT, f"{value.name}_Cast")
    raise ModelError(f"tensor '{value.name}': a constant has nothing to be found at run time")
