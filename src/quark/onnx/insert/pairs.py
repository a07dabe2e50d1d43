"""Quantizers as nodes: behind a tensor that is computed at run time, and behind the codes of a constant.

integers       QuantizeLinear and DequantizeLinear: the standard's if its opset has the type, else those of
               com.microsoft (16 bits before opset 21, float16 data before 19), else ours (32 bits)
8-bit floats   the standard's QuantizeLinear and DequantizeLinear, which saturate. It has them from opset 19 on, where a
               zero point says the type; ONNX Runtime 1.31 does not open such a node behind a Relu or a Clip. From
               opset 21 on an attribute says it, so that is what is needed
blocks         one node of com.amd.quark
float16 ...    our ExtendedQuantizeLinear and ExtendedDequantizeLinear with scale 1, or two Casts
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.decide.specs import GroupRule
from quark.errors import ModelError
from quark.formats.affine import Granularity, code_dtype, integer_format, quantize_affine
from quark.formats.arrays import array_kind
from quark.formats.catalog import get_format
from quark.onnx.graph import add_initializer, add_node, opset
from quark.onnx.large_tensors import ComputedTensor, Piece, is_large_model, is_large_tensor, pieces
from quark.ops.onnx_nodes import CONSTANT_DOMAIN, block_attributes, stored_tensor_scale
from quark.ops.schema import DOMAIN, VERSION
from quark.plan import AffineChoice, BlockChoice, Choice, FloatChoice
from quark.rounded import block_values, parameters_of

MICROSOFT = "com.microsoft"
# The opset from which the standard's QuantizeLinear takes this type.
_OPSET_OF_WIDE_TYPES = 21
_OPSET_OF_FLOAT16 = 19
OPSET_OF_FLOAT8 = 21
OPSET_OF_BLOCKS = 21

_FLOAT16_TINY = float(np.finfo(np.float16).tiny)

Array = NDArray[Any]
Tensor = ir.TensorProtocol
_Scaled = TypeVar("_Scaled", AffineChoice, FloatChoice)

_STORAGE: Mapping[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


class NodeStyle(str, Enum):
    """The way in which quantized computation is written."""

    QDQ = "qdq"  # QuantizeLinear and DequantizeLinear around float operators; the runtime fuses them
    QOPERATOR = "qoperator"  # QLinearConv, QLinearMatMul ...


class WeightForm(str, Enum):
    """The way in which products with weights of a few bits are written."""

    MATMUL_NBITS = "matmul_nbits"  # com.microsoft's operator
    DEQUANTIZE_LINEAR = "dequantize_linear"  # the standard's, with blocks, before the float product


@dataclass(frozen=True)
class NBitsOptions:
    """Weights of a few bits, in groups of `group_size` along the summed axis; None: one scale for each output.
    `accuracy_level` is ONNX Runtime's: the minimum precision of activations inside the kernel, from 1 (float32) to 4
    (int8). Tables of embeddings have `embedding_bits` in groups of `embedding_group_size`; None: they stay in float."""

    bits: int = 4
    group_size: int | None = 128
    is_symmetric: bool = True
    accuracy_level: int = 1
    group_rule: GroupRule = GroupRule.SEARCHED
    form: WeightForm = WeightForm.MATMUL_NBITS
    embedding_bits: int | None = None
    embedding_group_size: int | None = None  # None: as weights have it


@dataclass(frozen=True)
class InsertOptions:
    """Options for writing a plan into the graph."""

    style: NodeStyle = NodeStyle.QDQ
    has_dedicated_pairs: bool = False  # a pair of nodes for every reader, instead of a shared one
    has_pairs_on_weights: bool = False  # weights stay float behind QuantizeLinear and DequantizeLinear
    has_folded_relu: bool = False  # remove a Relu before codes that begin at zero: saturation has the same effect
    has_casts: bool = False  # float16 and bfloat16 as Cast pairs instead of Extended*Linear
    has_implied_bfloat16: bool = False  # bfloat16 as its compiler takes it: constants rounded, Casts at inputs only
    matmul_nbits: NBitsOptions | None = None


# ---- quantizers behind computed tensors ----


def quantizer_behind(model: ir.Model, value: ir.Value, choice: Choice, options: InsertOptions) -> ir.Value:
    """Quantize and dequantize a value; the result has its type and shape."""
    if isinstance(choice, AffineChoice) or (isinstance(choice, FloatChoice) and choice.is_eight_bits):
        result = affine_pair(model, value, choice)
    elif isinstance(choice, BlockChoice):
        result = block_node(model, value, choice)
    elif isinstance(choice, FloatChoice):
        is_cast = options.has_casts and not choice.is_scaled
        result = (_cast_pair if is_cast else _float_pair)(model, value, choice)
    else:
        raise ModelError(f"tensor '{value.name}': dynamic quantization belongs to Conv, Gemm or MatMul")
    result.type, result.shape = value.type, value.shape
    return result


def affine_pair(model: ir.Model, value: ir.Value, choice: AffineChoice | FloatChoice) -> ir.Value:
    """QuantizeLinear and DequantizeLinear."""
    if needs_float32(value.dtype, choice):
        wide = cast(model, value, ir.DataType.FLOAT, f"{value.name}_wide")
        return cast(model, affine_pair(model, wide, choice), ir.DataType.FLOAT16, f"{value.name}_narrow")
    parameters = affine_initializers(model, str(value.name), value, choice)
    codes = _linear(model, "QuantizeLinear", [value, *parameters], choice, value, value)
    kind = ir.DataType.from_numpy(np.dtype(storage_type(choice.format)))
    codes.type, codes.shape = ir.TensorType(kind), value.shape
    result = _linear(model, "DequantizeLinear", [codes, *parameters], choice, value, codes)
    result.type, result.shape = value.type, value.shape
    return result


def dequantizer(model: ir.Model, codes: ir.Value, choice: AffineChoice | FloatChoice, original: ir.Value) -> ir.Value:
    """DequantizeLinear behind the codes of a constant."""
    if needs_float32(original.dtype, choice):
        kind = ir.TensorType(ir.DataType.FLOAT)
        wide = ir.Value(name=original.name, type=kind, shape=original.shape, const_value=original.const_value)
        return cast(model, dequantizer(model, codes, choice, wide), ir.DataType.FLOAT16, f"{original.name}_narrow")
    parameters = affine_initializers(model, str(original.name), original, choice)
    if choice.format == "int32":  # the standard wants no zero point there
        parameters = parameters[:1]
    result = _linear(model, "DequantizeLinear", [codes, *parameters], choice, original, None)
    result.type, result.shape = original.type, original.shape
    return result


def needs_float32(dtype: ir.DataType | None, choice: AffineChoice | FloatChoice) -> bool:
    """True for float16 data with scales that float16 cannot hold, or only as subnormal numbers."""
    return dtype is ir.DataType.FLOAT16 and min(map(abs, choice.scale)) < _FLOAT16_TINY


def affine_initializers(
    model: ir.Model, name: str, like: ir.Value, choice: AffineChoice | FloatChoice
) -> tuple[ir.Value, ...]:
    """The scale in the type of the data, and for integers the zero point in that of the codes."""
    dtype = np.float16 if like.dtype is ir.DataType.FLOAT16 else np.float32
    shape = parameter_shape(choice, tuple(size if isinstance(size, int) else 0 for size in like.shape or ()))
    scale = np.array(choice.scale, dtype).reshape(shape)
    if isinstance(choice, FloatChoice):
        return (add_initializer(model, f"{name}_scale", scale),)
    zero_point = np.array(choice.zero_point).astype(storage_type(choice.format)).reshape(shape)
    return add_initializer(model, f"{name}_scale", scale), add_initializer(model, f"{name}_zero_point", zero_point)


def block_node(model: ir.Model, value: ir.Value, choice: BlockChoice, domain: str = DOMAIN) -> ir.Value:
    """The operator of com.amd.quark, or the mark of the same name on a constant."""
    op_type, attributes = block_attributes(choice.quantizer, choice.axis, choice.to_bfloat16_first)
    model.opset_imports.setdefault(domain, VERSION)
    inputs, scale = [value], stored_tensor_scale(choice.quantizer)
    if scale is not None:
        inputs.append(add_initializer(model, f"{value.name}_scale", np.array(scale, np.float32)))
    result = _behind(model, op_type, inputs, f"{value.name}_{op_type}", value, domain, dict(attributes))
    result.type, result.shape = value.type, value.shape
    return result


def storage_type(format: str) -> Any:
    """The numpy type in which codes of a format are stored."""
    if format in _STORAGE:
        return _STORAGE[format]
    return code_dtype(array_kind(np.empty(0)), integer_format(format))


def parameter_shape(choice: AffineChoice | FloatChoice, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales for data of that shape, which matters for groups only."""
    if choice.axis is None:
        return ()
    size = choice.group_size if isinstance(choice, AffineChoice) else None
    return (-1,) if size is None else Granularity(choice.axis, size).parameter_shape(shape)


