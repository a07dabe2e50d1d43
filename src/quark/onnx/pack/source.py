"""A file as a message with its weights beside it, checked as the loader does it and otherwise as it is."""

from __future__ import annotations

import os

import onnx
import onnx_ir as ir

from quark.errors import ModelError
from quark.onnx.input_files import MappedFile
from quark.onnx.large_tensors import tensor_of
from quark.onnx.load.external_data import ExternalData
from quark.onnx.load.functions import check_functions
from quark.onnx.load.operators import check_forms, opset_versions, shorten_domains
from quark.onnx.load.source import read_source
from quark.onnx.load.structure import check_structure
from quark.onnx.load.tensors import check_tensors
from quark.onnx.load.wire import carve
from quark.onnx.message import Message


def read_message(path: str | os.PathLike[str]) -> tuple[Message, int, tuple[MappedFile, ...]]:
    """The model, its size on the disk, and the files that its weights are still read from, which must not change."""
    read = read_source(path)
    carved = carve(read)
    shorten_domains(carved.proto)
    check_structure(carved.proto, read.name)
    check_functions(carved.proto, read.name)
    check_forms(carved.proto, read.name)
    external = ExternalData(read)
    views = check_tensors(read, carved, external)
    if "" not in opset_versions(carved.proto.opset_import):
        raise ModelError(f"'{read.name}' does not say which opset it is of (opset_import). Export it again")
    weights: dict[str, ir.TensorProtocol] = {}
    for tensor in carved.proto.graph.initializer:
        if tensor.name in views:
            dtype, shape = ir.DataType(tensor.data_type), ir.Shape(list(tensor.dims))
            weights[tensor.name] = tensor_of(views[tensor.name], dtype, shape, tensor.name)
            empty(tensor)
    return Message(carved.proto, weights), len(read.data) + external.bytes, external.mapped


def empty(tensor: onnx.TensorProto) -> None:
    """A tensor whose bytes are elsewhere: with a `raw_data` of length 0, as the writer expects it."""
    for name in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "external_data"):
        tensor.ClearField(name)
    tensor.ClearField("data_location")
    tensor.raw_data = b""
