"""Quantized models: read them to change them, remove quantizers, and list how tensors are quantized.

    graph_of_model       a model as a graph that can be changed, without changing the message it was made from
    quantizers_in        the quantizers of such a graph; raises ModelError if it has none
    model_of_graph       the changed graph as a message

    remove_qdq           without the quantizers of activations
    remove_qdq_between   without those between two operators
    to_float             without any: stored codes become the numbers that they stand for
    convert_qdq_to_qop   operators on codes where ONNX Runtime has them
    activation_widths    the layers with 8-bit and with 16-bit activations

A quantizer is taken out of the way of its readers, nodes inside subgraphs and graph outputs included; whatever nothing
reads any more is removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import (
    LiftConstantsToInitializersPass,
    RemoveInitializersFromInputsPass,
    RemoveUnusedFunctionsPass,
    RemoveUnusedOpsetsPass,
)

from quark.errors import InvalidValueError, ModelError
from quark.formats.affine import AffineParameters, dequantize_affine, integer_format
from quark.onnx.graph import (
    add_copy,
    attribute,
    become,
    constant,
    fresh_name,
    infer_shapes,
    input_value,
    is_constant,
    readers,
    remove_dead,
    replace_input,
    replace_value,
)
from quark.onnx.insert.qoperator import to_qoperators
from quark.onnx.large_tensors import Message
from quark.onnx.load.reading import check_tensors, external_names
from quark.onnx.load.source import ExternalData, Source
from quark.onnx.load.structure import check_structure
from quark.onnx.load.wire import Carved
from quark.onnx.pack.editing import is_packed
from quark.onnx.pack.unpack import unpack_message
from quark.onnx.plan_reader import (
    BLOCK,
    DYNAMIC,
    QuantizedGraph,
    Quantizer,
    is_dequantize,
    is_on_codes,
    is_quantize,
    is_quantizer,
)
from quark.onnx.prepared_blocks import expand
from quark.ops.onnx_nodes import CONSTANT_DOMAIN
from quark.ops.schema import DOMAIN

Array = NDArray[Any]

LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "QLinearConv", "QGemm", "QLinearMatMul")
_INTEGERS = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16)

Conversion = dict[str, str]  # how an initializer's numbers follow from its codes, see split_codes

_MIN_IR_VERSION = 4  # initializers that are not inputs


def graph_of_model(model: onnx.ModelProto) -> ir.Model:
    """The model as a graph: constants as initializers, nodes in order. The message stays as it is.

    Unlike `read_graph`, this also takes more than 2 GB. Raises ModelError if the model is malformed, or if its weights
    are in files that were not loaded.
    """
    name = model.graph.name or "model"
    check_structure(model, name)
    files = external_names(model)
    if files:
        raise ModelError(
            f"'{name}': its weights are in '{files[0]}' and were not loaded. Load the model with onnx.load"
        )
    source = Source(b"", name)
    check_tensors(source, Carved(model, {}), ExternalData(source))
    try:
        graph = ir.serde.deserialize_model(model)
    except (ir.serde.SerdeError, ValueError, TypeError, LookupError, NotImplementedError) as error:
        reason: BaseException = error
        while reason.__cause__ is not None:  # errors around the first cause quote whole messages
            reason = reason.__cause__
        raise ModelError(f"'{name}' cannot be read: {reason}") from error
    for node in graph.graph.all_nodes():
        tensor = attribute(node, "value") if node.op_type == "Constant" else None
        if isinstance(tensor, ir.TensorProtoTensor) and tensor.dtype != ir.DataType.STRING:
            copy = ir.Tensor(tensor.numpy(), tensor.dtype, name=tensor.name)  # its name would change in the message too
            node.attributes["value"] = ir.AttrTensor("value", copy)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(graph)
    RemoveInitializersFromInputsPass()(graph)
    graph.ir_version = max(graph.ir_version or 0, _MIN_IR_VERSION)
    for node in graph.graph.all_nodes():
        node.name = node.name or next((value.name for value in node.outputs if value.name), node.op_type)
    expand(graph)
    graph.graph.sort()
    return graph


def quantizers_in(graph: ir.Model) -> QuantizedGraph:
    """The quantized tensors of a graph. Raises ModelError if there are none."""
    quantized = QuantizedGraph(graph)
    if not quantized.quantizers:
        raise ModelError("the model has no quantizers. Expected a quantized model")
    return quantized


def model_of_graph(graph: ir.Model) -> onnx.ModelProto:
    """The graph as a message, without nodes and initializers that no output depends on."""
    remove_dead(graph)
    return ir.serde.serialize_model(graph)


# ---- removing quantizers ----


def remove_qdq(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove every quantizer that rounds at run time: QuantizeLinear with DequantizeLinear, and block operators.

    Stored codes stay, with the DequantizeLinear that reads them. Raises ModelError if the model has no quantizers.
    """
    graph = graph_of_model(model)
    for node in quantizers_in(graph).quantizers:
        maker = _maker(node)
        if is_dequantize(node) and is_quantize(maker) and maker is not None:
            _bypass(node, maker.inputs[0])
        elif node.op_type in BLOCK and node.domain == DOMAIN:
            _bypass(node, node.inputs[0])
    return _without_remains(graph)


