"""Weights too large to be held in memory: read, computed and written piece by piece.

A large weight lies in a mapped file (`MappedTensor`), or is computed when it is wanted (`ComputedTensor`). `pieces`, or
`byte_pieces` for the bytes as a file holds them, goes through all of it with some megabytes in memory at a time. It
copies them from the file instead of using the mapping, because another program may cut the file off; see `input_files`.
`numpy()` is a view of the mapping. Its pages count as memory of this process once they were read; `note_read` keeps
those of the last few weights.

Of a model with at most `LARGE_MODEL_BYTES` of weights, everything is read and computed at once and kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.input_files import MappedFile

Array = NDArray[Any]

LARGE_MODEL_BYTES = 256 << 20  # of weights; beyond, large ones are not held
LARGE_TENSOR_BYTES = 1 << 20
PIECE_BYTES = 16 << 20  # enough for every thread of the native code, and little beside what a runtime takes
READ_BYTES = 1 << 20  # at once, of what goes through no native code

_IS_LARGE = "quark.onnx.large_tensors.is_large"  # in the model's meta store


@dataclass(frozen=True, eq=False)
class Piece:
    """Part of a tensor seen as [outer, along, inner], the middle one being the axis that was asked for."""

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
        """Let go of the memory of its pages. They can be read again."""
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
        """A copy of these bytes of it, as a flat array."""
        return np.frombuffer(self.file.read_bytes(self.offset + start, self.offset + stop), self.raw.dtype)

    def tobytes(self) -> bytes:
        return self.file.read_bytes(self.offset, self.offset + self.nbytes)

    def tofile(self, file: BinaryIO) -> None:
        for piece in byte_pieces(self):
            file.write(piece)


class ComputedTensor(ir.LazyTensor):
    """A tensor of which only the recipe is kept: `compute` gives it as consecutive arrays, every time it is read."""

    def __init__(
        self, compute: Callable[[], Iterator[Array]], dtype: ir.DataType, shape: ir.Shape, name: str | None = None
    ) -> None:
        super().__init__(lambda: _joined(compute(), dtype, shape), dtype, shape, name=name)
        self.compute = compute

    def tofile(self, file: BinaryIO) -> None:
        for piece in byte_pieces(self):
            file.write(piece)


def tensor_of(view: memoryview, dtype: ir.DataType, shape: ir.Shape, name: str) -> ir.TensorProtocol:
    """The tensor whose bytes, as a file holds them, were read or mapped."""
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
    """That the weights are too many to be held twice. The first answer for a model holds, whatever it becomes."""
    if _IS_LARGE not in model.meta:
        model.meta[_IS_LARGE] = weight_bytes(model) > LARGE_MODEL_BYTES
    return bool(model.meta[_IS_LARGE])


def is_large_tensor(tensor: ir.TensorProtocol) -> bool:
    """That it is worth the trouble not to hold it."""
    return tensor.nbytes >= LARGE_TENSOR_BYTES


def weight_bytes(model: ir.Model) -> int:
    """What the constants of the main graph take."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def mapped_files(model: ir.Model) -> list[MappedFile]:
    """The files that constants of the main graph are read from."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return list(dict.fromkeys(tensor.file for tensor in tensors if isinstance(tensor, MappedTensor)))


def whole(tensor: ir.TensorProtocol) -> Array:
    """All of a tensor at once, aligned for native code. What lies in a mapped file is copied: going through all of it
    takes a while, in which another program may cut the file off."""
    if isinstance(tensor, MappedTensor):
        return tensor.read(0, tensor.nbytes).reshape(tensor.raw.shape)
    return np.require(tensor.numpy(), requirements=["C", "A"])


def pieces(tensor: ir.TensorProtocol, axis: int | None = None, multiple: int = 1) -> Iterator[Piece]:
    """All of a tensor in its order. Along `axis` a piece begins at a multiple of `multiple`; without an axis it is a
    run of elements. Pieces of a mapped file are copies, which nobody else has."""
    mapped = tensor if isinstance(tensor, MappedTensor) else None
    array = tensor.numpy() if mapped is None else mapped.raw  # whose pages are not touched
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
    """The bytes of a tensor as a file holds them, in pieces that nobody else has: they may be kept for a while."""
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
    """Whole rows of the first axis, as many as fit into a piece; where one does not, parts of one."""
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
