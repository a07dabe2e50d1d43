"""That every tensor is as large as its shape says, found out before memory is taken for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import onnx
import onnx_ir as ir

from quark.errors import ModelError
from quark.onnx.large_tensors import tensor_of
from quark.onnx.load.external_data import ExternalData
from quark.onnx.load.source import Source
from quark.onnx.load.structure import all_nodes, check_ports, describe
from quark.onnx.load.wire import Carved

MAX_ELEMENTS = 2**40  # a shape beyond is no shape: nobody has the memory
MAX_RANK = 64  # numpy's limit

_TYPED_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
_STRING = onnx.TensorProto.STRING
_TYPES = frozenset(onnx.TensorProto.DataType.values()) - {onnx.TensorProto.UNDEFINED}


def check_tensors(source: Source, carved: Carved, external: ExternalData) -> dict[str, memoryview]:
    """Check every tensor of the model; return the bytes of those initializers that lie outside the message: carved out
    of it, or in external files. A tensor whose size is not what its shape needs is a ModelError that names it."""
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
            _embed(tensor, external.view(tensor, size))
        else:
            _check_content(tensor, size, source)
    _check_declared_shapes(carved.proto, source)
    return views


def check_shapes(proto: onnx.ModelProto, source: Source) -> None:
    """Raise ModelError if a tensor, an input or an output has a type or shape that cannot be."""
    for tensor in (*proto.graph.initializer, *inner_tensors(proto)):
        _bytes_needed(tensor, source)
    _check_declared_shapes(proto, source)


def to_graph(carved: Carved, views: dict[str, memoryview], name: str) -> ir.Model:
    """The model as a graph, whose large initializers are views of the bytes that were read."""
    _check_texts(carved.proto, name)
    try:
        model = ir.serde.deserialize_model(carved.proto)
    except (ir.serde.SerdeError, ValueError, TypeError, NotImplementedError) as error:
        check_ports(carved.proto, name)  # onnx_ir knows no maps
        reason: BaseException = error
        while reason.__cause__ is not None:  # what is around the first cause shows whole messages
            reason = reason.__cause__
        raise ModelError(f"'{name}' cannot be read: {reason}") from error
    _attach(model, views)
    return model


def _check_texts(proto: onnx.ModelProto, name: str) -> None:
    """Raise ModelError if a text in a tensor or an attribute is not UTF-8: protobuf has bytes there."""
    for tensor in (*proto.graph.initializer, *inner_tensors(proto)):
        _check_utf8(tensor.string_data, f"'{name}': tensor '{tensor.name}'")
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        for node in all_nodes(nodes):
            for attribute in node.attribute:
                if attribute.s or attribute.strings:
                    texts = (attribute.s, *attribute.strings)
                    _check_utf8(texts, f"'{name}': attribute '{attribute.name}' of {describe(node)}")


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


def _attach(model: ir.Model, views: dict[str, memoryview]) -> None:
    """Give the initializers their bytes, as views, which know the file that they are mapped from."""
    for name, view in views.items():
        value = model.graph.initializers[name]
        assert value.const_value is not None
        dtype, shape = value.const_value.dtype, ir.Shape(value.const_value.shape.numpy())
        value.const_value = tensor_of(view, dtype, shape, name)


def _embed(tensor: onnx.TensorProto, view: memoryview) -> None:
    """Small tensors inside nodes and subgraphs are taken into the message."""
    tensor.raw_data = bytes(view)
    tensor.data_location = onnx.TensorProto.DEFAULT
    del tensor.external_data[:]


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
    need = _values_needed(tensor)
    if have != need:
        raise ModelError(
            f"'{source.name}': tensor '{tensor.name}' holds {have} values, and shape {list(tensor.dims)} needs {need}. "
            "The file is damaged or was made wrongly: export it again"
        )


def _values_needed(tensor: onnx.TensorProto) -> int:
    count: int = math.prod(tensor.dims)
    if tensor.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128):
        return count * 2
    if tensor.data_type == _STRING:
        return count
    bits = ir.DataType(tensor.data_type).bitwidth
    return -(-count * bits // 8) if bits < 8 else count


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
    """Inputs and outputs: a size of -1 is an old way to say that it is not known, anything below has no meaning."""
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
