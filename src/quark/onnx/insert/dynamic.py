"""Layers whose products are computed from integers, with the activation's scale found at run time:
DynamicQuantizeLinear, ConvInteger, MatMulInteger."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.errors import ModelError
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
from quark.onnx.insert.pairs import cast, codes, storage_type, stored, turned
from quark.plan import AffineChoice, TensorChoice

Array = NDArray[Any]
Shared: TypeAlias = MutableMapping[tuple[Any, ...], ir.Value]  # constants that were stored, by weight and choice


def insert_dynamic(model: ir.Model, node: ir.Node, choices: Mapping[int, TensorChoice], shared: Shared) -> None:
    """Replace Conv, Gemm or MatMul with a constant weight by integer operators.

        q, s, z = DynamicQuantizeLinear(x)
        y       = float(MatMulInteger(q, w, z, w_zero_point)) * (s * w_scale) + bias

    and the same with ConvInteger. ONNX Runtime fuses the matrix form into one kernel. Layers with the same weight share
    its codes.
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
    is_turned = bool(is_gemm and attribute(node, "transB", 0))
    if (weight, choice, is_turned) not in shared:
        integers = codes(source, choice, has_float32_scale=True)
        content = stored(model, turned(integers) if is_turned else integers)
        shared[weight, choice, is_turned] = add_initializer(model, f"{weight.name}_quantized", content)
    weight_zero_point = np.array(choice.zero_point).astype(storage_type(choice.format))
    if (weight_zero_point == weight_zero_point[0]).all():  # ONNX Runtime's ConvInteger takes no others
        weight_zero_point = weight_zero_point[0].reshape(())
    inputs = [
        quantized,
        shared[weight, choice, is_turned],
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
    result = with_bias(model, node, result, column)
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
        narrow = [node for node, _ in readers(reader.outputs[0])] if reader.op_type == "Cast" else [reader]
        for quantizer in narrow:
            if quantizer.op_type == "DynamicQuantizeLinear":
                return quantizer.outputs[0], quantizer.outputs[1], quantizer.outputs[2]
    wide = _in_type(model, value, ir.DataType.FLOAT, node)
    quantize = add_node(model, "DynamicQuantizeLinear", [wide], before=node, name=f"{value.name}_dynamic", outputs=3)
    quantize.outputs[0].type = ir.TensorType(ir.DataType.UINT8)
    quantize.outputs[1].type = ir.TensorType(ir.DataType.FLOAT)
    quantize.outputs[2].type = ir.TensorType(ir.DataType.UINT8)
    return quantize.outputs[0], quantize.outputs[1], quantize.outputs[2]


def with_bias(
    model: ir.Model,
    node: ir.Node,
    result: ir.Value,
    shape: tuple[int, ...] | None,
    dtype: ir.DataType = ir.DataType.FLOAT,
) -> ir.Value:
    """The sum with the bias of that type, reshaped unless `shape` is None."""
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None:
        return result
    beta = float(attribute(node, "beta", 1.0)) if node.op_type == "Gemm" else 1.0
    array = constant(bias)
    if array is not None:
        values = (array.astype(np.float32) * np.float32(beta)).astype(dtype.numpy())
        bias = add_initializer(model, f"{bias.name}_bias", values if shape is None else values.reshape(shape))
        return add_node(model, "Add", [result, bias], before=node, name=f"{node.name}_bias").outputs[0]
    bias = _in_type(model, bias, dtype, node)
    if shape is not None:
        sizes = add_initializer(model, f"{node.name}_bias_shape", np.array(shape, np.int64))
        bias = add_node(model, "Reshape", [bias, sizes], before=node, name=f"{node.name}_bias_column").outputs[0]
    if beta != 1.0:
        factor = add_initializer(model, f"{node.name}_beta", np.array(beta, dtype.numpy()))
        bias = add_node(model, "Mul", [bias, factor], before=node, name=f"{node.name}_bias_scaled").outputs[0]
    return add_node(model, "Add", [result, bias], before=node, name=f"{node.name}_bias").outputs[0]
