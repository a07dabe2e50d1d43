"""Make a model with quark's operators run on any ONNX Runtime from 1.20 on.

`add_portable_functions` adds a function of ordinary ONNX operators for each operator of `com.amd.quark` that the model
uses. A runtime without quark's library runs the function; one with it uses the native kernel. The values are the same,
unless the session is told to treat subnormal numbers as zero.

A function's body must be written for the model's own opset, because some operators changed their inputs. Opsets from 13
on are supported, the first of them with limits:

    13, 14    no operator follows the type of its input. float16 nodes are put between Casts, for which their type must
              be known; ExtendedQuantizeLinear has one type in all of the model
    13        no empty tensors: a 0 in a shape means something else there

A block operator whose nodes all have the same attributes, as in most models, gets a function for these alone
(`fixed_functions`). It has a third of the nodes or less, and sessions open about ten times faster, but it ignores
attributes: after editing them, call `add_portable_functions` again. It is for float32 tensors whose length along the
axis is known. Otherwise a function takes any attributes, types and shapes. Everything that depends only on attributes
and known shapes is computed when the session is created, and so are functions of constants. That takes some 30 ms for
each node that calls such a function, and grows faster than linearly in a model with hundreds of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, shape_inference

from quark.errors import ModelError, QuarkError, UnsupportedTypeError
from quark.formats.block import BlockQuantizer
from quark.formats.spec import ScaleRule
from quark.ops import fixed_functions
from quark.ops.fixed_functions import FixedQuantizer, fixed_function
from quark.ops.function_body import CAST_LIKE_OPSET
from quark.ops.onnx_nodes import all_nodes, describe, is_ours, node_attributes, subgraphs
from quark.ops.portable_blocks import MAX_BLOCK
from quark.ops.portable_operators import (
    bfp_function,
    dequantize_linear_function,
    float_scale_function,
    mx_function,
    quantize_linear_function,
)
from quark.ops.schema import (
    BFP_QUANTIZE_DEQUANTIZE,
    BLOCK_OPERATORS,
    DOMAIN,
    EXTENDED_DEQUANTIZE_LINEAR,
    EXTENDED_QUANTIZE_LINEAR,
    FLOAT_SCALE_QUANTIZE_DEQUANTIZE,
    MX_QUANTIZE_DEQUANTIZE,
    OPERATORS,
    VERSION,
    quantizer_of,
)

MIN_OPSET = 13
MAX_PADDED_BLOCK = 2**24
MIN_IR_VERSION = 9  # functions came with 8, defaults for their attributes with 9


def add_portable_functions(model: ModelProto) -> ModelProto:
    """A copy of the model in which every operator of `com.amd.quark` that it uses has a function.

    Existing functions for them are replaced. The opset stays; the IR version becomes 9 if it was lower. A model without
    these operators is not changed. Raises a ModelError that names the node for an illegal attribute, an opset below 13
    or, in opsets 13 and 14, a type that cannot be determined.
    """
    if not isinstance(model, ModelProto):
        raise UnsupportedTypeError(
            f"model: expected an onnx.ModelProto, got {type(model).__name__}; onnx.load reads files"
        )
    result = ModelProto()
    result.CopyFrom(model)
    define_portable_functions(result)
    return result


def define_portable_functions(model: ModelProto) -> None:
    """`add_portable_functions` in place: a copy of large weights takes time and memory."""
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    nodes = [node for body in bodies for node in all_nodes(body) if is_ours(node)]
    used = {node.op_type for node in nodes}
    if not used:
        return
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), None)
    if opset is None or opset < MIN_OPSET:
        raise ModelError(
            f"the model has opset {opset or 'none'} of the default domain; functions for {DOMAIN} need {MIN_OPSET} or "
            f"later: convert the model, for example with onnx.version_converter"
        )
    for node in nodes:
        _check(node)
    quantized_type = None
    if opset < CAST_LIKE_OPSET:
        quantized_type = single_quantized_type(model)
        put_float16_between_casts(model)
    writers: dict[str, Callable[[], FunctionProto]] = {
        MX_QUANTIZE_DEQUANTIZE.name: lambda: mx_function(opset),
        BFP_QUANTIZE_DEQUANTIZE.name: lambda: bfp_function(opset),
        FLOAT_SCALE_QUANTIZE_DEQUANTIZE.name: lambda: float_scale_function(opset),
        EXTENDED_QUANTIZE_LINEAR.name: lambda: quantize_linear_function(opset, quantized_type),
        EXTENDED_DEQUANTIZE_LINEAR.name: lambda: dequantize_linear_function(opset),
    }
    others = [f for f in model.functions if not (f.domain == DOMAIN and f.name in OPERATORS)]
    for imports in (model.opset_import, *(f.opset_import for f in others if any(map(is_ours, all_nodes(f.node))))):
        if all(entry.domain != DOMAIN for entry in imports):
            imports.append(helper.make_opsetid(DOMAIN, VERSION))
    fixed = {} if opset < fixed_functions.MIN_OPSET else _fixed_quantizers(model, nodes)
    functions = [
        fixed_function(name, opset, fixed[name]) if name in fixed else writers[name]()
        for name in OPERATORS
        if name in used
    ]
    del model.functions[:]
    model.functions.extend([*others, *functions])
    model.ir_version = max(model.ir_version, MIN_IR_VERSION)


def _check(node: NodeProto) -> None:
    """Check the number of inputs, and the attributes unless an enclosing function decides them."""
    operator = OPERATORS[node.op_type]
    given = [name for name in node.input if name]
    if not len(operator.inputs) - operator.optional_inputs <= len(given) <= len(operator.inputs):
        raise ModelError(f"{describe(node)} has {len(given)} inputs, expected {', '.join(operator.inputs)}")
    if any(attribute.ref_attr_name for attribute in node.attribute):
        return
    try:
        if node.op_type not in BLOCK_OPERATORS:
            operator.resolve(node_attributes(node))
            return
        quantizer = quantizer_of(node.op_type, node_attributes(node))[0]
    except QuarkError as error:
        raise ModelError(f"{describe(node)}: {error}") from error
    size = quantizer.format.block_size
    if size > MAX_PADDED_BLOCK:
        raise ModelError(
            f"{describe(node)}: block_size {size}: a portable function fills a last block up with zeros and takes "
            f"blocks of at most {MAX_PADDED_BLOCK}; where the axis is shorter, its length means the same"
        )
    if quantizer.scale_rule is ScaleRule.MSE and size > MAX_BLOCK:
        raise ModelError(
            f"{describe(node)}: block_size {size} with scale_rule 'mse': a portable function takes blocks of at most "
            f"{MAX_BLOCK}; choose a smaller block or another rule"
        )


def _fixed_quantizers(model: ModelProto, nodes: list[NodeProto]) -> dict[str, FixedQuantizer]:
    """The common attributes of the nodes of a block operator, for operators that a function with fixed attributes can
    compute on all of their inputs."""
    by_operator: dict[str, list[NodeProto]] = {}
    for node in nodes:
        by_operator.setdefault(node.op_type, []).append(node)
    is_outer = {id(node) for node in model.graph.node}
    candidates: dict[str, tuple[BlockQuantizer, int, bool]] = {}
    for op_type in BLOCK_OPERATORS:
        own = by_operator.get(op_type, [])
        if not own or any(len(node.input) > 1 or id(node) not in is_outer for node in own):
            continue
        kinds = {quantizer_of(op_type, node_attributes(node)) for node in own}
        if len(kinds) == 1:
            candidates[op_type] = kinds.pop()
    if not candidates:
        return {}
    inputs = {node.input[0] for op_type in candidates for node in by_operator[op_type]}
    tensors = _tensor_types(model.graph)
    if not inputs <= tensors.keys():
        tensors = _tensor_types(_inferred_twin(model).graph)
    result = {}
    for op_type, (quantizer, axis, rounds_first) in candidates.items():
        lengths = [_length(tensors.get(node.input[0]), axis) for node in by_operator[op_type]]
        fixed = FixedQuantizer(quantizer, axis, rounds_first, max(lengths))
        if min(lengths) > 0 and fixed.is_supported:
            result[op_type] = fixed
    return result


def _tensor_types(graph: GraphProto) -> dict[str, TypeProto.Tensor]:
    """Types of inputs, outputs and tensors between nodes, as far as they have a shape."""
    values = (*graph.value_info, *graph.output, *graph.input)
    return {v.name: v.type.tensor_type for v in values if v.type.tensor_type.HasField("shape")}


def _length(tensor: TypeProto.Tensor | None, axis: int) -> int:
    """The length of a float32 tensor along the axis. 0 if it is not known, or for rank 0 or 1, where blocks ignore the
    axis."""
    if tensor is None or tensor.elem_type != TensorProto.FLOAT:
        return 0
    dims = tensor.shape.dim
    return dims[axis].dim_value if len(dims) > 1 and -len(dims) <= axis < len(dims) else 0


# CastLike, with which a node follows the type of its input, came with opset 15. For opsets 13 and 14 the element types
# at our nodes must be known when the functions are written. They are found by ONNX's own inference on a twin of the
# model in which ordinary operators with the same types replace ours.

STAND_INS = {
    MX_QUANTIZE_DEQUANTIZE.name: "Identity",
    BFP_QUANTIZE_DEQUANTIZE.name: "Identity",
    FLOAT_SCALE_QUANTIZE_DEQUANTIZE.name: "Identity",
    EXTENDED_QUANTIZE_LINEAR.name: "QuantizeLinear",
    EXTENDED_DEQUANTIZE_LINEAR.name: "DequantizeLinear",
}
LARGE_BYTES = 1024  # an initializer beyond this holds weights, not a shape that inference would read

_ADVICE = "convert the model to opset 15 or later"

Types = dict[str, int]


def single_quantized_type(model: ModelProto) -> int | None:
    """The zero point's type of all ExtendedQuantizeLinear nodes; None without any, an error for several types."""
    quantizers: dict[int, NodeProto] = {}
    # types inside a function are not known
    typed_nodes: list[tuple[NodeProto, Types]] = [
        (node, {}) for function in model.functions for node in all_nodes(function.node) if is_ours(node)
    ]
    for node, types in (*typed_nodes, *_typed_nodes(model.graph, _inferred_twin(model).graph, {})):
        if node.op_type == EXTENDED_QUANTIZE_LINEAR.name:
            quantizers.setdefault(_type_of(node, 2, types), node)
    if len(quantizers) > 1:
        nodes = " and ".join(
            f"{TensorProto.DataType.Name(type)} at {describe(node)}" for type, node in quantizers.items()
        )
        raise ModelError(f"opsets 13 and 14 allow one quantized type in a model, this one has {nodes}; {_ADVICE}")
    return next(iter(quantizers), None)


