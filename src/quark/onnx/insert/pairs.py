"""Quantizers as nodes behind a tensor that is computed at run time.

integers       QuantizeLinear and DequantizeLinear: the standard's where its opset has the type, else those of
               com.microsoft (16 bits before opset 21, float16 data before 19), else ours (32 bits)
blocks         one node of com.amd.quark
float16 ...    our ExtendedQuantizeLinear and ExtendedDequantizeLinear with scale 1, or two Casts
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from quark.errors import ModelError
from quark.formats.affine import code_dtype, integer_format
from quark.formats.arrays import array_kind
from quark.formats.catalog import get_format
from quark.formats.granularity import Granularity
from quark.onnx.graph import add_initializer, add_node, opset
from quark.onnx.insert.options import InsertOptions
from quark.ops.onnx_nodes import block_attributes
from quark.ops.schema import DOMAIN, VERSION
from quark.plan import AffineChoice, BlockChoice, Choice, FloatChoice

MICROSOFT = "com.microsoft"
# The standard's QuantizeLinear takes this type from this opset on.
_OPSET_OF_WIDE_TYPES = 21
_OPSET_OF_FLOAT16 = 19
_OPSET_OF_BLOCKS = 21

_FLOAT16_TINY = float(np.finfo(np.float16).tiny)

_STORAGE: Mapping[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
}


def quantizer_behind(model: ir.Model, value: ir.Value, choice: Choice, options: InsertOptions) -> ir.Value:
    """Quantize and dequantize a value; what comes out has its type and shape."""
    if isinstance(choice, AffineChoice):
        result = affine_pair(model, value, choice)
    elif isinstance(choice, BlockChoice):
        result = block_node(model, value, choice)
    elif isinstance(choice, FloatChoice):
        has_casts = options.has_casts and choice.scale == 1.0
        result = (_cast_pair if has_casts else _float_pair)(model, value, choice)
    else:
        raise ModelError(f"tensor '{value.name}': dynamic quantization belongs to Conv, Gemm or MatMul")
    result.type, result.shape = value.type, value.shape
    return result


def affine_pair(model: ir.Model, value: ir.Value, choice: AffineChoice) -> ir.Value:
    """QuantizeLinear and DequantizeLinear."""
    if needs_float32(value.dtype, choice):
        wide = cast(model, value, ir.DataType.FLOAT, f"{value.name}_wide")
        return cast(model, affine_pair(model, wide, choice), ir.DataType.FLOAT16, f"{value.name}_narrow")
    scale, zero_point = affine_initializers(model, str(value.name), value, choice)
    codes = _linear(model, "QuantizeLinear", [value, scale, zero_point], choice, value, value)
    codes.type, codes.shape = zero_point.type, value.shape
    result = _linear(model, "DequantizeLinear", [codes, scale, zero_point], choice, value, codes)
    result.type, result.shape = value.type, value.shape
    return result


def dequantizer(model: ir.Model, codes: ir.Value, choice: AffineChoice, original: ir.Value) -> ir.Value:
    """DequantizeLinear behind the codes of a constant."""
    if needs_float32(original.dtype, choice):
        kind = ir.TensorType(ir.DataType.FLOAT)
        wide = ir.Value(name=original.name, type=kind, shape=original.shape, const_value=original.const_value)
        return cast(model, dequantizer(model, codes, choice, wide), ir.DataType.FLOAT16, f"{original.name}_narrow")
    scale, zero_point = affine_initializers(model, str(original.name), original, choice)
    has_zero_point = choice.format != "int32"  # the standard wants none there
    inputs = [codes, scale, zero_point] if has_zero_point else [codes, scale]
    result = _linear(model, "DequantizeLinear", inputs, choice, original, None)
    result.type, result.shape = original.type, original.shape
    return result


def needs_float32(dtype: ir.DataType | None, choice: AffineChoice) -> bool:
    """That float16 data has scales which float16 cannot hold, or only as subnormal numbers."""
    return dtype is ir.DataType.FLOAT16 and min(choice.scale) < _FLOAT16_TINY


def affine_initializers(model: ir.Model, name: str, like: ir.Value, choice: AffineChoice) -> tuple[ir.Value, ir.Value]:
    """The scale, in the type of the data, and the zero point, in that of the codes."""
    dtype = np.float16 if like.dtype is ir.DataType.FLOAT16 else np.float32
    shape = parameter_shape(choice, tuple(size if isinstance(size, int) else 0 for size in like.shape or ()))
    scale = np.array(choice.scale, dtype).reshape(shape)
    zero_point = np.array(choice.zero_point).astype(storage_type(choice.format)).reshape(shape)
    return add_initializer(model, f"{name}_scale", scale), add_initializer(model, f"{name}_zero_point", zero_point)


def block_node(model: ir.Model, value: ir.Value, choice: BlockChoice, domain: str = DOMAIN) -> ir.Value:
    """The operator of com.amd.quark, or the mark of the same name on a constant."""
    op_type, attributes = block_attributes(choice.quantizer, choice.axis, choice.to_bfloat16_first)
    model.opset_imports.setdefault(domain, VERSION)
    result = _behind(model, op_type, [value], f"{value.name}_{op_type}", value, domain, dict(attributes))
    result.type, result.shape = value.type, value.shape
    return result


def storage_type(format: str) -> Any:
    """The numpy type that codes of an integer format are kept in."""
    if format in _STORAGE:
        return _STORAGE[format]
    return code_dtype(array_kind(np.empty(0)), integer_format(format))


def parameter_shape(choice: AffineChoice, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales for data of that shape, which only groups depend on."""
    if choice.axis is None:
        return ()
    return (-1,) if choice.group_size is None else Granularity(choice.axis, choice.group_size).parameter_shape(shape)


