"""Operators of com.amd.quark in a file: their earlier names, standard operators instead of them, and shapes.

    convert_custom_ops          renames operators, for instance to the names that Vitis AI gave them
    convert_customqdq_to_qdq    QuantizeLinear and DequantizeLinear of com.microsoft, where their types allow it
    custom_ops_infer_shapes     declares the types and shapes of what the operators compute

All of them change the model that they are given, and return it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference

from quark.errors import ModelError
from quark.ops.onnx_nodes import all_nodes, describe, subgraphs
from quark.ops.schema import (
    BFP_QUANTIZE_DEQUANTIZE,
    DOMAIN,
    EXTENDED_AXIS,
    EXTENDED_DEQUANTIZE_LINEAR,
    EXTENDED_QUANTIZE_LINEAR,
    FLOAT_SCALE_QUANTIZE_DEQUANTIZE,
    MX_QUANTIZE_DEQUANTIZE,
    VERSION,
)
from quark.text import get_logger

VITIS_DOMAIN = "com.vai.quantize"
EXTENDED_INSTANCE_NORMALIZATION, EXTENDED_LSTM = "ExtendedInstanceNormalization", "ExtendedLSTM"
VITIS_NAMES: Mapping[str, str] = MappingProxyType(
    {
        EXTENDED_QUANTIZE_LINEAR.name: "VitisQuantizeLinear",
        EXTENDED_DEQUANTIZE_LINEAR.name: "VitisDequantizeLinear",
        EXTENDED_INSTANCE_NORMALIZATION: "VitisInstanceNormalization",
        EXTENDED_LSTM: "VitisLSTM",
        BFP_QUANTIZE_DEQUANTIZE.name: "BFPFixNeuron",
        MX_QUANTIZE_DEQUANTIZE.name: "MXFixNeuron",
    }
)
MICROSOFT = "com.microsoft"  # its quantizers take 16 bits in every opset
_STANDARD = {
    EXTENDED_QUANTIZE_LINEAR.name: "QuantizeLinear",
    EXTENDED_DEQUANTIZE_LINEAR.name: "DequantizeLinear",
}
_INTEGERS = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16, TensorProto.INT32)
# Stand-ins for shape inference: ordinary operators with the same types and shapes.
_STAND_INS = {
    **_STANDARD,
    BFP_QUANTIZE_DEQUANTIZE.name: "Identity",
    MX_QUANTIZE_DEQUANTIZE.name: "Identity",
    FLOAT_SCALE_QUANTIZE_DEQUANTIZE.name: "Identity",
    EXTENDED_INSTANCE_NORMALIZATION: "InstanceNormalization",
    EXTENDED_LSTM: "LSTM",
}
_STAND_IN_ATTRIBUTES = {"LSTM": ("direction", "hidden_size", "layout"), "InstanceNormalization": ("epsilon",)}
_LARGE_BYTES = 1024  # beyond this, an initializer is a weight, which inference does not need

_log = get_logger(__name__)


def is_custom_quantizer(node: NodeProto) -> bool:
    """True for ExtendedQuantizeLinear and ExtendedDequantizeLinear."""
    return node.op_type in _STANDARD and node.domain == DOMAIN


def is_custom_operator(node: NodeProto) -> bool:
    """True for an operator of com.amd.quark, also one that only AMD Quark's library has."""
    return node.op_type in VITIS_NAMES and node.domain == DOMAIN


def require(is_present: bool, model: ModelProto | str, what: str) -> None:
    """Raise ModelError if a model, given itself or by its name, has nothing of what is to be converted."""
    if not is_present:
        name = model if isinstance(model, str) else model.graph.name or "model"
        raise ModelError(f"'{name}' has no {what}: there is nothing to convert")


# ---- names ----


def convert_custom_ops(model: ModelProto, domain: str, mapping: Mapping[str, str]) -> ModelProto:
    """Rename operators by a mapping of old names to new ones, which are in `domain`. Functions are renamed with them.

    Only operators of custom domains are renamed: one of the standard that happens to have the same name stays.
    """
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    count = 0
    for node in (node for body in bodies for node in all_nodes(body)):
        if node.op_type in mapping and node.domain in (DOMAIN, VITIS_DOMAIN):
            node.op_type, node.domain = mapping[node.op_type], domain
            count += 1
    for function in model.functions:
        if function.name in mapping and function.domain in (DOMAIN, VITIS_DOMAIN):
            function.name, function.domain = mapping[function.name], domain
            count += 1
    if count:
        import_domain(model, domain, VERSION)
        for other in {DOMAIN, VITIS_DOMAIN} - {domain}:
            drop_import(model, other)
    return model


# ---- standard quantizers ----


def convert_customqdq_to_qdq(model: ModelProto) -> ModelProto:
    """Replace quantizers of com.amd.quark by those of com.microsoft, if their codes are integers of 8 or 16 bits.

    DequantizeLinear also takes int32 with zero point 0. Others stay, and the log names them.
    """
    count = 0
    for _, node, known in list(custom_quantizers(model.graph)):
        reason = _obstacle(node, known)
        if reason:
            _log.warning("%s stays: %s", describe(node), reason)
            continue
        if all(attribute.name != EXTENDED_AXIS.name for attribute in node.attribute):  # their defaults differ
            node.attribute.append(helper.make_attribute(EXTENDED_AXIS.name, EXTENDED_AXIS.default))
        node.op_type, node.domain = _STANDARD[node.op_type], MICROSOFT
        count += 1
    if count:
        import_domain(model, MICROSOFT, 1)
        drop_unused(model)
    return model


