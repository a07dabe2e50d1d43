"""Turn a float16 model into a float32 one: the same numbers, held wider.

Weights and constants are converted, Casts to float16 go to float32, and so do the types of all values, inputs and
outputs included: a model converted this way takes and gives float32. Large weights of a large model are converted each
time that they are read.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from quark.onnx.large_tensors import ComputedTensor, is_large_model, is_large_tensor, pieces

_HALF = ir.DataType.FLOAT16
_SINGLE = ir.DataType.FLOAT


def convert_to_float32(model: ir.Model) -> list[str]:
    """Convert in place, subgraphs included; what was done, in words. A model without float16 stays as it is."""
    count, is_large = 0, is_large_model(model)
    for graph in model.graphs():
        for value in (*graph.inputs, *graph.initializers.values(), *graph.outputs):
            count += _convert_value(value, is_large)
        for node in graph:
            count += _convert_attributes(node)
            for output in node.outputs:
                count += _convert_value(output, is_large)
    if not count:
        return []
    return ["float16 converted to float32, inputs and outputs as well"]


def _convert_value(value: ir.Value, is_large: bool) -> int:
    is_half = value.dtype == _HALF
    if is_half:
        value.type = _wider(value.type)
    tensor = value.const_value
    if tensor is not None and tensor.dtype == _HALF:
        value.const_value = _widened_later(tensor) if is_large else _widened(tensor)
        value.type = ir.TensorType(_SINGLE)
        is_half = True
    return int(is_half)


def _wider(kind: ir.TypeProtocol | None) -> ir.TypeProtocol | None:
    if isinstance(kind, ir.TensorType):
        return ir.TensorType(_SINGLE, denotation=kind.denotation)
    if isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        inner = _wider(kind.elem_type)
        assert inner is not None
        return type(kind)(inner, denotation=kind.denotation)
    return kind


def _widened(tensor: ir.TensorProtocol) -> ir.Tensor[np.ndarray]:
    return ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name)


def _widened_later(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if not is_large_tensor(tensor):
        return _widened(tensor)

    def compute() -> Iterator[np.ndarray]:
        return (piece.array.astype(np.float32) for piece in pieces(tensor))

    return ComputedTensor(compute, _SINGLE, ir.Shape(tensor.shape.numpy()), tensor.name)


def _convert_attributes(node: ir.Node) -> int:
    """Tensors in attributes (Constant, ConstantOfShape), and attributes that name a type (Cast, RandomNormal ...)."""
    count = 0
    for name, attr in list(node.attributes.items()):
        if attr.type == ir.AttributeType.TENSOR and attr.as_tensor().dtype == _HALF:
            node.attributes[name] = ir.AttrTensor(name, _widened(attr.as_tensor()))
        elif name in ("to", "dtype", "output_dtype") and attr.type == ir.AttributeType.INT and attr.value == int(_HALF):
            node.attributes[name] = ir.AttrInt64(name, int(_SINGLE))
        else:
            continue
        count += 1
    return count
