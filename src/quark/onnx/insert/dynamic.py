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
from quark.onnx.graph import add_initializer, add_node, attribute, constant, readers, replace_value
from quark.onnx.insert.constants import codes_of
from quark.onnx.insert.pairs import cast, storage_type
from quark.plan import AffineChoice, TensorChoice

Array = NDArray[Any]


def insert_dynamic(model: ir.Model, node: ir.Node, choices: Mapping[int, TensorChoice]) -> None:
    """Replace Conv, Gemm or MatMul with a constant weight by integer operators."""
    weight = choices[1].choice if 1 in choices else None
    array = constant(node.inputs[1])
    if not isinstance(weight, AffineChoice) or array is None:
        raise ModelError(f"node '{node.name}' ({node.op_type}): dynamic quantization needs a constant integer weight")
    is_conv = node.op_type == "Conv"
    if node.op_type == "Gemm" and attribute(node, "transB", 0):
        array = array.T
        axis = None if weight.axis is None else 1 - weight.axis
        weight = AffineChoice(weight.format, weight.scale, weight.zero_point, axis)
    codes, scale, zero_point = _dynamic_inputs(model, _data(model, node), node)
    name = str(node.inputs[1].name)  # type: ignore[union-attr]
    inputs = [
        codes,
        add_initializer(model, f"{name}_quantized", codes_of(array, weight)),
        zero_point,
        add_initializer(model, f"{name}_zero_point", _zero_point(weight)),
    ]
    attributes = {key: attr.value for key, attr in node.attributes.items()} if is_conv else {}
    op_type = "ConvInteger" if is_conv else "MatMulInteger"
    total = add_node(model, op_type, inputs, before=node, name=f"{node.name}_{op_type}", attributes=attributes)
    total.outputs[0].type = ir.TensorType(ir.DataType.INT32)
    dtype = node.outputs[0].dtype or ir.DataType.FLOAT
    result = cast(model, total.outputs[0], dtype, f"{node.name}_float")
    result = _scaled(model, node, result, scale, _weight_scale(weight, array.ndim, is_conv) * _alpha(node))
    result = _with_bias(model, node, result, is_conv)
    result.type, result.shape = node.outputs[0].type, node.outputs[0].shape
    if not replace_value(node.outputs[0], result):
        raise ModelError(f"node '{node.name}' ({node.op_type}): its output cannot be replaced")
    model.graph.remove(node, safe=True)


def _data(model: ir.Model, node: ir.Node) -> ir.Value:
    """The activation, transposed where Gemm would."""
    value = node.inputs[0]
    assert value is not None
    if node.op_type == "Gemm" and attribute(node, "transA", 0):
        return add_node(model, "Transpose", [value], before=node, attributes={"perm": [1, 0]}).outputs[0]
    return value


def _dynamic_inputs(model: ir.Model, value: ir.Value, node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Codes, scale and zero point of an activation; readers of one activation share them."""
    for reader, _ in readers(value):
        if reader.op_type == "DynamicQuantizeLinear":
            return reader.outputs[0], reader.outputs[1], reader.outputs[2]
    quantize = add_node(model, "DynamicQuantizeLinear", [value], before=node, name=f"{value.name}_dynamic", outputs=3)
    quantize.outputs[0].type = ir.TensorType(ir.DataType.UINT8)
    return quantize.outputs[0], quantize.outputs[1], quantize.outputs[2]


def _zero_point(weight: AffineChoice) -> Array:
    zero_point = np.array(weight.zero_point).astype(storage_type(weight.format))
    return zero_point.reshape(()) if weight.axis is None else zero_point


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


def _with_bias(model: ir.Model, node: ir.Node, result: ir.Value, is_conv: bool) -> ir.Value:
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None:
        return result
    array = constant(bias)
    if array is not None:
        beta = attribute(node, "beta", 1.0) if node.op_type == "Gemm" else 1.0
        rank = len(node.outputs[0].shape) if node.outputs[0].shape is not None else 4
        shape = (-1,) + (1,) * (rank - 2) if is_conv else array.shape
        bias = add_initializer(model, f"{bias.name}_bias", (array * np.float32(beta)).reshape(shape))
    elif is_conv or attribute(node, "beta", 1.0) != 1.0:
        raise ModelError(f"node '{node.name}' ({node.op_type}): dynamic quantization needs a constant bias")
    return add_node(model, "Add", [result, bias], before=node, name=f"{node.name}_bias").outputs[0]
