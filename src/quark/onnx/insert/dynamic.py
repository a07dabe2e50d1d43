"""Layers whose products are computed from integers at run time, or from packed weights.

insert_dynamic        the activation's scale is found at run time: DynamicQuantizeLinear, ConvInteger, MatMulInteger
insert_matmul_nbits   weight-only: com.microsoft's MatMulNBits
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.errors import InvalidValueError, ModelError
from quark.formats.affine import integer_format
from quark.onnx.graph import (
    add_initializer,
    add_node,
    attribute,
    constant,
    input_value,
    is_constant,
    readers,
    replace_value,
)
from quark.onnx.insert.pairs import MICROSOFT, NBitsOptions, cast, code_pieces, codes, storage_type, stored, turned
from quark.onnx.large_tensors import ComputedTensor
from quark.plan import AffineChoice, QuantizationPlan, Role, TensorChoice
from quark.rounded import parameters_of

Array = NDArray[Any]


def insert_dynamic(model: ir.Model, node: ir.Node, choices: Mapping[int, TensorChoice]) -> None:
    """Replace Conv, Gemm or MatMul with a constant weight by integer operators.

        q, s, z = DynamicQuantizeLinear(x)
        y       = float(MatMulInteger(q, w, z, w_zero_point)) * (s * w_scale) + bias

    and the same with ConvInteger. ONNX Runtime fuses the matrix form into one kernel.
    """
    choice, weight, data = choices[1].choice if 1 in choices else None, input_value(node, 1), node.inputs[0]
    source = weight.const_value if weight is not None and is_constant(weight) else None
    if not isinstance(choice, AffineChoice) or weight is None or source is None:
        raise ModelError(f"node '{node.name}' ({node.op_type}): dynamic quantization needs a constant integer weight")
    is_conv, is_gemm, rank = node.op_type == "Conv", node.op_type == "Gemm", len(source.shape)
    if is_conv and len(set(choice.zero_point)) > 1:
        raise ModelError(f"node '{node.name}' (Conv): ConvInteger has one zero point for all channels of a weight")
    assert data is not None
    if is_gemm and attribute(node, "transA", 0):
        data = add_node(model, "Transpose", [data], before=node, attributes={"perm": [1, 0]}).outputs[0]
    quantized, scale, zero_point = _dynamic_inputs(model, data, node)
    integers = codes(source, choice, has_float32_scale=True)
    if is_gemm and attribute(node, "transB", 0):
        integers = turned(integers)
    weight_zero_point = np.array(choice.zero_point).astype(storage_type(choice.format))
    if (weight_zero_point == weight_zero_point[0]).all():  # ONNX Runtime's ConvInteger takes no others
        weight_zero_point = weight_zero_point[0].reshape(())
    inputs = [
        quantized,
        add_initializer(model, f"{weight.name}_quantized", stored(model, integers)),
        zero_point,
        add_initializer(model, f"{weight.name}_zero_point", weight_zero_point),
    ]
    attributes = {key: attr.value for key, attr in node.attributes.items()} if is_conv else {}
    op_type = "ConvInteger" if is_conv else "MatMulInteger"
    total = add_node(model, op_type, inputs, before=node, name=f"{node.name}_{op_type}", attributes=attributes)
    total.outputs[0].type = ir.TensorType(ir.DataType.INT32)
    result = cast(model, total.outputs[0], ir.DataType.FLOAT, f"{node.name}_float")
    # channels are axis 1 of a convolution's output, the last axis otherwise
    column = (-1,) + (1,) * (rank - 2) if is_conv else None
    weight_scale = np.array(choice.scale, np.float32)
    if choice.axis is None:
        weight_scale = weight_scale.reshape(())
    elif column is not None:
        weight_scale = weight_scale.reshape(column)
    weight_scale = weight_scale * (float(attribute(node, "alpha", 1.0)) if is_gemm else 1.0)
    factor = add_initializer(model, f"{node.name}_weight_scale", weight_scale.astype(np.float32))
    both = add_node(model, "Mul", [scale, factor], before=node, name=f"{node.name}_scale").outputs[0]
    result = add_node(model, "Mul", [result, both], before=node, name=f"{node.name}_scaled").outputs[0]
    result = _with_bias(model, node, result, column)
    result = _in_type(model, result, node.outputs[0].dtype, node)
    result.type, result.shape = node.outputs[0].type, node.outputs[0].shape
    if not replace_value(node.outputs[0], result):
        raise ModelError(f"node '{node.name}' ({node.op_type}): its output cannot be replaced")
    model.graph.remove(node, safe=True)


def _in_type(model: ir.Model, value: ir.Value, dtype: ir.DataType | None, node: ir.Node) -> ir.Value:
    """The value in another float type: the operators here compute in float32, whatever the model's type."""
    if dtype is None or value.dtype is dtype:
        return value
    name = f"{value.name}_{dtype.name.lower()}"
    result = add_node(model, "Cast", [value], before=node, name=name, attributes={"to": int(dtype)}).outputs[0]
    result.type, result.shape = ir.TensorType(dtype), value.shape
    return result