def remove_qdq_between(
    model: onnx.ModelProto, between_ops: Sequence[tuple[str, str]]
) -> tuple[onnx.ModelProto, list[str]]:
    """Connect the second operator of each pair directly to the first one's result, without the quantizer between them.

    Also returns a sentence for every place where a DequantizeLinear has other readers too: these see the quantized
    tensor, and so does the operator, as before. If a QuantizeLinear has several DequantizeLinear, the others keep it.
    """
    pairs = _checked_pairs(between_ops)
    graph = graph_of_model(model)
    quantizers_in(graph)
    left = []
    for lower in list(graph.graph.all_nodes()):
        for value in dict.fromkeys(lower.inputs):
            dequantize = None if value is None else value.producer()
            quantize = None if dequantize is None else _maker(dequantize)
            upper = None if quantize is None else _maker(quantize)
            if value is None or quantize is None or upper is None:
                continue
            if not is_dequantize(dequantize) or not is_quantize(quantize):
                continue
            if (upper.op_type, lower.op_type) not in pairs:
                continue
            others = [node for node, _ in readers(value) if node is not lower]
            if others or value.is_graph_output():
                names = ", ".join(f"{node.op_type}('{node.name}')" for node in (lower, *others))
                names += ", a graph output" if value.is_graph_output() else ""
                left.append(f"output of DequantizeLinear('{value.name}') is connected to {names}")
                continue
            for index, read in enumerate(lower.inputs):
                if read is value:
                    replace_input(lower, index, quantize.inputs[0])
    return model_of_graph(graph), left


def _checked_pairs(between_ops: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    is_list = isinstance(between_ops, (list, tuple))
    are_pairs = is_list and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in between_ops)
    if not are_pairs or not all(isinstance(name, str) and name for pair in between_ops for name in pair):
        raise InvalidValueError(
            f"between_ops {between_ops!r}: expected a list of pairs of operators, such as [('Conv', 'Relu')]; on the "
            "command line 'Conv,Relu;Mul,Add'"
        )
    return {(upper, lower) for upper, lower in between_ops}


# ---- back to float ----