def _linear(
    model: ir.Model,
    op_type: str,
    inputs: list[ir.Value],
    choice: AffineChoice | FloatChoice,
    like: ir.Value,
    behind: ir.Value | None,
) -> ir.Value:
    bits, domain = get_format(choice.format).bits, ""  # type: ignore[union-attr]
    needs_newer = bits in (4, 16) and opset(model) < _OPSET_OF_WIDE_TYPES
    is_half = like.dtype is ir.DataType.FLOAT16 and opset(model) < _OPSET_OF_FLOAT16
    if bits > 16 and (choice.format != "int32" or like.const_value is None):
        domain = DOMAIN
    elif needs_newer or is_half:
        domain = MICROSOFT
    attributes: dict[str, Any] = {} if choice.axis is None else {"axis": choice.axis}
    if isinstance(choice, FloatChoice) and op_type == "QuantizeLinear":
        attributes["output_dtype"] = int(ir.DataType.from_numpy(np.dtype(storage_type(choice.format))))
    if isinstance(choice, FloatChoice) and opset(model) < OPSET_OF_FLOAT8:
        raise ModelError(
            f"tensor '{like.name}': {choice.format} needs opset {OPSET_OF_FLOAT8}, the model has {opset(model)}; set "
            f"ConvertOpsetVersion to {OPSET_OF_FLOAT8}"
        )
    if isinstance(choice, AffineChoice) and choice.group_size is not None:
        if opset(model) < OPSET_OF_BLOCKS:
            raise ModelError(
                f"tensor '{like.name}': scales for groups need opset {OPSET_OF_BLOCKS}, the model has {opset(model)}; "
                f"set ConvertOpsetVersion to {OPSET_OF_BLOCKS}"
            )
        attributes["block_size"] = choice.group_size
    if domain:
        model.opset_imports.setdefault(domain, 1)
    name = f"{like.name}_{'Extended' if domain == DOMAIN else ''}{op_type}"
    return _behind(model, ("Extended" if domain == DOMAIN else "") + op_type, inputs, name, behind, domain, attributes)


