"""Weights too large to be held in memory: read, computed and written piece by piece.

A large weight is in a mapped file (`MappedTensor`), or computed whenever it is read (`ComputedTensor`). `pieces`, or
`byte_pieces` for the bytes as in a file, goes through all of it with some megabytes in memory at a time. It copies them
from the file instead of using the mapping, because another program may truncate the file; see `input_files`. `numpy()`
is a view of the mapping. Its pages count as memory of this process once they were read; `note_read` keeps those of the
last few weights. New weights of a large model go to a temporary file (`kept`), and a model becomes a protobuf message
without them (`split`).

A model with at most `LARGE_MODEL_BYTES` of weights is read and computed at once, and kept in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from quark.files.output import temporary_file
from quark.onnx.input_files import MappedFile
from quark.text import get_logger

Array = NDArray[Any]

LARGE_MODEL_BYTES = 64 << 20  # models with more weights do not keep large ones in memory
LARGE_TENSOR_BYTES = 1 << 20
PIECE_BYTES = 16 << 20  # enough for every thread of the native code, and little beside what a runtime takes
READ_BYTES = 1 << 20  # at once, of data that no native code processes
MIN_APART_BYTES = 1024  # smaller tensors stay in a message, where shape inference finds them

_IS_LARGE = "quark.onnx.large_tensors.is_large"  # in the model's meta store
_SPILL = "quark.onnx.large_tensors.spill"
_SEGMENT_BYTES = 1 << 30  # of one file and mapping: each mapping takes one of the few file descriptors
_ALIGNMENT = 4096
_MEMORY_INFO = Path("/proc/meminfo")
_GROUP_LIMIT, _GROUP_USE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.stat")
_LOG = get_logger(__name__)


@dataclass(frozen=True, eq=False)
class Piece:
    """Part of a tensor seen as [outer, along, inner], where the middle one is the requested axis."""

    array: Array
    outer: slice
    along: slice


class MappedTensor(ir.Tensor[Array]):
    """A tensor in a mapped file. The array is a view; its pages come when they are touched. Reading it raises a
    ModelError if the file has changed since it was opened."""

    def __init__(self, file: MappedFile, offset: int, dtype: ir.DataType, shape: ir.Shape, name: str | None) -> None:
        dims = tuple(shape.numpy())
        little = np.dtype(dtype.numpy()).newbyteorder("<")
        array = np.frombuffer(file, little, math.prod(dims), offset).reshape(dims)
        super().__init__(array, dtype, name=name)
        self.file, self.offset = file, offset

    def named(self, name: str) -> MappedTensor:
        """The same numbers as another constant."""
        return MappedTensor(self.file, self.offset, self.dtype, ir.Shape(self.shape.numpy()), name)

    def release(self) -> None:
        """Free the memory of its pages. They can be read again."""
        self.file.release(self.offset, self.offset + self.nbytes)

    def note_read(self) -> None:
        """Note that the whole array is read. Of large weights, only the last few stay in memory."""
        if is_large_tensor(self):
            self.file.note_read(self.offset, self.offset + self.nbytes)

    def numpy(self) -> Array:
        self.file.check()
        return super().numpy()

    def __array__(self, dtype: Any = None) -> Array:
        self.file.check()
        return super().__array__(dtype)

    def read(self, start: int, stop: int) -> Array:
        """A copy of the bytes from `start` to `stop`, as a flat array."""
        return np.frombuffer(self.file.read_bytes(self.offset + start, self.offset + stop), self.raw.dtype)

    def tobytes(self) -> bytes:
        return self.file.read_bytes(self.offset, self.offset + self.nbytes)

    def tofile(self, file: BinaryIO) -> None:
        for piece in byte_pieces(self):
            file.write(piece)


class ComputedTensor(ir.LazyTensor):
    """A tensor that `compute` returns as consecutive arrays, every time it is read."""

    def __init__(
        self, compute: Callable[[], Iterator[Array]], dtype: ir.DataType, shape: ir.Shape, name: str | None = None
    ) -> None:
        super().__init__(lambda: _joined(compute(), dtype, shape), dtype, shape, name=name)
        self.compute = compute

    def tofile(self, file: BinaryIO) -> None:
        for piece in byte_pieces(self):
            file.write(piece)


def tensor_of(view: memoryview, dtype: ir.DataType, shape: ir.Shape, name: str) -> ir.TensorProtocol:
    """The tensor with these bytes, which were read from a file or mapped."""
    file, dims = view.obj, tuple(shape.numpy())
    if not isinstance(file, MappedFile):
        if dtype.bitwidth < 8:
            return ir.PackedTensor(np.frombuffer(view, np.uint8), dtype, shape=shape, name=name)
        array = np.frombuffer(view, np.dtype(dtype.numpy()).newbyteorder("<")).reshape(dims)
        return ir.Tensor(array, dtype, name=name)
    start = _address(view) - _address(memoryview(file)) if len(view) else 0
    if dtype.bitwidth >= 8:
        return MappedTensor(file, start, dtype, shape, name)
    stop = start + len(view)

    def read() -> ir.TensorProtocol:
        return ir.PackedTensor(np.frombuffer(file.read_bytes(start, stop), np.uint8), dtype, shape=shape, name=name)

    return ir.LazyTensor(read, dtype, shape, name=name)


def is_large_model(model: ir.Model) -> bool:
    """True if the weights are too large to be in memory twice. The first answer for a model stays, whatever changes."""
    if _IS_LARGE not in model.meta:
        model.meta[_IS_LARGE] = weight_bytes(model) > LARGE_MODEL_BYTES
    return bool(model.meta[_IS_LARGE])


def is_large_tensor(tensor: ir.TensorProtocol) -> bool:
    """True if the tensor is worth keeping out of memory."""
    return tensor.nbytes >= LARGE_TENSOR_BYTES


def weight_bytes(model: ir.Model) -> int:
    """The bytes of all constants of the main graph."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def mapped_files(model: ir.Model) -> list[MappedFile]:
    """The files that constants of the main graph are read from."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return list(dict.fromkeys(tensor.file for tensor in tensors if isinstance(tensor, MappedTensor)))


def whole(tensor: ir.TensorProtocol) -> Array:
    """The whole tensor, aligned for native code. A mapped one is copied: processing all of it takes a while, in which
    another program may truncate the file."""
    if isinstance(tensor, MappedTensor):
        return tensor.read(0, tensor.nbytes).reshape(tensor.raw.shape)
    return np.require(tensor.numpy(), requirements=["C", "A"])


def pieces(tensor: ir.TensorProtocol, axis: int | None = None, multiple: int = 1) -> Iterator[Piece]:
    """All pieces of a tensor in order. Along `axis` a piece begins at a multiple of `multiple`; without an axis it is a
    run of elements. Pieces of a mapped file are copies that nobody else uses."""
    mapped = tensor if isinstance(tensor, MappedTensor) else None
    array = tensor.numpy() if mapped is None else mapped.raw  # its pages are not touched
    dims = array.shape or (1,)
    if axis is None:
        outer, length, inner = 1, array.size, 1
    else:
        axis %= len(dims)
        outer, length, inner = math.prod(dims[:axis]), dims[axis], math.prod(dims[axis + 1 :])
    cube = array.reshape(outer, length, inner)
    for part, along in _cuts(outer, length, inner * array.itemsize, multiple):
        if mapped is None:
            yield Piece(np.require(cube[part, along], requirements=["C", "A"]), part, along)
            continue
        start = (part.start * length + along.start) * inner * array.itemsize
        stop = ((part.stop - 1) * length + along.stop) * inner * array.itemsize
        yield Piece(mapped.read(start, stop).reshape(cube[part, along].shape), part, along)


def byte_pieces(tensor: ir.TensorProtocol) -> Iterator[memoryview | bytes]:
    """The bytes of a tensor as in a file, in pieces that are not shared, so they may be kept for a while."""
    if tensor.dtype.bitwidth < 8 or tensor.dtype == ir.DataType.STRING:
        yield tensor.tobytes()  # packed, several in a byte
        return
    arrays = tensor.compute() if isinstance(tensor, ComputedTensor) else (piece.array for piece in pieces(tensor))
    for array in arrays:
        little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
        yield little.reshape(-1).view(np.uint8).data


def mapped_pieces(data: bytes | memoryview) -> Iterator[memoryview | bytes]:
    """Bytes in pieces; those of a whole mapped file are read from it."""
    view = memoryview(data)
    for start in range(0, len(view), READ_BYTES):
        stop = min(len(view), start + READ_BYTES)
        yield view.obj.read_bytes(start, stop) if isinstance(view.obj, MappedFile) else view[start:stop]


def _cuts(outer: int, length: int, step_bytes: int, multiple: int) -> Iterator[tuple[slice, slice]]:
    """Slices of whole rows of the first axis, as many as fit into a piece; parts of a row if it does not fit."""
    row_bytes = max(1, length * step_bytes)
    if row_bytes <= PIECE_BYTES or length <= multiple:
        rows = max(1, PIECE_BYTES // row_bytes)
        for first in range(0, outer, rows):
            yield slice(first, min(outer, first + rows)), slice(0, length)
        return
    steps = max(1, PIECE_BYTES // (multiple * step_bytes)) * multiple
    for row in range(outer):
        for first in range(0, length, steps):
            yield slice(row, row + 1), slice(first, min(length, first + steps))


def _joined(arrays: Iterator[Array], dtype: ir.DataType, shape: ir.Shape) -> ir.Tensor[Array]:
    dims = tuple(shape.numpy())
    result, done = np.empty(math.prod(dims), dtype.numpy()), 0
    for array in arrays:
        if array.size == result.size:
            result = array
            break
        result[done : done + array.size] = array.reshape(-1)
        done += array.size
    return ir.Tensor(result.reshape(dims), dtype)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


# ---- new weights in temporary files ----


def kept(model: ir.Model, array: Array, name: str) -> ir.TensorProtocol:
    """A tensor with the array for this model. It is in memory unless both the model and the array are large: then it is
    in a mapped file without a name, which the system removes with the process."""
    tensor = ir.Tensor(array, name=name)
    if not is_large_tensor(tensor) or tensor.dtype.bitwidth < 8 or not is_large_model(model):
        return tensor
    try:
        spill: _Spill = model.meta.setdefault(_SPILL, _Spill())
        return spill.put(tensor)
    except OSError as error:
        _LOG.info("'%s' stays in memory, there is no room for it in a temporary file: %s", name, error)
        return tensor


class _Spill:
    """Files of a fixed size, filled one after the other. They are sparse: unused parts take no space."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._mapping: MappedFile | None = None
        self._end = 0

    def put(self, tensor: ir.Tensor[Any]) -> MappedTensor:
        offset = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        if self._file is None or self._mapping is None or offset + tensor.nbytes > len(self._mapping):
            self._file, offset = temporary_file("quark-"), 0
            self._file.truncate(max(_SEGMENT_BYTES, tensor.nbytes))
            self._mapping = MappedFile(self._file.fileno(), 0, access=1)
        self._file.seek(offset)
        for piece in byte_pieces(tensor):
            self._file.write(piece)
        self._file.flush()
        self._end = offset + tensor.nbytes
        return MappedTensor(self._mapping, offset, tensor.dtype, ir.Shape(tensor.shape.numpy()), tensor.name)


