"""Read a file as it is: checked as the loader checks it, with neither opset nor operators changed."""

from __future__ import annotations

import os

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveInitializersFromInputsPass

from quark.errors import ModelError
from quark.onnx.graph import infer_shapes
from quark.onnx.input_files import MappedFile
from quark.onnx.large_tensors import Message, tensor_of
from quark.onnx.load.conversions import convert_to_float32, unusual_layer_types
from quark.onnx.load.normalize import check_functions
from quark.onnx.load.reading import check_tensors, to_graph
from quark.onnx.load.source import ExternalData, Source, read_source
from quark.onnx.load.structure import (
    check_forms,
    check_structure,
    declare_standard_opset,
    opset_versions,
    shorten_domains,
)
from quark.onnx.load.wire import Carved, carve
from quark.onnx.prepared_blocks import expand

_SPARSE = (onnx.AttributeProto.SPARSE_TENSOR, onnx.AttributeProto.SPARSE_TENSORS)


def read_graph(source: str | os.PathLike[str] | onnx.ModelProto | bytes) -> ir.Model:
    """Read a model: constants as initializers, a name for every node, and types and shapes as far as ONNX infers them.

    Raises ModelError if the source is not an ONNX model.
    """
    read = read_source(source)
    return graph_of(read, ExternalData(read))


def graph_of(read: Source, external: ExternalData) -> ir.Model:
    """The graph of a model that was read, as `read_graph` returns it."""
    return _graph(*_checked(read, external), read.name)


def computed_graph(read: Source, external: ExternalData) -> tuple[ir.Model, list[str]]:
    """The graph of a float model in the float types in which it is quantized, and remarks: layers of float64 and
    bfloat16, which ONNX Runtime cannot run, compute in float32."""
    carved, views = _checked(read, external)
    kinds = unusual_layer_types(carved.proto)
    model = _graph(carved, views, read.name)
    return model, convert_to_float32(model, kinds, read.name)


def _graph(carved: Carved, views: dict[str, memoryview], name: str) -> ir.Model:
    model = to_graph(carved, views, name)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    RemoveInitializersFromInputsPass()(model)
    for node in model.graph:
        if not node.name:
            node.name = next((value.name for value in node.outputs if value.name), node.op_type)
    expand(model)
    model.graph.sort()  # other tools leave that to the runtime
    infer_shapes(model)
    return model


def read_message(
    path: str | os.PathLike[str] | onnx.ModelProto,
) -> tuple[Message, int, tuple[MappedFile, ...]]:
    """Read a model as a message. Also return its size on disk, and the files that its weights are still read from,
    which must not change."""
    read = read_source(path)
    external = ExternalData(read)
    carved, views = _checked(read, external)
    weights: dict[str, ir.TensorProtocol] = {}
    for tensor in carved.proto.graph.initializer:
        if tensor.name in views:
            dtype, shape = ir.DataType(tensor.data_type), ir.Shape(list(tensor.dims))
            weights[tensor.name] = tensor_of(views[tensor.name], dtype, shape, tensor.name)
            empty(tensor)
    return Message(carved.proto, weights), len(read.data) + external.bytes, external.mapped


def bare_graph(proto: onnx.ModelProto) -> ir.Model:
    """The graph of a message without functions, declared types and documentation, as far as quantizers need it.

    The order of the nodes stays. Raises ModelError if the graph is malformed.
    """
    bare = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    bare.graph.node.extend(proto.graph.node)
    bare.graph.initializer.extend(proto.graph.initializer)
    bare.graph.input.extend(onnx.ValueInfoProto(name=info.name) for info in proto.graph.input)
    bare.graph.output.extend(onnx.ValueInfoProto(name=info.name) for info in proto.graph.output)
    for node in bare.graph.node:  # onnx_ir reads no sparse tensors, and no quantizer is one
        kept = [attr for attr in node.attribute if attr.type not in _SPARSE]
        if len(kept) < len(node.attribute):
            del node.attribute[:]
            node.attribute.extend(kept)
    try:
        return ir.serde.deserialize_model(bare)
    except (ir.serde.SerdeError, ValueError, TypeError, LookupError, NotImplementedError) as error:
        reason: BaseException = error
        while reason.__cause__ is not None:  # errors around the first cause quote whole messages
            reason = reason.__cause__
        raise ModelError(f"the graph cannot be read: {reason}") from error


def empty(tensor: onnx.TensorProto) -> None:
    """Drop the content of a tensor whose bytes are elsewhere. The writer expects a `raw_data` of length 0."""
    for name in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "external_data"):
        tensor.ClearField(name)
    tensor.ClearField("data_location")
    tensor.raw_data = b""


def _checked(read: Source, external: ExternalData) -> tuple[Carved, dict[str, memoryview]]:
    """The message without its large tensors, and views of these by name."""
    carved = carve(read)
    shorten_domains(carved.proto)
    declare_standard_opset(carved.proto)
    check_structure(carved.proto, read.name)
    check_functions(carved.proto, read.name)
    check_forms(carved.proto, read.name)
    views = check_tensors(read, carved, external)
    if "" not in opset_versions(carved.proto.opset_import):
        raise ModelError(f"'{read.name}' does not declare its opset (opset_import). Export it again")
    return carved, views