def _dynamic_inputs(model: ir.Model, value: ir.Value, node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Codes, scale and zero point of an activation; readers of one activation share them."""
    for reader, _ in readers(value):
        narrow = [each for each, _ in readers(reader.outputs[0])] if reader.op_type == "Cast" else [reader]
        for each in narrow:
            if each.op_type == "DynamicQuantizeLinear":
                return each.outputs[0], each.outputs[1], each.outputs[2]
    wide = _in_type(model, value, ir.DataType.FLOAT, node)
    quantize = add_node(model, "DynamicQuantizeLinear", [wide], before=node, name=f"{value.name}_dynamic", outputs=3)
    quantize.outputs[0].type = ir.TensorType(ir.DataType.UINT8)
    quantize.outputs[1].type = ir.TensorType(ir.DataType.FLOAT)
    quantize.outputs[2].type = ir.TensorType(ir.DataType.UINT8)
    return quantize.outputs[0], quantize.outputs[1], quantize.outputs[2]


def _with_bias(model: ir.Model, node: ir.Node, result: ir.Value, shape: tuple[int, ...] | None) -> ir.Value:
    """The sum with the bias, reshaped unless `shape` is None."""
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None:
        return result
    beta = float(attribute(node, "beta", 1.0)) if node.op_type == "Gemm" else 1.0
    array = constant(bias)
    if array is not None:
        values = array.astype(np.float32) * np.float32(beta)
        bias = add_initializer(model, f"{bias.name}_bias", values if shape is None else values.reshape(shape))
        return add_node(model, "Add", [result, bias], before=node, name=f"{node.name}_bias").outputs[0]
    bias = _in_type(model, bias, ir.DataType.FLOAT, node)
    if shape is not None:
        sizes = add_initializer(model, f"{node.name}_bias_shape", np.array(shape, np.int64))
        bias = add_node(model, "Reshape", [bias, sizes], before=node, name=f"{node.name}_bias_column").outputs[0]
    if beta != 1.0:
        factor = add_initializer(model, f"{node.name}_beta", np.array(beta, np.float32))
        bias = add_node(model, "Mul", [bias, factor], before=node, name=f"{node.name}_bias_scaled").outputs[0]
    return add_node(model, "Add", [result, bias], before=node, name=f"{node.name}_bias").outputs[0]


def insert_matmul_nbits(
    model: ir.Model, nodes: Mapping[str, ir.Node], plan: QuantizationPlan, options: NBitsOptions
) -> None:
    """Replace every product whose weight the plan quantizes in groups by MatMulNBits, with 2, 4 or 8 bits.

    The weight of shape [K, N] becomes, for each of its N columns, blocks of `group_size` codes along K, packed from the
    lowest bits of a byte up, with one scale per block, [N, blocks]. Codes are unsigned; without zero points, the middle
    code is zero.
    """
    products = [
        (nodes[reader.node], each.choice) for each in plan if each.role is Role.WEIGHT for reader in each.readers
    ]
    for node, choice in products:
        if not isinstance(choice, AffineChoice) or choice.group_size is None:
            continue
        weight = node.inputs[1]
        source = None if weight is None else weight.const_value
        assert weight is not None, node.name
        assert source is not None, node.name
        name = weight.name
        is_turned = node.op_type == "Gemm" and bool(attribute(node, "transB", 0))
        k, n = reversed(source.shape.numpy()) if is_turned else source.shape.numpy()
        parameters = parameters_of(choice, tuple(source.shape.numpy()))
        scale = np.asarray(parameters.scale)
        zero_point = np.asarray(parameters.zero_point).astype(np.int16) + _offset(choice, options.bits)
        if is_turned:
            scale, zero_point = scale.T, zero_point.T
        scales = np.ascontiguousarray(scale.T).astype(source.dtype.numpy())
        inputs: list[ir.Value | None] = [
            node.inputs[0],
            add_initializer(model, f"{name}_packed", stored(model, _packed(source, choice, options.bits, is_turned))),
            add_initializer(model, f"{name}_scales", scales),
        ]
        if not options.is_symmetric:
            packed = pack_columns(zero_point, options.bits, 8 // options.bits).reshape(n, -1)
            inputs.append(add_initializer(model, f"{name}_zero_points", packed))
        attributes = {"K": k, "N": n, "bits": options.bits, "block_size": choice.group_size}
        attributes["accuracy_level"] = options.accuracy_level
        model.opset_imports.setdefault(MICROSOFT, 1)
        product = add_node(
            model,
            "MatMulNBits",
            inputs,
            before=node,
            name=f"{node.name}_nbits",
            domain=MICROSOFT,
            attributes=attributes,
        )
        result = product.outputs[0]
        bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
        if bias is not None:
            result = add_node(model, "Add", [result, bias], before=node, name=f"{node.name}_bias").outputs[0]
        result.type, result.shape = node.outputs[0].type, node.outputs[0].shape
        tensor = node.outputs[0].name
        replace_value(node.outputs[0], result)
        model.graph.remove(node, safe=True)
        result.name = tensor  # as in every quantized form, so that the two networks can be compared


def _offset(choice: AffineChoice, bits: int) -> int:
    """The difference between unsigned codes and those of the plan."""
    return (1 << (bits - 1)) if integer_format(choice.format).signed else 0


def _packed(source: ir.TensorProtocol, choice: AffineChoice, bits: int, is_turned: bool) -> ComputedTensor:
    """The unsigned codes of a weight, [K, N] or transposed, packed by `pack_columns`. They are computed as a whole,
    because pieces of the weight are not consecutive there, and take a fraction of its size."""
    k, n = reversed(source.shape.numpy()) if is_turned else source.shape.numpy()
    size = choice.group_size or k
    shape = (n, -(-k // size), size * bits // 8)

    def compute() -> Iterator[Array]:
        result = np.empty(shape, np.uint8)
        for piece, signed in code_pieces(source, choice):
            unsigned = signed.astype(np.int16) + _offset(choice, bits)
            columns = unsigned[..., 0].T if is_turned else unsigned[0]
            blocks = slice(piece.along.start // size, -(-piece.along.stop // size))
            result[piece.outer if is_turned else slice(None), blocks] = pack_columns(columns, bits, size)
        yield result

    return ComputedTensor(compute, ir.DataType.UINT8, ir.Shape(shape))


def pack_columns(codes: Array, bits: int, group_size: int) -> Array:
    """Pack [K, N] codes into [N, blocks, bytes]; the last block is padded with the middle code.

    >>> pack_columns(np.array([[1], [2], [3]]), bits=4, group_size=4).tolist()
    [[[33, 131]]]
    """
    if bits not in (2, 4, 8):
        raise InvalidValueError(f"MatMulNBits of {bits} bits: expected 2, 4 or 8")
    k, n = codes.shape
    blocks = -(-k // group_size)
    full = np.full((n, blocks * group_size), 1 << (bits - 1), np.uint8)
    full[:, :k] = codes.T
    per_byte = 8 // bits
    parts = full.reshape(n, blocks, -1, per_byte)
    packed: Array = parts[..., 0].copy()
    for index in range(1, per_byte):
        packed |= parts[..., index] << np.uint8(index * bits)
    return packed