# ---- free memory ----


def free_memory() -> int | None:
    """The bytes of memory that this process can still get, on this machine and in its container; None if the system
    does not say. Cached pages of files can be dropped, so they do not count as used."""

    def number(path: Path, name: str) -> int:
        lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
        size = next((words[1] for words in lines if len(words) > 1 and words[0] == name), None)
        if size is None:
            raise ValueError(name)
        return int(size)

    free = []
    with suppress(OSError, ValueError):
        free.append(number(_MEMORY_INFO, "MemAvailable:") * 1024)
    with suppress(OSError, ValueError):  # there is no control group, or its limit is "max"
        free.append(int(_GROUP_LIMIT.read_text(encoding="ascii")) - number(_GROUP_USE, "anon"))
    return min(free, default=None)


# ---- messages without their weights ----


@dataclass(frozen=True, eq=False)
class Message:
    """A model as a protobuf message that lacks the bytes of `weights`, which are by the name of the initializer.

    protobuf copies every tensor, and refuses 2 GB. So large weights stay empty in the message, and are written behind
    it, into it or beside it by the code that needs the bytes.
    """

    proto: onnx.ModelProto
    weights: dict[str, ir.TensorProtocol]

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())

    def apart(self) -> Iterator[tuple[onnx.TensorProto, ir.TensorProtocol]]:
        """The empty tensors of the message in their order, each with its weight."""
        for proto in self.proto.graph.initializer:
            if proto.name in self.weights:
                yield proto, self.weights[proto.name]

    def filled(self) -> onnx.ModelProto:
        """The message with its weights. Each weight is dropped once protobuf has its copy, so this works once."""
        for proto, tensor in list(self.apart()):
            proto.raw_data = tensor.tobytes()
            del self.weights[proto.name]
        return self.proto

    def serialized(self) -> bytes:
        """The bytes of the message with its weights, which stay apart."""
        apart = list(self.apart())
        try:
            for proto, tensor in apart:
                proto.raw_data = tensor.tobytes()
            content: bytes = self.proto.SerializeToString()
        finally:
            for proto, _ in apart:
                proto.raw_data = b""
        return content

    def to_graph(self) -> ir.Model:
        """A model that shares the weights."""
        model = ir.serde.deserialize_model(self.proto)
        for name, tensor in self.weights.items():
            model.graph.initializers[name].const_value = tensor
        return model


