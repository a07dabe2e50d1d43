"""The quantized model as a file.

It is written whole or not at all, see `whole_files`. Weights beside the model lie in a file whose name holds a hash of
them: a model and the weights of another run never meet.

Weights are written as they are produced, and none is kept: a model may be larger than the memory.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from quark.account import FileFacts
from quark.errors import InvalidValueError
from quark.files.output import PREFIX, complete, put, temporary
from quark.onnx.fingerprint import Fingerprint
from quark.onnx.message import MIN_APART_BYTES, Message, refer
from quark.onnx.save.hashed_file import HashedFile
from quark.onnx.save.options import SaveOptions
from quark.onnx.save.single_file import parts

PROTOBUF_LIMIT_BYTES = (1 << 31) - (1 << 26)  # of weights: protobuf refuses 2 GB, and the graph needs some of it
ALIGNMENT = 4096  # of weights in a file of their own, so that each can be mapped


def check_output(path: str | os.PathLike[str], source: object = None) -> Path:
    """The path, if a file can be written there; found out before the work, not after."""
    target = Path(path)
    if target.is_dir():
        raise InvalidValueError(f"output '{target}' is a folder: expected the name of a file, such as model.onnx")
    if not target.parent.is_dir():
        raise InvalidValueError(f"output '{target}': there is no folder '{target.parent}'; create it first")
    if target.suffix.lower() == ".json":
        raise InvalidValueError(f"output '{target}': the report is written to that name; end it in .onnx")
    is_path = isinstance(source, (str, os.PathLike)) and Path(source).exists()
    if is_path and target.exists() and target.samefile(str(source)):
        raise InvalidValueError(f"output '{target}' is the input model: choose another name, it is not overwritten")
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=PREFIX):
            pass
    except OSError as error:
        raise InvalidValueError(f"output '{target}': its folder cannot be written to ({error.strerror})") from error
    return target


def write_model(model: Message | onnx.ModelProto, path: Path, options: SaveOptions) -> FileFacts:
    """Write the model, and its weights beside it where they are too large or should be."""
    message = model if isinstance(model, Message) else _apart(model)
    if options.has_external_data or message.weight_bytes >= PROTOBUF_LIMIT_BYTES:
        return _write_two_files(message, path)
    with complete(path) as unfinished, unfinished.open("r+b") as stream, HashedFile(stream, hashlib.sha256()) as file:
        for part in parts(message):
            if isinstance(part, (bytes, memoryview)):
                file.write(part)
            else:
                file.write_tensor(part)
        return FileFacts(path.name, file.size, file.digest().hex())


def write_text(text: str, path: Path) -> None:
    """A text file, whole or not at all."""
    with complete(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def _write_two_files(message: Message, path: Path) -> FileFacts:
    """The weights in the order of the graph, then the model, which names their file by the hash of what was written. It
    takes its name last: whoever finds it finds its weights."""
    slim = onnx.ModelProto()
    slim.CopyFrom(message.proto)
    with temporary(path.with_suffix(".data")) as weights, temporary(path) as model:
        places = []
        with weights.open("r+b") as stream, HashedFile(stream, Fingerprint()) as file:
            for tensor, weight in Message(slim, message.weights).apart():
                offset = file.fill(ALIGNMENT)
                file.write_tensor(weight)
                places.append((tensor, offset, file.size - offset))
            digest, data_bytes = file.digest(), file.size
        data_path = path.with_name(f"{path.stem}-{digest.hex()[:12]}.data")
        for tensor, offset, length in places:
            refer(tensor, data_path.name, offset, length)
        content = slim.SerializeToString(deterministic=True)
        model.write_bytes(content)
        put(weights, data_path)
        put(model, path, then=lambda: _remove_stale(path, data_path))
    return FileFacts(path.name, len(content) + data_bytes, hashlib.sha256(content + digest).hexdigest())


def _apart(proto: onnx.ModelProto) -> Message:
    """A copy of the message without its weights, which are copied once."""
    large = [tensor for tensor in proto.graph.initializer if len(tensor.raw_data) >= MIN_APART_BYTES]
    content = [tensor.raw_data for tensor in large]
    slim = onnx.ModelProto()
    try:
        for tensor in large:
            tensor.raw_data = b""
        slim.CopyFrom(proto)
    finally:
        for tensor, data in zip(large, content, strict=True):
            tensor.raw_data = data
    arrays = (np.frombuffer(data, np.uint8) for data in content)
    return Message(slim, {tensor.name: ir.Tensor(each) for tensor, each in zip(large, arrays, strict=True)})


def _remove_stale(path: Path, data_path: Path) -> None:
    """Weights of models that had this name before: nothing refers to them any more."""
    pattern = re.compile(re.escape(path.stem) + r"-[0-9a-f]{12}\.data")
    for other in path.parent.iterdir():
        if other != data_path and pattern.fullmatch(other.name):
            other.unlink(missing_ok=True)
