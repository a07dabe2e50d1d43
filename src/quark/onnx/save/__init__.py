"""Write a model to a file, whole or not at all; see `quark.files.output`.

Weights beside the model are in a file whose name contains a hash of them, so a model is never combined with the weights
of another run. Weights are written as they are produced, and none is kept: a model may be larger than the memory.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from quark.account import FileFacts
from quark.errors import InvalidValueError, QuarkError
from quark.files.foreign import REPORT, read_json
from quark.files.output import check_place, complete, is_same_file, note_weights, put, temporary, together, writing
from quark.onnx.data.images import SUFFIXES
from quark.onnx.large_tensors import MIN_APART_BYTES, Message, byte_pieces, refer, split
from quark.onnx.load.reading import external_names, read_proto
from quark.onnx.load.wire import GRAPH, INITIALIZER, RAW_DATA, fields, head
from quark.ops.onnx_nodes import define_constant_marks
from quark.ops.portable_functions import define_portable_functions
from quark.text import get_logger

__all__ = [
    "SaveOptions",
    "check_output",
    "complete",
    "finish",
    "to_proto",
    "together",
    "write_model",
    "write_preprocessed",
    "write_text",
    "writing",
]

PRODUCER = "quark"
NORMALIZATIONS = {"LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"}
PROTOBUF_LIMIT_BYTES = (1 << 31) - (1 << 26)  # for weights: protobuf refuses 2 GB, and the graph needs some of it
DATA_SUFFIXES = {*SUFFIXES, ".npy", ".npz"}  # suffixes of the files that are read from a folder of calibration data
NO_MODELS = {*DATA_SUFFIXES, ".json", ".yaml", ".yml", ".py", ".txt", ".csv", ".html"}
REPORT_KEYS = {"card", "plan"}  # every report that was ever written has one of them
ALIGNMENT = 4096  # of weights in a file of their own, so that each can be mapped
MAX_PENDING = 2  # pieces in memory that wait to be hashed
WRITE_BYTES = 1 << 18  # at once: larger writes take twice as long on Linux
SMALL_BYTES = 1 << 16  # smaller data is gathered: a message with thousands of weights has as many pieces between them

_LOG = get_logger(__name__)

Part: TypeAlias = memoryview | bytes | ir.TensorProtocol


@dataclass(frozen=True)
class SaveOptions:
    """Options for writing the file, and files beside it."""

    has_portable_functions: bool = True  # the operators of com.amd.quark as functions, so that any runtime runs them
    has_external_data: bool = False  # weights in a file beside the model, as they always are beyond 2 GB
    is_in_memory: bool = False  # nothing is written while quantizing, and the model is returned
    has_all_value_info: bool = False  # type and shape of every tensor, as they are for a sample
    preprocessed: str | None = None  # path of the float model before calibration; '': beside the model


def finish(model: ir.Model, metadata: Mapping[str, str], options: SaveOptions) -> Message:
    """The model as a message, with this metadata and the functions that our operators need. The model cannot be used
    afterwards: its weights belong to the message."""
    model.producer_name = PRODUCER
    model.producer_version = metadata.get("quark.version", "")
    model.metadata_props.update(metadata)
    _forget_shapes_of_residuals(model)
    message = split(model)
    for value in model.graph.initializers.values():
        value.const_value = None
    define_constant_marks(message.proto)
    if options.has_portable_functions:
        define_portable_functions(message.proto)
    return message


def _forget_shapes_of_residuals(model: ir.Model) -> None:
    """Leave out shapes with free sizes inside a network that normalizes sums.

    ONNX Runtime fuses a sum and its normalization to SkipLayerNormalization if it knows that both parts have the same
    shape. Its CPU kernel takes longer than the two that it replaces: MiniLM took 35.6 ms with it, and 32.5 without.
    Exporters do not write these shapes, and ONNX Runtime cannot infer them; `quark.onnx.graph.infer_shapes` can.
    """
    sums = (value for node in model.graph if node.op_type in NORMALIZATIONS if (value := node.inputs[0]) is not None)
    if not any((node := value.producer()) is not None and node.op_type == "Add" for value in sums):
        return
    ports = {*model.graph.inputs, *model.graph.outputs}
    for node in model.graph:
        for value in node.outputs:
            if value not in ports and value.shape is not None and not value.shape.is_static():
                value.shape = None


def to_proto(model: ir.Model, metadata: Mapping[str, str], options: SaveOptions) -> onnx.ModelProto:
    """The same with the weights inside. Beyond 2 GB protobuf holds such a message, but does not serialize it."""
    return finish(model, metadata, options).filled()


# ---- before the work: can the files be written? ----


def check_output(path: str | os.PathLike[str], source: object = None, *others: object, has_report: bool = True) -> Path:
    """Return the path if a model and its report can be written there. Called before the work starts.

    `source` and `others` are what the run reads: the input model, data, configs and cards; for a model, its external
    data as well. None of these files is overwritten by the model or the report. Values that are not paths, such as
    arrays, are ignored.
    """
    target = Path(path)
    if target.suffix.lower() == ".json":
        raise InvalidValueError(f"output '{target}': the report is written to that name; end it in .onnx")
    if isinstance(source, (str, os.PathLike)) and is_same_file(target, source):
        raise InvalidValueError(f"output '{target}' is the input model: choose another name, it is not overwritten")
    files = [file for other in (source, *others) for file in _files_read(other)]
    check_place(target, [file for file in files if not os.path.isdir(file)])
    report = target.with_suffix(".json")
    for file in files:
        if has_report and is_same_file(report, file):
            raise InvalidValueError(
                f"output '{target}': its report would overwrite '{file}', which is read; choose another name"
            )
        # images are file from a folder, which may hold models and reports as well
        is_sample = target.suffix.lower() in DATA_SUFFIXES and target.exists() and os.path.isdir(file)
        if is_sample and target.resolve().is_relative_to(file.resolve()):
            raise InvalidValueError(
                f"output '{target}' is a file of the data in '{file}', which are read: choose another name"
            )
    if has_report:
        check_place(report)
        _refuse_other_json(report, target)
    return target


def _refuse_other_json(report: Path, target: Path) -> None:
    """Refuse to overwrite a JSON file that quark did not write as a report, such as the labels of a network. A file
    that is not JSON is replaced, as an existing model is."""
    if not report.exists():
        return
    try:
        content = read_json(report, f"'{report}'", REPORT)
    except InvalidValueError:
        return
    if not isinstance(content, dict) or not REPORT_KEYS & content.keys():
        raise InvalidValueError(
            f"output '{target}': its report would overwrite '{report}', which is JSON, but not a report of "
            "quark; choose "
            "another name, or move that file"
        )


def _files_read(source: object) -> list[Path]:
    """Return the file or folder that a path names and, for a model, its external data. Empty if it is not a path."""
    if not isinstance(source, (str, os.PathLike)) or "\0" in os.fspath(source):
        return []
    path = Path(source)
    if not path.is_file() or path.suffix.lower() in NO_MODELS:
        return [path]
    try:
        proto = read_proto(path)
    except QuarkError:  # not a model, or a damaged one: loading it raises the error
        return [path]
    return [path, *(path.parent / name for name in external_names(proto))]


# ---- writing ----


def write_model(model: Message | onnx.ModelProto, path: Path, options: SaveOptions) -> FileFacts:
    """Write the model, with its weights beside it if that is asked for or they are too large."""
    message = model if isinstance(model, Message) else _without_weights(model)
    with together(path):
        note_weights(path, _own_weights(path))
        if options.has_external_data or message.weight_bytes >= PROTOBUF_LIMIT_BYTES:
            return _write_two_files(message, path)
        with complete(path) as unfinished, unfinished.open("r+b") as stream, HashedFile(stream) as file:
            for part in _serialized(message):
                if isinstance(part, (bytes, memoryview)):
                    file.write(part)
                else:
                    file.write_tensor(part)
            return FileFacts(path.name, file.size, file.digest().hex())


def write_preprocessed(model: ir.Model, source: object, options: SaveOptions) -> None:
    """Write the float model as it is now, if that is asked for: beside the file it came from, or where `preprocessed`
    says."""
    if options.preprocessed is None:
        return
    origin = Path(source) if isinstance(source, (str, os.PathLike)) else Path("model.onnx")
    path = Path(options.preprocessed or origin.with_name(f"{origin.stem}_preprocessed.onnx"))
    target = check_output(path, source, has_report=False)
    write_model(split(model), target, options)
    _LOG.info("the float model after the passes is in '%s'", target)


def write_text(text: str, path: Path) -> None:
    """Write a text file, whole or not at all."""
    with complete(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def _without_weights(proto: onnx.ModelProto) -> Message:
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
    return Message(slim, {tensor.name: ir.Tensor(array) for tensor, array in zip(large, arrays, strict=True)})


def _own_weights(path: Path) -> list[str]:
    """The weights files of the model at this path, which is about to be replaced, if quark wrote them. No other file
    beside it is ever removed, whatever its name."""
    pattern = re.compile(re.escape(path.stem) + r"-[0-9a-f]{12}\.data")
    if not path.is_file() or not any(map(pattern.fullmatch, os.listdir(path.parent))):
        return []
    try:
        proto = read_proto(path)
    except QuarkError:  # the file to be replaced is not a model
        return []
    names = external_names(proto) if proto.producer_name == PRODUCER else []
    return [name for name in names if pattern.fullmatch(name)]


def _write_two_files(message: Message, path: Path) -> FileFacts:
    """Write the weights in the order of the graph, then the model. The name of the weights file contains the hash of
    its content. The model is renamed last, so that the weights it names are always there."""
    slim = onnx.ModelProto()
    slim.CopyFrom(message.proto)
    with temporary(path.with_suffix(".data")) as weights, temporary(path) as model:
        places = []
        with weights.open("r+b") as stream, HashedFile(stream) as file:
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
        if not places:  # all weights are small, and inside the model
            put(model, path)
            return FileFacts(path.name, len(content), hashlib.sha256(content).hexdigest())
        note_weights(path, [data_path.name])
        if not (data_path.is_file() and filecmp.cmp(weights, data_path, shallow=False)):  # it may be mapped just now
            put(weights, data_path)
        put(model, path)
    return FileFacts(path.name, len(content) + data_bytes, hashlib.sha256(content + digest).hexdigest())


def _serialized(message: Message) -> list[Part]:
    """A message and its weights as one serialized model: bytes, and tensors that stand for theirs. It is never in
    memory as a whole.

    The message is serialized with its large tensors empty. Where the bytes of such a tensor belong, there is a
    `raw_data` of length 0. Its length is replaced by the real one, and so are those of the tensor and of the graph
    around it; the bytes follow as they are produced. The result is what protobuf would have written.
    """
    view = memoryview(message.proto.SerializeToString(deterministic=True))
    weights = (message.weights.get(tensor.name) for tensor in message.proto.graph.initializer)

    def enclosed(number: int, content: Iterable[Part]) -> list[Part]:
        parts = list(content)
        size = sum(len(part) if isinstance(part, (bytes, memoryview)) else part.nbytes for part in parts)
        return [head(number, size), *parts]

    def in_tensor(start: int, end: int, weight: ir.TensorProtocol) -> Iterator[Part]:
        for field in fields(view, start, end):
            if field.is_part(RAW_DATA):
                yield from enclosed(RAW_DATA, [weight])
            else:
                yield view[field.start : field.end]

    def in_graph(start: int, end: int) -> Iterator[Part]:
        for field in fields(view, start, end):
            weight = next(weights) if field.is_part(INITIALIZER) else None
            if weight is None:
                yield view[field.start : field.end]
            else:
                yield from enclosed(INITIALIZER, in_tensor(field.content, field.end, weight))

    result: list[Part] = []
    for field in fields(view, 0, len(view)):
        if field.is_part(GRAPH):
            result += enclosed(GRAPH, in_graph(field.content, field.end))
        else:
            result.append(view[field.start : field.end])
    return result


class HashedFile:
    """A context manager around an open file, which it leaves open. Another thread computes the SHA-256 of what is
    written, because hashing can take longer than writing. Data passed to `write` must not change afterwards."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._state = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()
        self._gathered = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        """Write the data and add it to the hash."""
        if len(data) < SMALL_BYTES:
            self._gathered += data
            if len(self._gathered) >= WRITE_BYTES:
                self._flush()
            return
        self._flush()
        self._write(data)

    def _flush(self) -> None:
        if self._gathered:
            data, self._gathered = bytes(self._gathered), bytearray()
            self._write(data)

    def _write(self, data: bytes | memoryview) -> None:
        if len(self._pending) >= MAX_PENDING:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(self._state.update, data))
        view = memoryview(data)
        for start in range(0, len(view), WRITE_BYTES):
            self._file.write(view[start : start + WRITE_BYTES])

    def write_tensor(self, tensor: ir.TensorProtocol) -> None:
        """Write the bytes of a tensor, piece by piece."""
        for piece in byte_pieces(tensor):
            self.write(piece)

    def fill(self, multiple: int) -> int:
        """Write zeros up to the next multiple; return the position."""
        self.write(b"\0" * (-self.size % multiple))
        return self.size

    @property
    def size(self) -> int:
        return self._file.tell() + len(self._gathered)

    def digest(self) -> bytes:
        """SHA-256 of everything written so far."""
        self._flush()
        while self._pending:
            self._pending.popleft().result()
        return self._state.digest()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._flush()
        self._pool.shutdown(cancel_futures=error is not None)
