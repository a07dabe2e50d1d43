"""Tensors that lie in files beside the model: checked before anything is read, then read or mapped.

A model may come from anywhere, and its external data names files. Only files in the model's own folder, or below it,
are opened: no absolute path, no `..`, no link that leads out (unless to where the model itself is a link to). Where a
tensor lies must be inside its file, and be as long as its shape says.

The files are read into memory if they and the model are small together. Otherwise all of them are mapped, so that the
weights of a large model can be used where they lie, and they must not change from then on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath

import onnx

from quark.errors import ModelError
from quark.onnx import large_tensors
from quark.onnx.input_files import MappedFile, read_file
from quark.onnx.load.digest import Digest
from quark.onnx.load.source import Source

SLOW_BYTES = 64 << 20  # to hash: some hundredths of a second


@dataclass(eq=False)
class ExternalData:
    """The files beside one model, opened once each."""

    source: Source
    files: dict[Path, memoryview] = field(default_factory=dict)
    _paths: dict[str, Path] = field(default_factory=dict)  # by their locations in the model

    @property
    def bytes(self) -> int:
        return sum(len(view) for view in self.files.values())

    @property
    def mapped(self) -> tuple[MappedFile, ...]:
        """The files, with the model's own, that are read while work goes on, and must not change."""
        views = (memoryview(self.source.data), *self.files.values())
        return tuple(view.obj for view in views if isinstance(view.obj, MappedFile))

    def open(self, tensors: Iterable[onnx.TensorProto]) -> None:
        """Open the files of all external tensors of the model. What is not safe or not there is a ModelError."""
        names: dict[Path, str] = {}
        for tensor in tensors:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            names.setdefault(self._safe_path(tensor.name, entries.get("location", "")), tensor.name)
        try:
            total = len(self.source.data) + sum(path.stat().st_size for path in names if path.is_file())
        except OSError as error:
            raise ModelError(f"'{self.source.name}': its external data cannot be read: {error}") from error
        for path, name in names.items():
            self._open(name, path, is_held=total <= large_tensors.LARGE_MODEL_BYTES)

    def digest(self) -> Digest:
        """Of the model's bytes, and of the files in the order of their names."""
        files = [self.files[path] for path in sorted(self.files)]
        return Digest(self.source.data, files, is_slow=len(self.source.data) + self.bytes >= SLOW_BYTES)

    def view(self, tensor: onnx.TensorProto, expected_bytes: int) -> memoryview:
        """The bytes of an external tensor whose file was opened; a ModelError if they do not lie inside it."""
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
        parts = PureWindowsPath(location)  # knows both kinds of separators, and drives
        if not location or location.startswith(("/", "\\")) or parts.drive or ".." in parts.parts or "\0" in location:
            raise self._error(tensor, location, "must be a path inside the model's folder, without '..'")
        try:
            path = (self.source.folder / location).resolve()
            path.is_file()
        except (OSError, RuntimeError) as error:  # a name that is too long; links in a circle
            raise self._error(tensor, location, f"is no path: {getattr(error, 'strerror', None) or error}") from error
        # a store of files that hands out links to them has the model's and its data's side by side
        allowed = (self.source.folder, self.source.real_folder or self.source.folder)
        if not any(path.is_relative_to(folder) for folder in allowed):
            raise self._error(tensor, location, f"is a link that leads out of the model's folder, to '{path}'")
        self._paths[location] = path
        return path

    def _open(self, tensor: str, path: Path, *, is_held: bool) -> None:
        if not path.is_file():
            raise self._error(tensor, path, "is not there: external data belongs beside the model")
        try:
            is_empty = path.stat().st_size == 0  # which cannot be mapped
            self.files[path] = memoryview(read_file(path) if is_held or is_empty else MappedFile.open(path))
        except OSError as error:
            raise self._error(tensor, path, f"cannot be read: {error.strerror or error}") from error

    def _number(self, tensor: str, path: Path, key: str, text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 19:
            raise self._error(tensor, path, f"has {key} '{text}', expected a number of bytes")
        return int(text)

    def _error(self, tensor: str, path: Path | str, what: str) -> ModelError:
        return ModelError(f"'{self.source.name}': external data of tensor '{tensor}' in '{path}' {what}")