def _float_pair(model: ir.Model, value: ir.Value, choice: FloatChoice) -> ir.Value:
    """Convert to the small float and back by our operators, which saturate."""
    dtype = np.float16 if value.dtype is ir.DataType.FLOAT16 else np.float32
    scale = add_initializer(model, f"{value.name}_scale", np.array(choice.scale[0], dtype))
    zero_point = add_initializer(model, f"{value.name}_zero_point", np.array(0, storage_type(choice.format)))
    model.opset_imports.setdefault(DOMAIN, VERSION)
    codes: ir.Value = value
    for op_type, result in (("ExtendedQuantizeLinear", zero_point), ("ExtendedDequantizeLinear", value)):
        codes = _behind(model, op_type, [codes, scale, zero_point], f"{value.name}_{op_type}", codes, DOMAIN, {})
        codes.type, codes.shape = result.type, value.shape
    return codes


def _cast_pair(model: ir.Model, value: ir.Value, choice: FloatChoice) -> ir.Value:
    """Convert to the small float and back by Cast, with a Clip before it if values have to saturate."""
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
    if producer is not None and producer.graph is not model.graph:
        producer = None  # a body may read values of outer graphs
    first = next(iter(model.graph)) if producer is None else None
    return add_node(
        model, op_type, inputs, before=first, after=producer, name=name, domain=domain, attributes=attributes
    ).outputs[0]