def put_float16_between_casts(model: ModelProto) -> None:
    """Change the model in place: block nodes with float16 inputs work on float32, between two Casts."""
    for function in model.functions:
        for node in all_nodes(function.node):
            if is_ours(node) and node.op_type in BLOCK_OPERATORS:
                _type_of(node, 0, {})
    _rewrite(model.graph, _inferred_twin(model).graph, {})


def _rewrite(graph: GraphProto, twin: GraphProto, outer: Types) -> None:
    types = {**outer, **_own_types(twin)}
    nodes: list[NodeProto] = []
    for node, twin_node in zip(graph.node, twin.node, strict=True):
        for subgraph, twin_subgraph in zip(subgraphs(node), subgraphs(twin_node), strict=True):
            _rewrite(subgraph, twin_subgraph, types)
        is_block = is_ours(node) and node.op_type in BLOCK_OPERATORS
        type = _type_of(node, 0, types) if is_block else TensorProto.FLOAT
        if type == TensorProto.FLOAT:
            nodes.append(node)
            continue
        if type != TensorProto.FLOAT16:
            raise ModelError(
                f"{describe(node)} has an input of {TensorProto.DataType.Name(type)}, expected FLOAT or FLOAT16"
            )
        x, y = node.input[0], node.output[0]
        inner = NodeProto()
        inner.CopyFrom(node)
        inner.input[0], inner.output[0] = f"{y}/input_float32", f"{y}/output_float32"
        nodes += [
            helper.make_node("Cast", [x], [inner.input[0]], f"{y}/to_float32", to=TensorProto.FLOAT),
            inner,
            helper.make_node("Cast", [inner.output[0]], [y], f"{y}/to_float16", to=TensorProto.FLOAT16),
        ]
    if len(nodes) > len(graph.node):
        kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(kept)


