"""A constant in the numbers that a plan chose for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.errors import ModelError
from quark.formats.affine import AffineParameters, code_dtype, integer_format, quantize_affine
from quark.formats.arrays import array_kind
from quark.formats.catalog import get_format
from quark.formats.quantize import quantize_dequantize
from quark.onnx.graph import add_initializer
from quark.onnx.insert.options import InsertOptions
from quark.onnx.insert.pairs import (
    affine_pair,
    block_node,
    cast,
    dequantizer,
    needs_float32,
    parameter_shape,
    quantizer_behind,
    storage_type,
)
from quark.ops.constant_marks import CONSTANT_DOMAIN
from quark.plan import AffineChoice, BlockChoice, Choice, FloatChoice

Array = NDArray[Any]


def quantized_constant(
    model: ir.Model, value: ir.Value, array: Array, choice: Choice, options: InsertOptions
) -> ir.Value:
    """What readers of the constant read instead."""
    if isinstance(choice, AffineChoice):
        if options.has_pairs_on_weights and choice.group_size is None and choice.format != "int32":
            return affine_pair(model, value, choice)
        codes = add_initializer(model, f"{value.name}_quantized", codes_of(array, choice))
        return dequantizer(model, codes, choice, value)
    if isinstance(choice, BlockChoice):
        rounded = add_initializer(model, f"{value.name}_{choice.format}", block_values(array, choice))
        return block_node(model, rounded, choice, CONSTANT_DOMAIN)
    if isinstance(choice, FloatChoice):
        if choice.scale != 1.0:
            return quantizer_behind(model, value, choice, options)
        small = add_initializer(model, f"{value.name}_{choice.format}", float_values(array, choice))
        return cast(model, small, value.dtype or ir.DataType.FLOAT, f"{value.name}_Cast")
    raise ModelError(f"tensor '{value.name}': a constant has nothing to be found at run time")


def codes_of(array: Array, choice: AffineChoice) -> Array:
    """The integer codes, in the type that they are stored in."""
    if array.dtype == np.float16 and not needs_float32(ir.DataType.FLOAT16, choice):
        choice = replace(choice, scale=tuple(np.array(choice.scale, np.float16).tolist()))  # as it will be stored
    parameters = parameters_of(choice, array.shape)
    return np.asarray(quantize_affine(array.astype(np.float32), parameters)).astype(storage_type(choice.format))


def block_values(array: Array, choice: BlockChoice) -> Array:
    """The numbers that the block format keeps, in the constant's own type."""
    quantizer = choice.quantizer
    wide = quantize_dequantize(array, "bfloat16") if choice.to_bfloat16_first else array
    rounded = quantize_dequantize(
        wide,
        quantizer.format,
        choice.axis if array.ndim > 1 else 0,
        scale_rule=quantizer.scale_rule,
        rounding=quantizer.rounding,
        nonfinite=quantizer.nonfinite,
    )
    return np.asarray(rounded)


def float_values(array: Array, choice: FloatChoice) -> Array:
    """The numbers in float16 or bfloat16; beyond its range they saturate, as a weight of Inf helps nobody."""
    highest = float(get_format(choice.format).max)
    return np.clip(array.astype(np.float32), -highest, highest).astype(storage_type(choice.format))


def parameters_of(choice: AffineChoice, shape: tuple[int, ...]) -> AffineParameters:
    """The choice as arrays that go with data of that shape."""
    fmt = integer_format(choice.format)
    groups = parameter_shape(choice, shape)
    scale = np.array(choice.scale, np.float32).reshape(groups)
    zero_point = np.array(choice.zero_point, code_dtype(array_kind(scale), fmt)).reshape(groups)
    return AffineParameters(scale, zero_point, fmt, choice.axis, choice.group_size)
