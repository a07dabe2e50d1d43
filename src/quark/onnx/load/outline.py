"""Files that are looked at and not run."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir

from quark.errors import ModelError
from quark.onnx.input_files import WatchedFile
from quark.onnx.load.external_data import ExternalData
from quark.onnx.load.functions import check_functions
from quark.onnx.load.source import read_source
from quark.onnx.load.structure import check_ports, check_structure
from quark.onnx.load.tensors import check_shapes, check_tensors, inner_tensors, to_graph
from quark.onnx.load.wire import carve

MAX_HELD_BYTES = 64 << 20  # of a file of which little is looked at; it is mapped beyond


def read_proto(path: Path) -> onnx.ModelProto:
    """The message of a file, without the bytes of its large weights. External data is not looked for.

    Raises ModelError if the file is not an ONNX model, or holds more than one may hold.
    """
    read = read_source(path, MAX_HELD_BYTES)
    proto = carve(read).proto
    check_shapes(proto, read)
    return proto


def read_whole(path: Path) -> ir.Model:
    """The graph of a file with its weights, those in external files as well, and otherwise as the file has it.

    Raises ModelError if the file is not an ONNX model, or a weight is not there.
    """
    read = read_source(path)
    carved = carve(read)
    check_structure(carved.proto, read.name)
    views = check_tensors(read, carved, ExternalData(read))
    return to_graph(carved, views, read.name)


def external_names(proto: onnx.ModelProto) -> list[str]:
    """The files that a model names for its weights, in the order in which it names them first."""
    tensors = (*proto.graph.initializer, *inner_tensors(proto))
    entries = (entry for tensor in tensors for entry in tensor.external_data if entry.key == "location")
    return list(dict.fromkeys(entry.value for entry in entries))


def watch_external_data(path: Path) -> tuple[WatchedFile, ...]:
    """Check a file before ONNX Runtime is given its path, and return the files beside it that the runtime maps.

    Most versions of the runtime inline functions without any limit, and its messages name no output and no file. Raises
    ModelError if the file is not an ONNX model, or one that cannot be run here. Whether its external data is there, the
    runtime says.
    """
    proto = read_proto(path)
    check_functions(proto, path.name)
    check_ports(proto, path.name)
    files = [path.parent / name for name in external_names(proto)]
    for file in files:
        if os.path.exists(file) and not os.path.isfile(file):  # unlike Path's, False for what is no name
            raise ModelError(f"'{path.name}': its external data '{file}' is not a regular file")
    return tuple(WatchedFile.of(file, file.stat()) for file in files if os.path.isfile(file))
