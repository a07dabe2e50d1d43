"""Dynamic quantization: the activation's scale is found at run time, and the products are sums of integers.

    q, s, z = DynamicQuantizeLinear(x)
    y       = float(MatMulInteger(q, w, z, w_zero_point)) * (s * w_scale) + bias

and the same with ConvInteger. ONNX Runtime fuses the matrix form into one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.errors import ModelError
from quark.onnx.graph import add_initializer, add_node, attribute, constant, is_constant, readers, replace_value
from quark.onnx.insert.constant_pieces import codes, stored, turned
from quark.onnx.insert.pairs import cast, storage_type
from quark.plan import AffineChoice, TensorChoice

Array = NDArray[Any]


def insert_dynamic(model: ir.Model, node: ir.Node, choices: Mapping[int, TensorChoice]) -> None:
    """Replace Conv, Gemm or MatMul with a constant weight by integer operators."""
    source, weight = _weight(node, choices)
    is_conv, is_turned = node.op_type == "Conv", _is_turned(node)
    if is_conv and len(set(weight.zero_point)) > 1:
        raise ModelError(f"node '{node.name}' (Conv): ConvInteger has one zero point for all channels of a weight")
    data, scale, zero_point = _dynamic_inputs(model, _data(model, node), node)
    name, rank = str(node.inputs[1].name), len(source.shape)  # type: ignore[union-attr]
    integers = codes(source, weight, has_float32_scale=True)
    inputs = [
        data,
        add_initializer(model, f"{name}_quantized", stored(model, turned(integers) if is_turned else integers)),
        zero_point,
        add_initializer(model, f"{name}_zero_point", _zero_point(weight)),
    ]
    attributes = {key: attr.value for key, attr in node.attributes.items()} if is_conv else {}
    op_type = "ConvInteger" if is_conv else "MatMulInteger"
    total = add_node(model, op_type, inputs, before=node, name=f"{node.name}_{op_type}", attributes=attributes)
    total.outputs[0].type = ir.TensorType(ir.DataType.INT32)
    result = cast(model, total.outputs[0], ir.DataType.FLOAT, f"{node.name}_float")
    result = _scaled(model, node, result, scale, _weight_scale(weight, rank, is_conv) * _alpha(node))
    result = _with_bias(model, node, result, (-1,) + (1,) * (rank - 2) if is_conv else None)
    result = _in_type(model, result, node.outputs[0].dtype, node)
    result.type, result.shape = node.outputs[0].type, node.outputs[0].shape
    if not replace_value(node.outputs[0], result):
        raise ModelError(f"node '{node.name}' ({node.op_type}): its output cannot be replaced")
    model.graph.remove(node, safe=True)


def _weight(node: ir.Node, choices: Mapping[int, TensorChoice]) -> tuple[ir.TensorProtocol, AffineChoice]:
    """The weight and what the plan has for it."""
    choice, value = choices[1].choice if 1 in choices else None, node.inputs[1]
    source = value.const_value if value is not None and is_constant(value) else None
    if not isinstance(choice, AffineChoice) or source is None:
        raise ModelError(f"node '{node.name}' ({node.op_type}): dynamic quantization needs a constant integer weight")
    return source, choice


def _is_turned(node: ir.Node) -> bool:
    """That MatMul would have rows for the weight's columns."""
    return node.op_type == "Gemm" and bool(attribute(node, "transB", 0))


def _data(model: ir.Model, node: ir.Node) -> ir.Value:
    """The activation, transposed where Gemm would."""
    value = node.inputs[0]
    assert value is not None
    if node.op_type == "Gemm" and attribute(node, "transA", 0):
        return add_node(model, "Transpose", [value], before=node, attributes={"perm": [1, 0]}).outputs[0]
    return value


def _in_type(model: ir.Model, value: ir.Value, dtype: ir.DataType | None, node: ir.Node) -> ir.Value:
    """The value in another float type: the operators here compute in float32, whatever the model does."""
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


def _zero_point(weight: AffineChoice) -> Array:
    """One where all channels have the same: ONNX Runtime's ConvInteger takes no others."""
    zero_point = np.array(weight.zero_point).astype(storage_type(weight.format))
    return zero_point[0].reshape(()) if (zero_point == zero_point[0]).all() else zero_point


def _weight_scale(weight: AffineChoice, rank: int, is_conv: bool) -> Array:
    """In a shape that goes with the sums: channels are axis 1 of a convolution's output, the last axis otherwise."""
    scale = np.array(weight.scale, np.float32)
    if weight.axis is None:
        return scale.reshape(())
    return scale.reshape((-1,) + (1,) * (rank - 2)) if is_conv else scale


def _alpha(node: ir.Node) -> float:
    return float(attribute(node, "alpha", 1.0)) if node.op_type == "Gemm" else 1.0


def _scaled(model: ir.Model, node: ir.Node, total: ir.Value, scale: ir.Value, weight_scale: Array) -> ir.Value:
    constant_scale = add_initializer(model, f"{node.name}_weight_scale", weight_scale.astype(np.float32))
    both = add_node(model, "Mul", [scale, constant_scale], before=node, name=f"{node.name}_scale")
    return add_node(model, "Mul", [total, both.outputs[0]], before=node, name=f"{node.name}_scaled").outputs[0]


def _with_bias(model: ir.Model, node: ir.Node, result: ir.Value, shape: tuple[int, ...] | None) -> ir.Value:
    """The sum with the bias in that shape, or as it is where that is None."""
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
