"""The hash of a model and its external data, as `quark.account.FileFacts` defines it.

Hashing gigabytes takes about a second each, so a thread does it while the model is quantized, and is joined when the
hash is first needed. The files are hashed one after the other: a second thread would compete with the quantization.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

from quark.errors import ModelError
from quark.onnx.large_tensors import mapped_pieces


class Digest:
    """SHA-256 of the model's bytes followed by the SHA-256 digests of its external files. If `is_slow`, a thread
    computes it."""

    def __init__(self, model: bytes | memoryview, files: Sequence[memoryview], *, is_slow: bool) -> None:
        self._model, self._files = model, files
        self._state = hashlib.sha256()
        self._error: ModelError | None = None
        self._thread = threading.Thread(target=self._read, daemon=True) if is_slow else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._read()

    def hexdigest(self) -> str:
        """The hash, once it is there. Raises a ModelError if a file changed before all of it was read."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._state.hexdigest()

    def _read(self) -> None:
        try:
            for piece in mapped_pieces(self._model):
                self._state.update(piece)
            for file in self._files:
                external = hashlib.sha256()
                for piece in mapped_pieces(file):
                    external.update(piece)
                self._state.update(external.digest())
        except ModelError as error:
            self._error = error
        self._model, self._files = b"", ()
