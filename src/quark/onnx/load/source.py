"""The bytes of a model, from wherever it is. A large file is mapped, and must not change from then on."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import onnx

from quark.errors import ModelError, UnsupportedTypeError
from quark.onnx import large_tensors
from quark.onnx.input_files import MappedFile, read_file

MAX_BYTES = 2**31 - 1  # protobuf's own limit for one message


@dataclass(frozen=True)
class Source:
    """A serialized model. `name` is for messages and reports; `folder` holds its external data, None for a model that
    came without a file; `real_folder` is where the file really lies, which differs for a link."""

    data: bytes | memoryview
    name: str
    folder: Path | None = None
    real_folder: Path | None = None


def read_source(source: str | os.PathLike[str] | onnx.ModelProto | bytes, max_held_bytes: int | None = None) -> Source:
    """The model's bytes, read once; every later step has views of them. A file larger than `max_held_bytes` is mapped;
    without that, one larger than the weights of a large model."""
    if isinstance(source, onnx.ModelProto):
        return Source(_serialize(source), source.graph.name or "model")
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _not_empty(Source(bytes(source), "model"))
    if isinstance(source, (str, os.PathLike)):
        return _read_file(Path(source), large_tensors.LARGE_MODEL_BYTES if max_held_bytes is None else max_held_bytes)
    raise UnsupportedTypeError(f"model: expected a path, an onnx.ModelProto or bytes, got {type(source).__name__}")


def _serialize(proto: onnx.ModelProto) -> bytes:
    try:
        return bytes(proto.SerializeToString())
    except Exception as error:  # protobuf's implementations do not agree on the class
        raise ModelError(
            f"model '{proto.graph.name}' cannot be serialized ({error}); more than 2 GB must be saved with external "
            "data (onnx.save_model with save_as_external_data=True) and given as a path"
        ) from error


def _read_file(path: Path, max_held_bytes: int) -> Source:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelError(f"'{path}' is a folder. Expected the ONNX file inside it{_files_inside(path)}")
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
        raise ModelError(f"{str(path)!r} is no path: {error}") from error
    return _not_empty(Source(data, path.name, path.parent.resolve(), path.resolve().parent))


def _files_inside(folder: Path) -> str:
    try:
        names = sorted(each.name for each in folder.glob("*.onnx"))
    except OSError:
        return ""
    return f", such as {', '.join(names[:3])}" if names else "; there is none"


def _not_empty(source: Source) -> Source:
    if not source.data:
        raise ModelError(f"'{source.name}' is empty (0 bytes). Expected an ONNX model")
    return source
