"""A file whose SHA-256 is computed while it is written, by another thread: hashing can take longer than writing."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import BinaryIO

import onnx_ir as ir

from quark.onnx.large_tensors import byte_pieces

MAX_PENDING = 2  # pieces that wait to be hashed, and are in memory
WRITE_BYTES = 1 << 18  # at once: Linux takes half the time for what it takes for larger writes


class HashedFile:
    """A context manager around an open file, which it leaves open. What was handed to `write` must not change."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._state = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()

    def write(self, data: bytes | memoryview) -> None:
        """Write, and take into the hash."""
        if len(self._pending) >= MAX_PENDING:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(self._state.update, data))
        view = memoryview(data)
        for start in range(0, len(view), WRITE_BYTES):
            self._file.write(view[start : start + WRITE_BYTES])

    def write_tensor(self, tensor: ir.TensorProtocol) -> None:
        """The bytes of a tensor, piece by piece."""
        for piece in byte_pieces(tensor):
            self.write(piece)

    def fill(self, multiple: int) -> int:
        """Zeros up to the next multiple; the position."""
        self.write(b"\0" * (-self._file.tell() % multiple))
        return self._file.tell()

    @property
    def size(self) -> int:
        return self._file.tell()

    def digest(self) -> bytes:
        """SHA-256 of everything written so far."""
        while self._pending:
            self._pending.popleft().result()
        return self._state.digest()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=error is not None)