def to_float(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in float, with the weights that its codes stand for. Packed weights are unpacked first.

    Raises ModelError if the model has no quantizers, or if a node computes with codes (QLinearConv, MatMulNBits ...).
    """
    return with_numbers(*split_codes(model))


def split_codes(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, Conversion]]:
    """Remove all quantizers, also those of stored codes, which their readers then read as they are.

    Also returns how to make the numbers of each initializer with codes, for `with_numbers`: the names of its 'scale'
    and 'zero_point' ('' for none), the 'axis', the 'block_size', and the number of the 'type'. Without a scale the
    initializer holds the numbers, in a shorter type.
    """
    if is_packed(model):
        packed = onnx.ModelProto()
        packed.CopyFrom(model)
        model = unpack_message(Message(packed, {}))[0].filled()
    graph = graph_of_model(model)
    quantized = quantizers_in(graph)
    on_codes = next((node for node in graph.graph.all_nodes() if is_on_codes(node) or node.op_type == DYNAMIC), None)
    if on_codes is not None:
        raise ModelError(
            f"node '{on_codes.name}' ({on_codes.op_type}) computes with codes. Only quantizers around operators on "
            "numbers can be removed: quantize with quant_format QDQ"
        )
    conversions: dict[str, Conversion] = {}
    held: dict[tuple[object, ...], ir.Value] = {}
    parameters: dict[str, ir.TensorProtocol] = {}
    for node, quantizer in quantized.quantizers.items():
        if is_quantize(node):
            continue
        source, conversion = _source_of(node, quantizer)
        if conversion is not None:
            key = (source, *conversion.values())
            if key not in held:
                held[key] = _named(graph, node, source, quantizer.tensor, is_taken=source in held.values())
                if conversion:
                    conversions[str(held[key].name)] = conversion
            source = held[key]
            for value in node.inputs[1:]:
                if value is not None and value.const_value is not None:
                    parameters[str(value.name)] = value.const_value
        _bypass(node, source)
    result = _without_remains(graph)
    present = {tensor.name for tensor in result.graph.initializer}
    for name in [name for name in parameters if name not in present]:
        result.graph.initializer.append(ir.serde.serialize_tensor(parameters[name]))
        result.graph.initializer[-1].name = name
    return result, conversions


def with_numbers(model: onnx.ModelProto, conversions: Mapping[str, Mapping[str, str]]) -> onnx.ModelProto:
    """Replace codes by the numbers that they stand for, as DequantizeLinear computes them."""
    graph = graph_of_model(model)
    for name, entry in conversions.items():
        value = graph.graph.initializers.get(name)
        codes = constant(value)
        scale, zero_point = (
            constant(graph.graph.initializers.get(entry.get(key, ""))) for key in ("scale", "zero_point")
        )
        if value is None or codes is None:
            raise ModelError(
                f"'{name}' is not an initializer of '{graph.graph.name}', and cannot be converted to float"
            )
        if entry.get("scale") and scale is None:
            raise ModelError(f"'{name}': its scale '{entry['scale']}' is not an initializer")
        try:
            numbers = _numbers(codes, scale, zero_point, entry)
        except InvalidValueError as error:
            raise ModelError(f"'{name}': {error}") from error
        value.const_value = ir.Tensor(numbers, name=name)
        value.type = ir.TensorType(value.const_value.dtype)
    return model_of_graph(graph)


def _numbers(codes: Array, scale: Array | None, zero_point: Array | None, entry: Mapping[str, str]) -> Array:
    """Compute what DequantizeLinear makes of codes; without a scale, convert the same numbers to a wider type."""
    if scale is None:
        return codes.astype(ir.DataType(int(entry.get("type") or ir.DataType.FLOAT)).numpy())
    if codes.dtype.kind not in "iu" and not codes.dtype.name.startswith(("int", "uint")):  # float8
        if scale.size != 1:
            raise InvalidValueError(f"{codes.dtype} with {scale.size} scales is not supported")
        numbers: Array = codes.astype(scale.dtype) * scale.reshape(())
        return numbers
    format = integer_format(ir.DataType.from_numpy(codes.dtype).name.lower())
    if zero_point is None or zero_point.size == 1:
        fill = 0 if zero_point is None else int(zero_point.reshape(()))
        zero_point = np.full(scale.shape, fill, np.int64)
    axis = None if scale.size == 1 else int(entry.get("axis", "1"))
    size = int(entry.get("block_size") or 0) or None
    parameters = AffineParameters(scale, zero_point.astype(np.int64), format, axis, None if axis is None else size)
    numbers = dequantize_affine(codes.astype(np.int64), parameters)
    return numbers


def _source_of(node: ir.Node, quantizer: Quantizer) -> tuple[ir.Value, Conversion | None]:
    """The value that a quantizer's readers read once it is removed, and for a stored one, how its numbers follow."""
    data, maker = input_value(node, 0), _maker(node)
    if is_dequantize(node) and is_quantize(maker) and maker is not None:
        data = input_value(maker, 0)
    elif is_dequantize(node):
        scale, zero_point = input_value(node, 1), input_value(node, 2)
        names = {"scale": _constant_name(scale), "zero_point": _constant_name(zero_point)}
        if data is None or not is_constant(data) or None in names.values() or not names["scale"]:
            raise ModelError(
                f"tensor '{quantizer.tensor}': its codes, scale or zero point are computed at run time by other nodes "
                "than QuantizeLinear. It cannot be converted to float"
            )
        axis = attribute(node, "axis", 0 if node.domain == DOMAIN else 1)
        size = attribute(node, "block_size", 0)
        return data, {**{key: name or "" for key, name in names.items()}, "axis": f"{axis}", "block_size": f"{size}"}
    elif node.op_type == "Cast":
        data = quantizer.source
        if is_constant(data):
            return data, {"scale": "", "zero_point": "", "type": str(int(attribute(node, "to")))}
    if data is None:
        raise ModelError(f"node '{node.name}' ({node.op_type}) has no input")
    return data, {} if node.domain == CONSTANT_DOMAIN and is_constant(data) else None


def _constant_name(value: ir.Value | None) -> str | None:
    """The name of a constant, '' for an omitted input, None for a value that is computed."""
    if value is None:
        return ""
    return str(value.name) if is_constant(value) else None


def _named(graph: ir.Model, node: ir.Node, held: ir.Value, tensor: str, *, is_taken: bool) -> ir.Value:
    """The initializer that a quantizer reads, under the name that the tensor had in float if that is free.

    A copy if its name changes, if something else reads it, or if it `is_taken` for other numbers.
    """
    result, content = node.outputs[0], held.const_value
    assert content is not None, tensor
    if result.name == tensor and not result.is_graph_output():
        result.name = fresh_name(graph, tensor)  # the result is about to be removed
    elif tensor == held.name or fresh_name(graph, tensor) != tensor:
        is_shared = is_taken or held.graph is not graph.graph or held.is_graph_output()
        is_shared = is_shared or any(not is_quantizer(reader) for reader, _ in readers(held))
        return add_copy(graph, held) if is_shared else held
    # an initializer that is renamed would also be renamed in the message that it was made from
    copy = ir.Tensor(content.numpy(), content.dtype, name=tensor)
    value = ir.Value(name=tensor, type=ir.TensorType(copy.dtype), shape=ir.Shape(copy.shape.numpy()), const_value=copy)
    graph.graph.register_initializer(value)
    return value


# ---- other forms, and what there is ----


def convert_qdq_to_qop(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace operators between DequantizeLinear and QuantizeLinear by ONNX Runtime's operators on codes (QLinearConv,
    QLinearAdd ...) if there are any. Raises ModelError if the model has no quantizers."""
    graph = graph_of_model(model)
    quantizers_in(graph)
    infer_shapes(graph)
    to_qoperators(graph)
    return model_of_graph(graph)


def activation_widths(model: onnx.ModelProto) -> dict[int, list[str]]:
    """The names of the layers by the bits of the integers that their data is quantized to.

    Layers are Conv, ConvTranspose, Gemm, and MatMul with a constant factor, also as operators on codes. A model in
    float has none with quantized data.
    """
    graph = graph_of_model(model)
    quantized = QuantizedGraph(graph)
    result: dict[int, list[str]] = {}
    for node in graph.graph.all_nodes():
        if node.op_type not in LAYERS or node.domain not in ("", "com.microsoft"):
            continue
        factors = (0, 3) if is_on_codes(node) else (0, 1)
        read = [quantized.of(input_value(node, index)) or quantized.factor(node, index) for index in factors]
        fixed = [
            quantized.is_fixed(input_value(node, index)) or (factor is not None and factor.is_constant)
            for index, factor in zip(factors, read, strict=True)
        ]
        data = read[0]
        if node.op_type.endswith("MatMul"):
            data = None if fixed[0] == fixed[1] else read[fixed.index(False)]
        if data is not None and data.dtype in _INTEGERS:
            result.setdefault(data.dtype.bitwidth, []).append(str(node.name))
    return result


def _without_remains(graph: ir.Model) -> onnx.ModelProto:
    """The graph as a message, without functions and domains that were needed for quantizers only."""
    remove_dead(graph)
    RemoveUnusedFunctionsPass()(graph)  # type: ignore[no-untyped-call]
    RemoveUnusedOpsetsPass()(graph)
    return model_of_graph(graph)


def _maker(node: ir.Node) -> ir.Node | None:
    """The node that makes the first input."""
    data = input_value(node, 0)
    return None if data is None else data.producer()


def _bypass(node: ir.Node, source: ir.Value | None) -> None:
    """Connect the readers of a node to `source`. If a graph output must keep its name, the node becomes an Identity."""
    if source is not None and not replace_value(node.outputs[0], source):
        become(node, "Identity", [source])
