"""The quantized model as a file.

Everything is written under a temporary name in the folder of the result and renamed when it is complete, so that a
crash leaves the old file, the new file or none. Weights beside the model lie in a file whose name holds a hash of them:
a model and the weights of another run never meet.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from quark.account import FileFacts
from quark.errors import InvalidValueError
from quark.onnx.save.options import SaveOptions
from quark.ops.constant_marks import define_constant_marks
from quark.ops.portable_functions import define_portable_functions

PROTOBUF_LIMIT_BYTES = (1 << 31) - (1 << 26)  # of weights: protobuf refuses 2 GB, and the graph needs some of it
_MIN_EXTERNAL_BYTES = 1024  # smaller tensors stay in the model, where shape inference finds them


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
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".quark-"):
            pass
    except OSError as error:
        raise InvalidValueError(f"output '{target}': its folder cannot be written to ({error.strerror})") from error
    return target


def to_proto(model: ir.Model, metadata: Mapping[str, str], options: SaveOptions) -> onnx.ModelProto:
    """The model as protobuf, with what is to be known about its making; weights beyond 2 GB must lie elsewhere.

    This uses the model up: protobuf has copies of its weights, and those are freed.
    """
    model.producer_name = "quark"
    model.producer_version = metadata.get("quark.version", "")
    model.metadata_props.update(metadata)
    proto = ir.serde.serialize_model(model)
    for value in model.graph.initializers.values():
        value.const_value = None
    define_constant_marks(proto)
    if options.has_portable_functions:
        define_portable_functions(proto)
    return proto


def write_model(proto: onnx.ModelProto, path: Path, options: SaveOptions) -> FileFacts:
    """Write the model, and its weights beside it where they are too large or should be."""
    if not options.has_external_data and _weight_bytes(proto) < PROTOBUF_LIMIT_BYTES:
        content = proto.SerializeToString(deterministic=True)
        with _complete(path) as temporary:
            temporary.write_bytes(content)
        return FileFacts(path.name, len(content), hashlib.sha256(content).hexdigest())
    return _write_with_data(proto, path)


def write_text(text: str, path: Path) -> None:
    """A text file, whole or not at all."""
    with _complete(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _write_with_data(proto: onnx.ModelProto, path: Path) -> FileFacts:
    """Weights go to a file of their own, in the order of the graph, each at a multiple of 4096 bytes."""
    large = [each for each in proto.graph.initializer if len(each.raw_data) >= _MIN_EXTERNAL_BYTES]
    digest = hashlib.sha256()
    for each in large:
        digest.update(each.raw_data)
    data_path = path.with_name(f"{path.stem}-{digest.hexdigest()[:12]}.data")
    slim = onnx.ModelProto()
    slim.CopyFrom(_without_data(proto, large))
    with _complete(data_path) as temporary, temporary.open("wb") as stream:
        for tensor, source in zip(_large_of(slim, large), large, strict=True):
            stream.write(b"\0" * (-stream.tell() % 4096))
            onnx.external_data_helper.set_external_data(
                tensor, data_path.name, offset=stream.tell(), length=len(source.raw_data)
            )
            stream.write(source.raw_data)
            tensor.data_location = onnx.TensorProto.EXTERNAL
        data_bytes = stream.tell()
    content = slim.SerializeToString(deterministic=True)
    with _complete(path) as temporary:
        temporary.write_bytes(content)
    _remove_stale(path, data_path)
    both = hashlib.sha256(content)
    both.update(digest.digest())
    return FileFacts(path.name, len(content) + data_bytes, both.hexdigest())


def _weight_bytes(proto: onnx.ModelProto) -> int:
    """Counted by tensor: asking a message beyond 2 GB for its size is an error already."""
    return sum(len(each.raw_data) for each in proto.graph.initializer)


def _remove_stale(path: Path, data_path: Path) -> None:
    """Weights of models that had this name before: nothing refers to them any more."""
    pattern = re.compile(re.escape(path.stem) + r"-[0-9a-f]{12}\.data")
    for other in path.parent.iterdir():
        if other != data_path and pattern.fullmatch(other.name):
            other.unlink(missing_ok=True)


def _without_data(proto: onnx.ModelProto, large: list[onnx.TensorProto]) -> onnx.ModelProto:
    """A copy of everything but the large weights' bytes."""
    kept = {id(each): each.raw_data for each in large}
    for each in large:
        each.raw_data = b""
    try:
        slim = onnx.ModelProto()
        slim.CopyFrom(proto)
        return slim
    finally:
        for each in large:
            each.raw_data = kept[id(each)]


def _large_of(slim: onnx.ModelProto, large: list[onnx.TensorProto]) -> list[onnx.TensorProto]:
    names = {each.name for each in large}
    return [each for each in slim.graph.initializer if each.name in names]


@contextlib.contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well, and is gone when it does not."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".quark-", suffix=path.suffix)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        _take_default_mode(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _take_default_mode(path: Path) -> None:
    """mkstemp makes files that only their owner reads; a result is an ordinary file."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)
