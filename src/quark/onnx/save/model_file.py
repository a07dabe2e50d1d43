"""The quantized model as a file.

It is written whole or not at all, see `quark.files.output`. Weights beside the model lie in a file whose name holds a
hash of them: a model and the weights of another run never meet.

Weights are written as they are produced, and none is kept: a model may be larger than the memory.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from quark.account import FileFacts
from quark.errors import InvalidValueError, QuarkError
from quark.files.foreign import REPORT, read_json
from quark.files.output import check_place, complete, is_same_file, note_weights, put, temporary, together
from quark.onnx.data.images import SUFFIXES
from quark.onnx.load.outline import external_names, read_proto
from quark.onnx.message import MIN_APART_BYTES, Message, refer
from quark.onnx.save.finish import PRODUCER
from quark.onnx.save.hashed_file import HashedFile
from quark.onnx.save.options import SaveOptions
from quark.onnx.save.single_file import parts

PROTOBUF_LIMIT_BYTES = (1 << 31) - (1 << 26)  # of weights: protobuf refuses 2 GB, and the graph needs some of it
DATA_SUFFIXES = {*SUFFIXES, ".npy", ".npz"}  # of files that a folder of calibration data is read for
NO_MODELS = {*DATA_SUFFIXES, ".json", ".yaml", ".yml", ".py", ".txt", ".csv", ".html"}
REPORT_KEYS = {"card", "plan"}  # every report that was ever written has one of them
ALIGNMENT = 4096  # of weights in a file of their own, so that each can be mapped


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
    files = [file for each in (source, *others) for file in _files_read(each)]
    check_place(target, [each for each in files if not os.path.isdir(each)])
    report = target.with_suffix(".json")
    for each in files:
        if has_report and is_same_file(report, each):
            raise InvalidValueError(
                f"output '{target}': its report would overwrite '{each}', which is read; choose another name"
            )
        # a folder is read for its images; models and reports may lie among them
        is_sample = target.suffix.lower() in DATA_SUFFIXES and target.exists() and os.path.isdir(each)
        if is_sample and target.resolve().is_relative_to(each.resolve()):
            raise InvalidValueError(
                f"output '{target}' is a file of the data in '{each}', which are read: choose another name"
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
            f"output '{target}': its report would overwrite '{report}', which is JSON and no report of quark's; choose "
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
    except QuarkError:  # no model, or a damaged one: the error comes from where it is loaded
        return [path]
    return [path, *(path.parent / name for name in external_names(proto))]


def write_model(model: Message | onnx.ModelProto, path: Path, options: SaveOptions) -> FileFacts:
    """Write the model, and its weights beside it where they are too large or should be."""
    message = model if isinstance(model, Message) else _apart(model)
    with together(path):
        note_weights(path, _own_weights(path))
        if options.has_external_data or message.weight_bytes >= PROTOBUF_LIMIT_BYTES:
            return _write_two_files(message, path)
        with complete(path) as unfinished, unfinished.open("r+b") as stream, HashedFile(stream) as file:
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
    """Write the weights in the order of the graph, then the model. The name of the weights file holds the hash of its
    content. The model is renamed last, so that the weights it names are always there."""
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
        if not places:  # all are small, and inside the model
            put(model, path)
            return FileFacts(path.name, len(content), hashlib.sha256(content).hexdigest())
        note_weights(path, [data_path.name])
        if not (data_path.is_file() and filecmp.cmp(weights, data_path, shallow=False)):  # it may be mapped just now
            put(weights, data_path)
        put(model, path)
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


def _own_weights(path: Path) -> list[str]:
    """The weights that the model at this path names, which is about to be replaced, if quark wrote them. Nothing else
    that lies beside it is ever removed, whatever it is called."""
    pattern = re.compile(re.escape(path.stem) + r"-[0-9a-f]{12}\.data")
    if not path.is_file() or not any(map(pattern.fullmatch, os.listdir(path.parent))):
        return []
    try:
        proto = read_proto(path)
    except QuarkError:  # what is replaced is no model
        return []
    names = external_names(proto) if proto.producer_name == PRODUCER else []
    return [name for name in names if pattern.fullmatch(name)]
