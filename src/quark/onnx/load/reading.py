"""Build a graph with its weights from a parsed message, and read files that are inspected but not run.

Every tensor is checked to be as large as its shape says before memory is allocated for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from quark.errors import ModelError
from quark.onnx.input_files import WatchedFile
from quark.onnx.large_tensors import tensor_of
from quark.onnx.load.normalize import check_functions
from quark.onnx.load.source import ExternalData, Source, read_source
from quark.onnx.load.structure import all_nodes, check_ports, check_structure, describe
from quark.onnx.load.wire import Carved, carve

MAX_HELD_BYTES = 64 << 20  # size up to which a file that is read in part is held in memory; a larger one is mapped
MAX_ELEMENTS = 2**40  # more than any memory can hold
MAX_RANK = 64  # numpy's limit

_TYPED_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
_STRING = onnx.TensorProto.STRING
_TYPES = frozenset(onnx.TensorProto.DataType.values()) - {onnx.TensorProto.UNDEFINED}


def read_proto(path: Path) -> onnx.ModelProto:
    """The message of a file, without the bytes of its large weights. External data is not opened.

    Raises ModelError if the file is not an ONNX model, or exceeds the limits on what a file may hold.
    """
    read = read_source(path, MAX_HELD_BYTES)
    proto = carve(read).proto
    for tensor in (*proto.graph.initializer, *inner_tensors(proto)):
        _bytes_needed(tensor, read)
    _check_declared_shapes(proto, read)
    return proto


def read_whole(path: Path) -> ir.Model:
    """The graph of a file with all its weights, also those in external files, and otherwise unchanged.

    Raises ModelError if the file is not an ONNX model, or a weight is missing.
    """
    read = read_source(path)
    carved = carve(read)
    check_structure(carved.proto, read.name)
    views = check_tensors(read, carved, ExternalData(read))
    return to_graph(carved, views, read.name)


def external_names(proto: onnx.ModelProto) -> list[str]:
    """The files that a model names for its weights, in the order in which they first occur."""
    tensors = (*proto.graph.initializer, *inner_tensors(proto))
    entries = (entry for tensor in tensors for entry in tensor.external_data if entry.key == "location")
    return list(dict.fromkeys(entry.value for entry in entries))


def watch_external_data(path: Path) -> tuple[WatchedFile, ...]:
    """Check a file before its path is passed to ONNX Runtime, and return the files beside it that the runtime maps.

    Most versions of the runtime inline functions without any limit, and its messages name no output and no file. Raises
    ModelError if the file is not an ONNX model, or one that cannot be run here. The runtime itself reports missing
    external data.
    """
    proto = read_proto(path)
    check_functions(proto, path.name)
    check_ports(proto, path.name)
    files = [path.parent / name for name in external_names(proto)]
    for file in files:
        if os.path.exists(file) and not os.path.isfile(file):  # unlike Path's, these return False for invalid names
            raise ModelError(f"'{path.name}': its external data '{file}' is not a regular file")
    return tuple(WatchedFile.of(file, file.stat()) for file in files if os.path.isfile(file))


def check_tensors(source: Source, carved: Carved, external: ExternalData) -> dict[str, memoryview]:
    """Check every tensor of the model; return the bytes of the initializers that are outside the message: carved out of
    it, or in external files. Small external tensors inside nodes and subgraphs are moved into the message.

    Raises ModelError, naming the tensor, if its size does not match its shape.
    """
    views: dict[str, memoryview] = {}
    tensors = (*carved.proto.graph.initializer, *inner_tensors(carved.proto))
    external.open(tensor for tensor in tensors if tensor.data_location == onnx.TensorProto.EXTERNAL)
    for tensor in carved.proto.graph.initializer:
        raw = carved.raw.get(tensor.name)
        size = _bytes_needed(tensor, source)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            views[tensor.name] = external.view(tensor, size)
        elif raw is not None:
            _check_bytes(tensor, len(raw), size, source)
            views[tensor.name] = raw
        else:
            _check_content(tensor, size, source)
    for tensor in inner_tensors(carved.proto):
        size = _bytes_needed(tensor, source)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.raw_data = bytes(external.view(tensor, size))
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
        else:
            _check_content(tensor, size, source)
    _check_declared_shapes(carved.proto, source)
    return views


def to_graph(carved: Carved, views: dict[str, memoryview], name: str) -> ir.Model:
    """The model as a graph, whose large initializers are views of the bytes that were read.

    Raises ModelError if a text in a tensor or an attribute is not UTF-8: protobuf has bytes there.
    """
    for tensor in (*carved.proto.graph.initializer, *inner_tensors(carved.proto)):
        _check_utf8(tensor.string_data, f"'{name}': tensor '{tensor.name}'")
    for nodes in (carved.proto.graph.node, *(function.node for function in carved.proto.functions)):
        for node in all_nodes(nodes):
            for attribute in node.attribute:
                if attribute.s or attribute.strings:
                    texts = (attribute.s, *attribute.strings)
                    _check_utf8(texts, f"'{name}': attribute '{attribute.name}' of {describe(node)}")
    try:
        model = ir.serde.deserialize_model(carved.proto)
    except (ir.serde.SerdeError, ValueError, TypeError, NotImplementedError) as error:
        check_ports(carved.proto, name)  # onnx_ir does not support maps
        reason: BaseException = error
        while reason.__cause__ is not None:  # errors around the first cause quote whole messages
            reason = reason.__cause__
        raise ModelError(f"'{name}' cannot be read: {reason}") from error
    for key, view in views.items():
        value = model.graph.initializers[key]
        assert value.const_value is not None
        dtype, shape = value.const_value.dtype, ir.Shape(value.const_value.shape.numpy())
        value.const_value = tensor_of(view, dtype, shape, key)
    return model


def _check_utf8(texts: Iterable[bytes], label: str) -> None:
    for text in texts:
        if not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError as error:
                raise ModelError(
                    f"{label} holds the text {text[:20]!r}, which is not UTF-8 as ONNX has it. Export the model with "
                    "UTF-8 texts"
                ) from error


def _bytes_needed(tensor: onnx.TensorProto, source: Source) -> int:
    label = f"'{source.name}': tensor '{tensor.name}'"
    if tensor.data_type not in _TYPES:
        raise ModelError(f"{label} has data type {tensor.data_type}, which ONNX does not define")
    if len(tensor.dims) > MAX_RANK:
        raise ModelError(f"{label} has {len(tensor.dims)} dimensions: expected at most {MAX_RANK}")
    dims: list[int] = list(tensor.dims)
    if any(size < 0 for size in dims) or math.prod(dims) > MAX_ELEMENTS:
        raise ModelError(f"{label} has shape {dims}: expected sizes from 0 on, and at most {MAX_ELEMENTS} elements")
    if tensor.data_type == _STRING:
        return 0
    return -(-math.prod(dims) * ir.DataType(tensor.data_type).bitwidth // 8)


def _check_bytes(tensor: onnx.TensorProto, have: int, need: int, source: Source) -> None:
    if have != need:
        kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        raise ModelError(
            f"'{source.name}': tensor '{tensor.name}' holds {have} bytes, and shape {list(tensor.dims)} of {kind} "
            f"needs {need}. The file is damaged or was made wrongly: export it again"
        )


def _check_content(tensor: onnx.TensorProto, size: int, source: Source) -> None:
    if tensor.HasField("raw_data"):
        _check_bytes(tensor, len(tensor.raw_data), size, source)
        return
    have = sum(len(getattr(tensor, name)) for name in _TYPED_FIELDS)
    need = math.prod(tensor.dims)
    if tensor.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128):
        need *= 2
    elif tensor.data_type != _STRING and (bits := ir.DataType(tensor.data_type).bitwidth) < 8:
        need = -(-need * bits // 8)
    if have != need:
        raise ModelError(
            f"'{source.name}': tensor '{tensor.name}' holds {have} values, and shape {list(tensor.dims)} needs {need}. "
            "The file is damaged or was made wrongly: export it again"
        )


def inner_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Tensors in attributes, subgraphs and functions: all but the main graph's initializers."""
    graphs: list[onnx.GraphProto | onnx.FunctionProto] = [proto.graph, *proto.functions]
    while graphs:
        graph = graphs.pop()
        if isinstance(graph, onnx.GraphProto) and graph is not proto.graph:
            yield from graph.initializer
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
                graphs += [attribute.g] if attribute.HasField("g") else []
                graphs += attribute.graphs


def _check_declared_shapes(proto: onnx.ModelProto, source: Source) -> None:
    """Check the declared inputs and outputs. A size of -1 is an old way to say that it is unknown; it is removed."""
    for info in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        if not info.type.HasField("tensor_type"):
            continue
        if len(info.type.tensor_type.shape.dim) > MAX_RANK:
            count = len(info.type.tensor_type.shape.dim)
            raise ModelError(
                f"'{source.name}': '{info.name}' is declared with {count} dimensions: expected at most {MAX_RANK}"
            )
        dims = [dim for dim in info.type.tensor_type.shape.dim if dim.HasField("dim_value")]
        sizes = [dim.dim_value for dim in dims]
        if any(size < -1 for size in sizes) or math.prod(abs(size) for size in sizes) > MAX_ELEMENTS:
            raise ModelError(
                f"'{source.name}': '{info.name}' is declared with sizes {sizes}: expected sizes from 0 on, and at most "
                f"{MAX_ELEMENTS} elements"
            )
        for dim in dims:
            if dim.dim_value == -1:
                dim.ClearField("dim_value")