# ---- constants ----
#
# They are computed piece by piece. Everything that shares a scale is in one piece, and the rest is elementwise, so the
# pieces are those of the whole. In a large model they are computed when it is written; see `quark.onnx.large_tensors`.


def quantized_constant(model: ir.Model, value: ir.Value, choice: Choice, options: InsertOptions) -> ir.Value:
    """The value that readers of the constant read instead."""
    source = value.const_value
    assert source is not None, value.name
    if isinstance(choice, AffineChoice):
        if options.has_pairs_on_weights and choice.group_size is None and choice.format != "int32":
            return affine_pair(model, value, choice)
        integers = add_initializer(model, f"{value.name}_quantized", stored(model, codes(source, choice)))
        return dequantizer(model, integers, choice, value)
    if isinstance(choice, BlockChoice):
        if choice.quantizer.format.has_tensor_scale:  # pieces of a constant have one scale
            choice = replace(choice, quantizer=choice.quantizer.fixed(source.numpy()))
        numbers = add_initializer(model, f"{value.name}_{choice.format}", stored(model, block_numbers(source, choice)))
        return block_node(model, numbers, choice, CONSTANT_DOMAIN)
    if isinstance(choice, FloatChoice):
        if choice.is_eight_bits and not options.has_pairs_on_weights:
            codes_name = f"{value.name}_quantized"
            return dequantizer(
                model, add_initializer(model, codes_name, stored(model, small_floats(source, choice))), choice, value
            )
        if choice.is_eight_bits or choice.is_scaled:
            return quantizer_behind(model, value, choice, options)
        if is_implied(choice, options):
            return add_initializer(model, f"{value.name}_bf16", stored(model, _widened(source, choice)))
        small = add_initializer(model, f"{value.name}_{choice.format}", stored(model, small_floats(source, choice)))
        return cast(model, small, value.dtype or ir.DataType.FLOAT, f"{value.name}_Cast")
    raise ModelError(f"tensor '{value.name}': a constant has nothing to be found at run time")


def stored(model: ir.Model, tensor: ComputedTensor) -> Tensor:
    """The tensor itself if it and the model are large, so that it is computed later; otherwise its values."""
    if is_large_tensor(tensor) and is_large_model(model):
        return tensor
    return ir.Tensor(tensor.numpy(), tensor.dtype)


def codes(source: Tensor, choice: AffineChoice, *, has_float32_scale: bool = False) -> ComputedTensor:
    """The integer codes, in the type in which they are stored. Their scale is stored in the type of the constant,
    unless it `has_float32_scale`, and the codes are computed with the stored scale."""
    choice = choice if has_float32_scale else _with_stored_scale(source, choice)
    kind = np.dtype(storage_type(choice.format))

    def compute() -> Iterator[Array]:
        for _, array in code_pieces(source, choice):
            yield array.astype(kind)

    return ComputedTensor(compute, ir.DataType.from_numpy(kind), _shape(source))