def _linear(
    model: ir.Model,
    op_type: str,
    inputs: list[ir.Value],
    choice: AffineChoice,
    like: ir.Value,
    behind: ir.Value | None,
) -> ir.Value:
    domain = _linear_domain(model, choice, like)
    attributes: dict[str, Any] = {} if choice.axis is None else {"axis": choice.axis}
    if choice.group_size is not None:
        if opset(model) < _OPSET_OF_BLOCKS:
            raise ModelError(
                f"tensor '{like.name}': scales for groups need opset {_OPSET_OF_BLOCKS}, the model has {opset(model)}; "
                f"set ConvertOpsetVersion to {_OPSET_OF_BLOCKS}"
            )
        attributes["block_size"] = choice.group_size
    if domain:
        model.opset_imports.setdefault(domain, 1)
    name = f"{like.name}_{'Extended' if domain == DOMAIN else ''}{op_type}"
    return _behind(model, ("Extended" if domain == DOMAIN else "") + op_type, inputs, name, behind, domain, attributes)


def _linear_domain(model: ir.Model, choice: AffineChoice, like: ir.Value) -> str:
    """Whose QuantizeLinear takes these codes and this data."""
    bits = get_format(choice.format).bits  # type: ignore[union-attr]
    if bits > 16 and choice.format != "int32":
        return DOMAIN
    if choice.format == "int32" and like.const_value is None:
        return DOMAIN
    is_wide = bits == 16 or bits == 4
    needs_newer = is_wide and opset(model) < _OPSET_OF_WIDE_TYPES
    is_half = like.dtype is ir.DataType.FLOAT16 and opset(model) < _OPSET_OF_FLOAT16
    return MICROSOFT if needs_newer or is_half else ""


def _float_pair(model: ir.Model, value: ir.Value, choice: FloatChoice) -> ir.Value:
    """To the small float and back by our operators, which saturate."""
    dtype = np.float16 if value.dtype is ir.DataType.FLOAT16 else np.float32
    scale = add_initializer(model, f"{value.name}_scale", np.array(choice.scale, dtype))
    zero_point = add_initializer(model, f"{value.name}_zero_point", np.array(0, storage_type(choice.format)))
    model.opset_imports.setdefault(DOMAIN, VERSION)
    codes: ir.Value = value
    for op_type, result in (("ExtendedQuantizeLinear", zero_point), ("ExtendedDequantizeLinear", value)):
        codes = _behind(model, op_type, [codes, scale, zero_point], f"{value.name}_{op_type}", codes, DOMAIN, {})
        codes.type, codes.shape = result.type, value.shape
    return codes


def _cast_pair(model: ir.Model, value: ir.Value, choice: FloatChoice) -> ir.Value:
    """To the small float and back by Cast; a Clip before it where values have to saturate."""
    source = value
    original = value.dtype or ir.DataType.FLOAT
    if choice.is_saturating:
        dtype = np.float16 if original is ir.DataType.FLOAT16 else np.float32
        highest = float(get_format(choice.format).max)
        bounds = [add_initializer(model, f"{value.name}_clip", np.array(x, dtype)) for x in (-highest, highest)]
        source = _behind(model, "Clip", [value, *bounds], f"{value.name}_Clip", value, "", {})
    small = cast(model, source, ir.DataType[choice.format.upper()], f"{value.name}_{choice.format}")
    return cast(model, small, original, f"{value.name}_float")


def cast(model: ir.Model, value: ir.Value, to: ir.DataType, name: str) -> ir.Value:
    """A Cast behind a value."""
    result = _behind(model, "Cast", [value], name, value, "", {"to": int(to)})
    result.type, result.shape = ir.TensorType(to), value.shape
    return result


def _behind(
    model: ir.Model,
    op_type: str,
    inputs: list[ir.Value],
    name: str,
    value: ir.Value | None,
    domain: str,
    attributes: dict[str, Any],
) -> ir.Value:
    """A node right behind the one that computes `value`, or at the start of the graph."""
    producer = None if value is None else value.producer()
    first = next(iter(model.graph)) if producer is None else None
    return add_node(
        model, op_type, inputs, before=first, after=producer, name=name, domain=domain, attributes=attributes
    ).outputs[0]
