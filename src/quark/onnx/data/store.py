"""Samples kept for reading again: the first in memory, the rest in an anonymous temporary file.

Data are read from the user once, whatever they come from: a generator cannot be rewound, a loader that shuffles gives
something else the second time, and decoding an image costs as much as running a small network on it.
"""

from __future__ import annotations

import tempfile
import threading
from typing import IO, Any

import numpy as np

from quark.errors import OutputError
from quark.onnx.data.check_sample import Sample

MEMORY_BYTES = 2 << 20


class SampleStore:
    """A list of samples that does not grow in memory beyond `memory_bytes`. Reading is safe from several threads."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._left = memory_bytes
        self._entries: list[Sample | list[tuple[str, np.dtype[Any], tuple[int, ...], int]]] = []
        self._file: IO[bytes] | None = None
        self._end = 0
        self._lock = threading.Lock()

    def append(self, sample: Sample) -> None:
        size = sum(array.nbytes for array in sample.values())
        if size <= self._left:
            self._left -= size
            self._entries.append({name: array.copy() for name, array in sample.items()})  # a reader may reuse its own
            return
        self._left = 0
        try:
            self._entries.append(self._written(sample))
        except OSError as error:
            raise OutputError(
                f"{len(self)} samples are read, and there is no room for more in the folder for temporary files: "
                f"{error.strerror or error}; set TMPDIR to another disk, or give fewer samples"
            ) from error

    def _written(self, sample: Sample) -> list[tuple[str, np.dtype[Any], tuple[int, ...], int]]:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="quark-samples-")  # noqa: SIM115 - lives as long as the store
        entry = []
        for name, array in sample.items():
            entry.append((name, array.dtype, array.shape, self._end))
            self._file.seek(self._end)
            self._end += self._file.write(np.ascontiguousarray(array).tobytes())
        self._file.flush()  # a full disk is noticed here, not when they are read
        return entry

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Sample:
        entry = self._entries[index]
        if isinstance(entry, dict):
            return dict(entry)
        return {name: self._read(dtype, shape, start) for name, dtype, shape, start in entry}

    def _read(self, dtype: np.dtype[Any], shape: tuple[int, ...], start: int) -> Any:
        array = np.empty(shape, dtype)
        assert self._file is not None
        with self._lock:
            self._file.seek(start)
            content = self._file.read(array.nbytes)
        return np.frombuffer(content, dtype).reshape(shape)

    def close(self) -> None:
        self._entries.clear()
        if self._file is not None:
            self._file.close()
            self._file = None
