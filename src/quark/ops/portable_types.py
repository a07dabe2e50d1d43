"""What opsets 13 and 14 lack, done by hand: nodes that follow the type of their input.

CastLike came with opset 15. Before, the element types at our nodes must be known when the functions are written. They
are found by ONNX's own inference on a twin of the model in which ordinary operators of the same typing stand in for
ours.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, shape_inference

from quark.errors import ModelError
from quark.ops.onnx_nodes import all_nodes, describe, is_ours, subgraphs
from quark.ops.schema import (
    BFP_QUANTIZE_DEQUANTIZE,
    DOMAIN,
    EXTENDED_DEQUANTIZE_LINEAR,
    EXTENDED_QUANTIZE_LINEAR,
    MX_QUANTIZE_DEQUANTIZE,
)

STAND_INS = {
    MX_QUANTIZE_DEQUANTIZE.name: "Identity",
    BFP_QUANTIZE_DEQUANTIZE.name: "Identity",
    EXTENDED_QUANTIZE_LINEAR.name: "QuantizeLinear",
    EXTENDED_DEQUANTIZE_LINEAR.name: "DequantizeLinear",
}
LARGE_BYTES = 1024  # an initializer beyond this holds weights, not a shape that inference would read

Types = dict[str, int]


def single_quantized_type(model: ModelProto) -> int | None:
    """The zero point's type of all ExtendedQuantizeLinear nodes; None where there are none. Several are an error."""
    found: dict[int, NodeProto] = {}
    for node, types in _typed_nodes(model):
        if node.op_type == EXTENDED_QUANTIZE_LINEAR.name:
            found.setdefault(_type_of(node, 2, types), node)
    if len(found) > 1:
        nodes = " and ".join(f"{TensorProto.DataType.Name(type)} at {describe(node)}" for type, node in found.items())
        raise ModelError(f"opsets 13 and 14 allow one quantized type in a model, this one has {nodes}; {_ADVICE}")
    return next(iter(found), None)


def put_float16_between_casts(model: ModelProto) -> None:
    """Change the model in place: its block nodes with float16 inputs work on float32, between two Casts."""
    for function in model.functions:
        for node in all_nodes(function.node):
            if is_ours(node) and len(node.input) == 1:
                _type_of(node, 0, {})
    _rewrite(model.graph, _inferred_twin(model).graph, {})


_ADVICE = "convert the model to opset 15 or later"


def _rewrite(graph: GraphProto, twin: GraphProto, outer: Types) -> None:
    types = {**outer, **_own_types(twin)}
    nodes: list[NodeProto] = []
    for node, twin_node in zip(graph.node, twin.node, strict=True):
        for subgraph, twin_subgraph in zip(subgraphs(node), subgraphs(twin_node), strict=True):
            _rewrite(subgraph, twin_subgraph, types)
        nodes.extend(_between_casts(node, types) if is_ours(node) and len(node.input) == 1 else [node])
    if len(nodes) > len(graph.node):
        kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(kept)


def _between_casts(node: NodeProto, types: Types) -> list[NodeProto]:
    """The node, between Casts if its input is float16."""
    type = _type_of(node, 0, types)
    if type == TensorProto.FLOAT:
        return [node]
    if type != TensorProto.FLOAT16:
        raise ModelError(
            f"{describe(node)} has an input of {TensorProto.DataType.Name(type)}, expected FLOAT or FLOAT16"
        )
    x, y = node.input[0], node.output[0]
    inner = NodeProto()
    inner.CopyFrom(node)
    inner.input[0], inner.output[0] = f"{y}/input_float32", f"{y}/output_float32"
    return [
        helper.make_node("Cast", [x], [inner.input[0]], f"{y}/to_float32", to=TensorProto.FLOAT),
        inner,
        helper.make_node("Cast", [inner.output[0]], [y], f"{y}/to_float16", to=TensorProto.FLOAT16),
    ]


def _type_of(node: NodeProto, position: int, types: Types) -> int:
    name = node.input[position]
    if name not in types:
        raise ModelError(f"the element type of '{name}', an input of {describe(node)}, is not known; {_ADVICE}")
    return types[name]


def _typed_nodes(model: ModelProto) -> Iterator[tuple[NodeProto, Types]]:
    """Our nodes with the types that are known where they stand; inside a function, none are."""
    for function in model.functions:
        yield from ((node, {}) for node in all_nodes(function.node) if is_ours(node))
    yield from _typed_nodes_of(model.graph, _inferred_twin(model).graph, {})


def _typed_nodes_of(graph: GraphProto, twin: GraphProto, outer: Types) -> Iterator[tuple[NodeProto, Types]]:
    types = {**outer, **_own_types(twin)}
    for node, twin_node in zip(graph.node, twin.node, strict=True):
        if is_ours(node):
            yield node, types
        for subgraph, twin_subgraph in zip(subgraphs(node), subgraphs(twin_node), strict=True):
            yield from _typed_nodes_of(subgraph, twin_subgraph, types)


def _own_types(graph: GraphProto) -> Types:
    values = (*graph.value_info, *graph.output, *graph.input)
    types = {v.name: v.type.tensor_type.elem_type for v in values}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name: type for name, type in types.items() if type != TensorProto.UNDEFINED}


def _inferred_twin(model: ModelProto) -> ModelProto:
    """The model with our operators replaced by stand-ins and every type that inference finds."""
    twin = ModelProto()
    twin.CopyFrom(model)
    for node in all_nodes(twin.graph.node):
        if is_ours(node):
            node.op_type, node.domain = STAND_INS[node.op_type], ""
            del node.attribute[:]
    others = [f for f in twin.functions if f.domain != DOMAIN]
    del twin.functions[:]
    twin.functions.extend(others)
    for tensor in twin.graph.initializer:
        if len(tensor.raw_data) > LARGE_BYTES:
            tensor.ClearField("raw_data")
    return shape_inference.infer_shapes(twin)
