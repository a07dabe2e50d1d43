"""Weights too large to be held in memory: read, computed and written piece by piece.

A large weight lies in a mapped file (`MappedTensor`), or is computed when it is wanted (`ComputedTensor`). Whoever
reads all of one goes through `pieces`, or `byte_pieces` for what a file holds of it, and has some megabytes of it at a
time. A page of a mapped file that was read counts as memory of this process until it is let go of: the iterators do
that behind them; of weights that were read as a whole, `note_read` keeps the last few.

Small models are none the wiser: below `LARGE_MODEL_BYTES` of weights everything is computed at once and kept.
"""

from __future__ import annotations

import functools
import math
import mmap
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]

LARGE_MODEL_BYTES = 256 << 20  # of weights; beyond, large ones are not held
LARGE_TENSOR_BYTES = 1 << 20
PIECE_BYTES = 16 << 20  # enough for every thread of the native code, and little beside what a runtime takes

_RECENT_BYTES = 128 << 20  # of weights read as a whole that stay mapped
_NEIGHBOURHOOD = 1 << 21  # around a page that is read, the system maps up to so many bytes
_IS_LARGE = "quark.onnx.large_tensors.is_large"  # in the model's meta store


@dataclass(frozen=True, eq=False)
class Piece:
    """Part of a tensor seen as [outer, along, inner], the middle one being the axis that was asked for."""

    array: Array
    outer: slice
    along: slice


class MappedFile(mmap.mmap):
    """A file mapped for reading, which knows its path. An empty file cannot be mapped."""

    path = Path()  # stays empty for a file without a name

    @staticmethod
    def open(path: Path) -> MappedFile:
        with path.open("rb") as file:
            result = MappedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
        result.path = path
        return result

    def release(self, start: int, stop: int) -> None:
        """Let go of the pages of these bytes, and of neighbours that came along with them."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = max(0, start - _NEIGHBOURHOOD) // mmap.PAGESIZE * mmap.PAGESIZE
            self.madvise(mmap.MADV_DONTNEED, first, min(len(self), stop + _NEIGHBOURHOOD) - first)

    def note_read(self, start: int, stop: int) -> None:
        """Whoever reads much at once says so: what was read before the last of it is let go of."""
        if (start, stop) in self._recent:
            self._recent.remove((start, stop))
        self._recent.append((start, stop))
        while len(self._recent) > 1 and sum(last - first for first, last in self._recent) > _RECENT_BYTES:
            self.release(*self._recent.popleft())

    @functools.cached_property
    def _recent(self) -> deque[tuple[int, int]]:
        """What was read and is not let go of, the oldest first."""
        return deque()


class MappedTensor(ir.Tensor[Array]):
    """A tensor in a mapped file. The array is a view; its pages come when they are touched."""

    def __init__(self, file: MappedFile, offset: int, dtype: ir.DataType, shape: ir.Shape, name: str | None) -> None:
        dims = tuple(shape.numpy())
        little = np.dtype(dtype.numpy()).newbyteorder("<")
        array = np.frombuffer(file, little, math.prod(dims), offset).reshape(dims)
        super().__init__(array, dtype, name=name)
        self.file, self.offset = file, offset

    @staticmethod
    def of(view: memoryview, dtype: ir.DataType, shape: ir.Shape, name: str) -> MappedTensor:
        """The same of a view into a mapped file."""
        assert isinstance(view.obj, MappedFile)
        offset = _address(view) - _address(memoryview(view.obj)) if len(view) else 0
        return MappedTensor(view.obj, offset, dtype, shape, name)

    def named(self, name: str) -> MappedTensor:
        """The same numbers as another constant."""
        return MappedTensor(self.file, self.offset, self.dtype, ir.Shape(self.shape.numpy()), name)

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Let go of the memory of these bytes. They can be read again."""
        self.file.release(self.offset + start, self.offset + (self.nbytes if stop is None else stop))

    def note_read(self) -> None:
        """Whoever reads the whole array says so: of large weights, the last few stay in memory."""
        if is_large_tensor(self):
            self.file.note_read(self.offset, self.offset + self.nbytes)

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


def pieces(tensor: ir.TensorProtocol, axis: int | None = None, multiple: int = 1) -> Iterator[Piece]:
    """All of a tensor in its order. Along `axis` a piece begins at a multiple of `multiple`; without an axis it is a
    run of elements. What was mapped for a piece is let go of when the next one is asked for."""
    array = tensor.numpy()
    dims = array.shape or (1,)
    if axis is None:
        outer, length, inner = 1, array.size, 1
    else:
        axis %= len(dims)
        outer, length, inner = math.prod(dims[:axis]), dims[axis], math.prod(dims[axis + 1 :])
    whole = array.reshape(outer, length, inner)
    for part, along in _cuts(outer, length, inner * array.itemsize, multiple):
        yield Piece(np.require(whole[part, along], requirements=["C", "A"]), part, along)
        if isinstance(tensor, MappedTensor):
            start = (part.start * length + along.start) * inner * array.itemsize
            tensor.release(start, ((part.stop - 1) * length + along.stop) * inner * array.itemsize)


def byte_pieces(tensor: ir.TensorProtocol) -> Iterator[memoryview | bytes]:
    """The bytes of a tensor as a file holds them, in pieces that nobody else has: they may be kept for a while."""
    if tensor.dtype.bitwidth < 8 or tensor.dtype == ir.DataType.STRING:
        yield tensor.tobytes()  # packed, several in a byte
        return
    for array in tensor.compute() if isinstance(tensor, ComputedTensor) else _copies(tensor):
        little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
        yield little.reshape(-1).view(np.uint8).data


def mapped_pieces(data: bytes | memoryview) -> Iterator[memoryview]:
    """Bytes in pieces; where they are a whole mapped file, its pages are let go of."""
    view = memoryview(data)
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]
        if isinstance(view.obj, MappedFile):
            view.obj.release(start, start + PIECE_BYTES)


def _copies(tensor: ir.TensorProtocol) -> Iterator[Array]:
    """The pieces; copies of what is mapped, since looking at that again would bring its pages back."""
    for piece in pieces(tensor):
        yield piece.array.copy() if isinstance(tensor, MappedTensor) else piece.array


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
