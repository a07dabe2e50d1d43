"""Turn models of other float types into float32 ones.

float16 models are converted if the user asks for it. Models whose layers compute in float64 or bfloat16 are always
converted: ONNX Runtime has no convolution for either on the CPU, and quantizers take float32. A model that only casts
to float64 in between, for a more exact sum for example, stays as it is.

Weights and constants are converted, Casts to the type go to float32, and so do the types of all values. float64 inputs
and outputs of the graph keep their type and get a Cast, because programs that use the model hand over float64 arrays.
float16 and bfloat16 inputs and outputs become float32. Large weights of a large model are converted each time that
they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx
import onnx_ir as ir

from quark.errors import ModelError
from quark.onnx.graph import add_node, fresh_name, replace_input
from quark.onnx.large_tensors import ComputedTensor, is_large_model, is_large_tensor, pieces
from quark.onnx.load.structure import all_nodes

LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN"})
_NAMES = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16", ir.DataType.DOUBLE: "float64"}
_SINGLE = ir.DataType.FLOAT


def unusual_layer_types(proto: onnx.ModelProto) -> list[ir.DataType]:
    """Which of float64 and bfloat16 weights of layers have, anywhere in the model."""
    functions = proto.functions
    nodes = [*all_nodes(proto.graph.node), *(node for each in functions for node in all_nodes(each.node))]
    kinds = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t") and node.op_type == "Constant" and node.output:
                kinds[node.output[0]] = attribute.t.data_type
            if attribute.HasField("g"):
                kinds.update((tensor.name, tensor.data_type) for tensor in attribute.g.initializer)
    used = {kinds.get(name) for node in nodes if node.op_type in LAYERS and not node.domain for name in node.input}
    return [kind for kind in (ir.DataType.DOUBLE, ir.DataType.BFLOAT16) if int(kind) in used]


def convert_to_float32(model: ir.Model, kinds: Iterable[ir.DataType], name: str) -> list[str]:
    """Convert tensors of these types in place, subgraphs included; return what was done, in words.

    Raises ModelError if a weight holds a number beyond the range of float32.
    """
    return [remark for kind in kinds for remark in _convert(model, kind, name)]


def _convert(model: ir.Model, kind: ir.DataType, name: str) -> list[str]:
    count, is_large = 0, is_large_model(model)
    if kind == ir.DataType.DOUBLE:
        count += _cast_ports(model, kind)
    kept = {id(value) for value in (*model.graph.inputs, *model.graph.outputs)} if kind == ir.DataType.DOUBLE else ()
    for graph in model.graphs():
        for value in (*graph.inputs, *graph.initializers.values(), *graph.outputs):
            count += 0 if id(value) in kept else _convert_value(value, kind, is_large, name)
        for node in graph:
            if any(id(value) in kept for value in node.outputs):
                continue  # the Cast to an output
            count += _convert_attributes(node, kind, name)
            for output in node.outputs:
                count += _convert_value(output, kind, is_large, name)
    if not count:
        return []
    if kind == ir.DataType.DOUBLE:
        return ["float64 converted to float32; float64 inputs and outputs stay, with a Cast"]
    return [f"{_NAMES[kind]} converted to float32, inputs and outputs as well"]


def _cast_ports(model: ir.Model, kind: ir.DataType) -> int:
    """Let nodes read inputs of the type through a Cast to float32, and outputs of the type come from a Cast back."""
    count = 0
    first = next(iter(model.graph), None)
    for value in model.graph.inputs:
        if value.dtype != kind or value.is_initializer() or value.is_graph_output():
            continue
        readers = list(value.uses())
        cast = add_node(model, "Cast", [value], before=first, name=f"{value.name}_float32", attributes={"to": _SINGLE})
        cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(_SINGLE), value.shape
        for reader, index in readers:
            replace_input(reader, index, cast.outputs[0])
        count += 1
    for position, value in enumerate(model.graph.outputs):
        if value.dtype != kind or value.producer() is None:
            continue
        output_name = str(value.name)
        value.name = fresh_name(model, f"{output_name}_float32")
        cast = add_node(model, "Cast", [value], name=f"{output_name}_float64", attributes={"to": kind})
        result = cast.outputs[0]
        result.name, result.type, result.shape = output_name, ir.TensorType(kind), value.shape
        model.graph.outputs[position] = result
        count += 1
    return count


def _convert_value(value: ir.Value, kind: ir.DataType, is_large: bool, name: str) -> int:
    is_converted = value.dtype == kind
    if is_converted:
        value.type = _as_single(value.type)
    tensor = value.const_value
    if tensor is not None and tensor.dtype == kind:
        value.const_value = _converted_later(tensor, name) if is_large else _converted(tensor, name)
        value.type = ir.TensorType(_SINGLE)
        is_converted = True
    return int(is_converted)


def _as_single(kind: ir.TypeProtocol | None) -> ir.TypeProtocol | None:
    if isinstance(kind, ir.TensorType):
        return ir.TensorType(_SINGLE, denotation=kind.denotation)
    if isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        inner = _as_single(kind.elem_type)
        assert inner is not None
        return type(kind)(inner, denotation=kind.denotation)
    return kind


def _converted(tensor: ir.TensorProtocol, name: str) -> ir.Tensor[np.ndarray]:
    array = tensor.numpy()
    with np.errstate(over="ignore"):
        result = array.astype(np.float32)
    if tensor.dtype == ir.DataType.DOUBLE and bool((np.isinf(result) & np.isfinite(array)).any()):
        raise ModelError(
            f"'{name}': tensor '{tensor.name}' of float64 holds numbers beyond the range of float32 (3.4e38), in which "
            "the model would compute. Scale the model's weights, or leave such numbers out"
        )
    return ir.Tensor(result, name=tensor.name)


def _converted_later(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    if not is_large_tensor(tensor):
        return _converted(tensor, name)

    def compute() -> Iterator[np.ndarray]:
        return (piece.array.astype(np.float32) for piece in pieces(tensor))

    return ComputedTensor(compute, _SINGLE, ir.Shape(tensor.shape.numpy()), tensor.name)


def _convert_attributes(node: ir.Node, kind: ir.DataType, name: str) -> int:
    """Tensors in attributes (Constant, ConstantOfShape), and attributes that name a type (Cast, RandomNormal ...)."""
    count = 0
    for key, attr in list(node.attributes.items()):
        if attr.type == ir.AttributeType.TENSOR and attr.as_tensor().dtype == kind:
            node.attributes[key] = ir.AttrTensor(key, _converted(attr.as_tensor(), name))
        elif key in ("to", "dtype", "output_dtype") and attr.type == ir.AttributeType.INT and attr.value == int(kind):
            node.attributes[key] = ir.AttrInt64(key, int(_SINGLE))
        else:
            continue
        count += 1
    return count
