"""The bytes of a model and of the files beside it that hold its weights.

Small files are read into memory. If the model and its external data are large together, the files are mapped, so that
weights can be used in place, and must not change from then on.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath

import onnx

from quark.errors import ModelError, UnsupportedTypeError
from quark.onnx import large_tensors
from quark.onnx.input_files import MappedFile, read_file
from quark.onnx.large_tensors import mapped_pieces

MAX_BYTES = 2**31 - 1  # protobuf's own limit for one message
SLOW_BYTES = 64 << 20  # to hash: some hundredths of a second


@dataclass(frozen=True)
class Source:
    """A serialized model. `name` is for messages and reports; `folder` holds its external data, None for a model
    without a file; `real_folder` is the folder of the file that a link points to."""

    data: bytes | memoryview
    name: str
    folder: Path | None = None
    real_folder: Path | None = None


def read_source(source: str | os.PathLike[str] | onnx.ModelProto | bytes, max_held_bytes: int | None = None) -> Source:
    """The model's bytes, read once; every later step uses views of them. A file larger than `max_held_bytes` is mapped;
    the default is the limit for the weights of a large model."""
    if isinstance(source, onnx.ModelProto):
        try:
            return Source(bytes(source.SerializeToString()), source.graph.name or "model")
        except Exception as error:  # protobuf's implementations do not agree on the class
            raise ModelError(
                f"model '{source.graph.name}' cannot be serialized ({error}); more than 2 GB must be saved with "
                "external data (onnx.save_model with save_as_external_data=True) and given as a path"
            ) from error
    if isinstance(source, (bytes, bytearray, memoryview)):
        result = Source(bytes(source), "model")
    elif isinstance(source, (str, os.PathLike)):
        limit = large_tensors.LARGE_MODEL_BYTES if max_held_bytes is None else max_held_bytes
        result = _read_file(Path(source), limit)
    else:
        hint = ". PyTorch modules are for quark.torch.ModelQuantizer" if hasattr(source, "state_dict") else ""
        raise UnsupportedTypeError(
            f"model: expected a path, an onnx.ModelProto or bytes, got {type(source).__name__}{hint}"
        )
    if not result.data:
        raise ModelError(f"'{result.name}' is empty (0 bytes). Expected an ONNX model")
    return result


def _read_file(path: Path, max_held_bytes: int) -> Source:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            names: list[str] = []
            with suppress(OSError):
                names = sorted(file.name for file in path.glob("*.onnx"))
            inside = f", such as {', '.join(names[:3])}" if names else "; there is none"
            raise ModelError(f"'{path}' is a folder. Expected the ONNX file inside it{inside}")
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"'{path}' is a device or pipe. Expected an ONNX file")
        if status.st_size > MAX_BYTES:
            raise ModelError(
                f"'{path}' has {status.st_size} bytes, and one ONNX file holds at most {MAX_BYTES}: save the model "
                "with external data"
            )
        is_large = status.st_size > max_held_bytes
        data = memoryview(MappedFile.open(path.resolve())) if is_large else read_file(path)
    except FileNotFoundError as error:
        raise ModelError(f"no such file: '{path}'. Expected an ONNX model") from error
    except OSError as error:
        raise ModelError(f"cannot read '{path}': {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{str(path)!r} is not a path: {error}") from error
    return Source(data, path.name, path.parent.resolve(), path.resolve().parent)


class Digest:
    """The hash of a model and its external data, as `quark.account.FileFacts` defines it: SHA-256 of the model's bytes
    followed by the SHA-256 digests of its external files.

    Hashing a gigabyte takes about a second. If `is_slow`, a thread does it while the model is quantized, and is joined
    when the hash is needed. Files are hashed one after the other: a second thread would compete with the quantization.
    """

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
        """The hash, as soon as it is known. Raises ModelError if a file changed before all of it was read."""
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


@dataclass(eq=False)
class ExternalData:
    """The files beside one model, opened once each.

    A model may come from anywhere, and its external data names files. Only files in the model's own folder, or below
    it, are opened: no absolute path, no `..`, no link that leads out (except to the folder of the file that the model
    itself is a link to). A tensor must be inside its file, and as long as its shape says.
    """

    source: Source
    files: dict[Path, memoryview] = field(default_factory=dict)
    _paths: dict[str, Path] = field(default_factory=dict)  # by their locations in the model

    @property
    def bytes(self) -> int:
        return sum(len(view) for view in self.files.values())

    @property
    def mapped(self) -> tuple[MappedFile, ...]:
        """The mapped files, including the model's own. They are read later on, and must not change."""
        views = (memoryview(self.source.data), *self.files.values())
        return tuple(view.obj for view in views if isinstance(view.obj, MappedFile))

    def open(self, tensors: Iterable[onnx.TensorProto]) -> None:
        """Open the files of all external tensors of the model. Raises ModelError if one is missing or not safe."""
        names: dict[Path, str] = {}
        for tensor in tensors:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            names.setdefault(self._safe_path(tensor.name, entries.get("location", "")), tensor.name)
        try:
            total = len(self.source.data) + sum(path.stat().st_size for path in names if path.is_file())
        except OSError as error:
            raise ModelError(f"'{self.source.name}': its external data cannot be read: {error}") from error
        for path, name in names.items():
            if not path.is_file():
                raise self._error(name, path, "is not there: external data belongs next to the model")
            try:
                # an empty file cannot be mapped
                is_held = total <= large_tensors.LARGE_MODEL_BYTES or path.stat().st_size == 0
                self.files[path] = memoryview(read_file(path) if is_held else MappedFile.open(path))
            except OSError as error:
                raise self._error(name, path, f"cannot be read: {error.strerror or error}") from error

    def digest(self) -> Digest:
        """The hash of the model's bytes, and of the files in the order of their names."""
        files = [self.files[path] for path in sorted(self.files)]
        return Digest(self.source.data, files, is_slow=len(self.source.data) + self.bytes >= SLOW_BYTES)

    def view(self, tensor: onnx.TensorProto, expected_bytes: int) -> memoryview:
        """The bytes of an external tensor whose file was opened. Raises ModelError if they are not inside it."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        path = self._paths[entries.get("location", "")]
        view = self.files[path]
        offset = self._number(tensor.name, path, "offset", entries.get("offset", "0"))
        length = self._number(tensor.name, path, "length", entries.get("length", str(expected_bytes)))
        if length != expected_bytes:
            raise self._error(tensor.name, path, f"has length {length}, and its shape and type need {expected_bytes}")
        if offset + length > len(view):
            raise self._error(
                tensor.name, path, f"lies at bytes {offset} to {offset + length} of a file of {len(view)} bytes"
            )
        return view[offset : offset + length]

    def _safe_path(self, tensor: str, location: str) -> Path:
        if location in self._paths:
            return self._paths[location]
        if self.source.folder is None:
            raise ModelError(
                f"'{self.source.name}': tensor '{tensor}' is stored outside the model, in '{location}', and a model "
                "that is not a file has no folder. Give the path, or load with onnx.load(..., load_external_data=True)"
            )
        parts = PureWindowsPath(location)  # handles both kinds of separators, and drives
        if not location or location.startswith(("/", "\\")) or parts.drive or ".." in parts.parts or "\0" in location:
            raise self._error(tensor, location, "must be a path inside the model's folder, without '..'")
        try:
            path = (self.source.folder / location).resolve()
            path.is_file()
        except (OSError, RuntimeError) as error:  # the name is too long, or links form a cycle
            raise self._error(
                tensor, location, f"is not a path: {getattr(error, 'strerror', None) or error}"
            ) from error
        # in a store of files that are used through links, the model and its data are side by side
        allowed = (self.source.folder, self.source.real_folder or self.source.folder)
        if not any(path.is_relative_to(folder) for folder in allowed):
            raise self._error(tensor, location, f"is a link that leads out of the model's folder, to '{path}'")
        self._paths[location] = path
        return path

    def _number(self, tensor: str, path: Path, key: str, text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 19:
            raise self._error(tensor, path, f"has {key} '{text}', expected a number of bytes")
        return int(text)

    def _error(self, tensor: str, path: Path | str, what: str) -> ModelError:
        return ModelError(f"'{self.source.name}': external data of tensor '{tensor}' in '{path}' {what}")