def _with_stored_scale(source: Tensor, choice: _Scaled) -> _Scaled:
    """The choice with scales as they are stored beside a float16 constant."""
    if source.dtype is not ir.DataType.FLOAT16 or needs_float32(ir.DataType.FLOAT16, choice):
        return choice
    return replace(choice, scale=tuple(np.array(choice.scale, np.float16).tolist()))


def code_pieces(source: Tensor, choice: AffineChoice) -> Iterator[tuple[Piece, Array]]:
    """The pieces of a constant with their codes, in numpy's narrowest type. Groups are never cut."""
    dims = tuple(source.shape.numpy())
    parameters = parameters_of(choice, dims)
    axis = None if choice.axis is None else choice.axis % len(dims)
    for piece in pieces(source, axis, choice.group_size or 1):
        own = parameters
        if axis is not None:  # the middle axis of a piece
            scale, zero_point = np.asarray(parameters.scale), np.asarray(parameters.zero_point)
            size = parameters.group_size
            if size is None:
                scale, zero_point = scale[piece.along], zero_point[piece.along]
            else:
                groups = slice(piece.along.start // size, -(-piece.along.stop // size))
                shape = (int(np.prod(dims[:axis])), -1, int(np.prod(dims[axis + 1 :])))
                scale, zero_point = (parameter.reshape(shape)[piece.outer, groups] for parameter in (scale, zero_point))
            own = replace(parameters, scale=scale, zero_point=zero_point, axis=1)
        yield piece, np.asarray(quantize_affine(piece.array.astype(np.float32, copy=False), own))


def block_numbers(source: Tensor, choice: BlockChoice) -> ComputedTensor:
    """The numbers rounded to the block format, in the constant's own type."""
    inner = replace(choice, axis=1)  # the axis of a piece

    def compute() -> Iterator[Array]:
        axis = choice.axis if len(source.shape) > 1 else 0
        for piece in pieces(source, axis, choice.quantizer.format.block_size):
            yield block_values(piece.array, inner)

    return ComputedTensor(compute, source.dtype, _shape(source))


def small_floats(source: Tensor, choice: FloatChoice) -> ComputedTensor:
    """The numbers over their scale in the small float. They saturate, because a weight of Inf is useless."""
    highest, kind = float(get_format(choice.format).max), np.dtype(storage_type(choice.format))
    choice = _with_stored_scale(source, choice)
    scale = np.array(choice.scale, np.float32)
    axis = None if choice.axis is None else choice.axis % len(source.shape)

    def compute() -> Iterator[Array]:
        for piece in pieces(source, axis):
            own = scale[0] if axis is None else scale[piece.along].reshape(1, -1, 1)  # the axis is the middle one
            yield np.clip(piece.array.astype(np.float32) / own, -highest, highest).astype(kind)

    return ComputedTensor(compute, ir.DataType.from_numpy(kind), _shape(source))


def is_implied(choice: Choice, options: InsertOptions) -> bool:
    """True for bfloat16 that the compiler of the file applies by itself."""
    return options.has_implied_bfloat16 and isinstance(choice, FloatChoice) and choice.format == "bfloat16"


def _widened(source: Tensor, choice: FloatChoice) -> ComputedTensor:
    """The numbers rounded to the small float, in the constant's own type."""
    small = small_floats(source, choice)

    def compute() -> Iterator[Array]:
        yield small.numpy().astype(source.dtype.numpy())

    return ComputedTensor(compute, source.dtype, _shape(source))


def turned(matrix: ComputedTensor) -> ComputedTensor:
    """The transposed matrix, computed as a whole: codes take a quarter of the weight's size."""
    rows, columns = matrix.shape.numpy()
    return ComputedTensor(lambda: iter([matrix.numpy().T]), matrix.dtype, ir.Shape([columns, rows]))


def _shape(source: Tensor) -> ir.Shape:
    return ir.Shape(source.shape.numpy())