def _type_of(node: NodeProto, position: int, types: Types) -> int:
    name = node.input[position]
    if name not in types:
        raise ModelError(f"the element type of '{name}', an input of {describe(node)}, is not known; {_ADVICE}")
    return types[name]


def _typed_nodes(graph: GraphProto, twin: GraphProto, outer: Types) -> Iterator[tuple[NodeProto, Types]]:
    """Our nodes with the types that are known at their place."""
    types = {**outer, **_own_types(twin)}
    for node, twin_node in zip(graph.node, twin.node, strict=True):
        if is_ours(node):
            yield node, types
        for subgraph, twin_subgraph in zip(subgraphs(node), subgraphs(twin_node), strict=True):
            yield from _typed_nodes(subgraph, twin_subgraph, types)


def _own_types(graph: GraphProto) -> Types:
    values = (*graph.value_info, *graph.output, *graph.input)
    types = {v.name: v.type.tensor_type.elem_type for v in values}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name: type for name, type in types.items() if type != TensorProto.UNDEFINED}


def _inferred_twin(model: ModelProto) -> ModelProto:
    """The model with our operators replaced by stand-ins, and with all types that inference finds."""
    twin = ModelProto()
    twin.CopyFrom(model)
    for node in all_nodes(twin.graph.node):
        if is_ours(node):
            if node.op_type in BLOCK_OPERATORS:
                del node.input[1:]
            node.op_type, node.domain = STAND_INS[node.op_type], ""
            del node.attribute[:]
    others = [f for f in twin.functions if f.domain != DOMAIN]
    del twin.functions[:]
    twin.functions.extend(others)
    for tensor in twin.graph.initializer:
        if len(tensor.raw_data) > LARGE_BYTES:
            tensor.ClearField("raw_data")
    return shape_inference.infer_shapes(twin)
