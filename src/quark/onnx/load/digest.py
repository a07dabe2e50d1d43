"""The hash of a model and its external data.

Of gigabytes it takes as long as much else that is done with them, so that it is computed beside that, by a thread that
nobody waits for until the hash is wanted.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

from quark.errors import ModelError
from quark.onnx.fingerprint import Fingerprint
from quark.onnx.large_tensors import mapped_pieces


class Digest:
    """SHA-256 of the model's bytes, followed by the fingerprints of its files. `is_slow` lets a thread do it."""

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
                fingerprint = Fingerprint()
                for piece in mapped_pieces(file):
                    fingerprint.update(piece)
                self._state.update(fingerprint.digest())
        except ModelError as error:
            self._error = error
        self._model, self._files = b"", ()