def is_sizable(tensor: ir.TensorProtocol) -> bool:
    """True if a tensor is large enough to be kept apart from its message."""
    return tensor.nbytes >= MIN_APART_BYTES and tensor.dtype != ir.DataType.STRING


def split(model: ir.Model, is_apart: Callable[[ir.TensorProtocol], bool] = is_sizable) -> Message:
    """The model as a message, with the weights that satisfy `is_apart` apart. The model does not change."""
    apart = {
        value: value.const_value
        for value in model.graph.initializers.values()
        if value.const_value is not None and is_apart(value.const_value)
    }
    try:
        for value, tensor in apart.items():
            value.const_value = _Empty(tensor)
        proto = ir.serde.serialize_model(model)
    finally:
        for value, tensor in apart.items():
            value.const_value = tensor
    return Message(proto, {str(value.name): tensor for value, tensor in apart.items()})


def refer(proto: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Set an empty tensor of a message to bytes of a file."""
    proto.raw_data = b""
    onnx.external_data_helper.set_external_data(proto, location, offset=offset, length=length)
    proto.ClearField("raw_data")
    proto.data_location = onnx.TensorProto.EXTERNAL


class _Empty(ir.LazyTensor):
    """Type, shape and name of a tensor without its bytes."""

    def __init__(self, like: ir.TensorProtocol) -> None:
        super().__init__(
            lambda: ir.Tensor(np.empty(0, np.uint8)),
            like.dtype,
            ir.Shape(like.shape.numpy()),
            name=like.name,
            doc_string=like.doc_string,
            metadata_props=dict(like.metadata_props),
        )

    def tobytes(self) -> bytes:
        return b""