def _obstacle(node: NodeProto, known: Mapping[str, TensorProto]) -> str:
    """The reason why a quantizer has no standard form; empty if it has one."""
    zero_point = known.get(node.input[2]) if len(node.input) > 2 else None
    if zero_point is None:
        return "its zero point is not a constant, so the type of its codes is unknown"
    name = TensorProto.DataType.Name(zero_point.data_type).lower()
    if zero_point.data_type not in _INTEGERS:
        return f"its codes are of {name}"
    if zero_point.data_type != TensorProto.INT32:
        return ""
    if node.op_type == EXTENDED_QUANTIZE_LINEAR.name:
        return "QuantizeLinear has no int32"
    return "DequantizeLinear of int32 has no zero point" if numpy_helper.to_array(zero_point).any() else ""


Place = tuple[GraphProto, NodeProto, Mapping[str, TensorProto]]


def custom_quantizers(graph: GraphProto, outer: Mapping[str, TensorProto] = MappingProxyType({})) -> Iterator[Place]:
    """The Extended* quantizers of a graph and its subgraphs, each with its graph and the constants that it can see."""
    known = {**outer, **{tensor.name: tensor for tensor in graph.initializer}}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            known[node.output[0]] = node.attribute[0].t
        if is_custom_quantizer(node):
            yield graph, node, known
        for inner in subgraphs(node):
            yield from custom_quantizers(inner, known)


# ---- shapes ----


def custom_ops_infer_shapes(model: ModelProto) -> ModelProto:
    """Declare types and shapes of all tensors that inference finds, through operators of com.amd.quark as well."""
    if not any(is_custom_operator(node) or node.domain == MICROSOFT for node in all_nodes(model.graph.node)):
        return model
    declared = {info.name for info in (*model.graph.input, *model.graph.output, *model.graph.value_info)}
    added = [info for info in _inferred(model).graph.value_info if info.name not in declared]
    model.graph.value_info.extend(added)
    return model


def ranks_of(model: ModelProto) -> dict[str, int]:
    """The ranks of the tensors of the main graph, as far as they are known."""
    graph = _inferred(model).graph
    infos = (*graph.input, *graph.output, *graph.value_info)
    ranks = {
        info.name: len(info.type.tensor_type.shape.dim) for info in infos if info.type.tensor_type.HasField("shape")
    }
    return ranks | {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}


def _inferred(model: ModelProto) -> ModelProto:
    """A copy with all types that ONNX infers, in which ordinary operators replace ours. Large weights are left out."""
    large = [tensor for tensor in model.graph.initializer if len(tensor.raw_data) > _LARGE_BYTES]
    content = [tensor.raw_data for tensor in large]
    twin = ModelProto()
    try:
        for tensor in large:
            tensor.ClearField("raw_data")
        twin.CopyFrom(model)
    finally:
        for tensor, data in zip(large, content, strict=True):
            tensor.raw_data = data
    del twin.functions[:]
    for node in all_nodes(twin.graph.node):
        if is_custom_operator(node) or (node.domain == MICROSOFT and node.op_type in _STANDARD.values()):
            node.op_type, node.domain = _STAND_INS.get(node.op_type, node.op_type), ""
            kept = [attr for attr in node.attribute if attr.name in _STAND_IN_ATTRIBUTES.get(node.op_type, ())]
            del node.attribute[:]
            node.attribute.extend(kept)
    try:
        return shape_inference.infer_shapes(twin)
    except (shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        raise ModelError(f"ONNX cannot infer the shapes of '{model.graph.name}': {error}") from error


# ---- the file around the graph ----


def import_domain(model: ModelProto, domain: str, version: int) -> None:
    """Declare the version of a domain, unless the model does."""
    if all(entry.domain != domain for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(domain, version))


def drop_import(model: ModelProto, domain: str) -> None:
    """Remove the declaration of a domain that no node and no function uses any more."""
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    used = {node.domain for body in bodies for node in all_nodes(body)} | {
        function.domain for function in model.functions
    }
    if domain not in used:
        for index in reversed([i for i, entry in enumerate(model.opset_import) if entry.domain == domain]):
            del model.opset_import[index]


def drop_unused(model: ModelProto) -> None:
    """Remove functions of com.amd.quark that nothing calls, and initializers of the main graph that nothing reads."""
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    nodes = [node for body in bodies for node in all_nodes(body)]
    called = {(node.domain, node.op_type) for node in nodes}
    for index in reversed(range(len(model.functions))):
        function = model.functions[index]
        if function.domain == DOMAIN and (function.domain, function.name) not in called:
            del model.functions[index]
    drop_import(model, DOMAIN)
    read = {name for node in nodes for name in node.input} | {info.name for info in model.graph.output}
    read |= {info.name for node in nodes for graph in subgraphs(node) for info in graph.output}
    read |= {info.name for info in model.graph.input}
    for index in reversed(range(len(model.graph.initializer))):
        if model.graph.initializer[index].name not in read:
            del model.graph.initializer[index]
