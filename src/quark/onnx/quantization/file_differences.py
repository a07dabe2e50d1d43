"""Two model files: the hash of one, and what differs between them, as phrases for people."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from quark.errors import ModelError
from quark.onnx.load.outline import read_proto, read_whole
from quark.report.quantities import count_of, listed

_PIECE = 1 << 22


def file_hash(path: Path) -> str:
    """Return `quark.account.FileFacts.sha256` of this model, external data included."""
    state = hashlib.sha256()
    for piece in _pieces(path):
        state.update(piece)
    for file in sorted(external_files(path)):
        external = hashlib.sha256()
        for piece in _pieces(file):
            external.update(piece)
        state.update(external.digest())
    return state.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def external_files(path: Path) -> list[Path]:
    """Those that hold weights of the model, in the order in which it names them first."""
    proto = read_proto(path)
    names = [
        entry.value
        for tensor in proto.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    ]
    files = [path.parent / name for name in dict.fromkeys(names)]
    for file in files:
        if file.parent.resolve() != path.parent.resolve() or not file.is_file():
            raise ModelError(f"model '{path}': its weights '{file.name}' are expected in the same folder")
    return files


def file_differences(first: Path, second: Path) -> list[str]:
    """What is not the same in the second file; empty where only the order of bytes could differ."""
    one, two = read_whole(first), read_whole(second)
    return [*_initializers(one, two), *_nodes(one, two), *_metadata(one, two)]


def _initializers(one: ir.Model, two: ir.Model) -> Iterator[str]:
    before, after = _tensors(one), _tensors(two)
    differing = [name for name in before if name in after and not _is_same(before[name], after[name])]
    groups = (
        ([name for name in before if name not in after], "missing"),
        ([name for name in after if name not in before], "new"),
        (differing, "different"),
    )
    for names, what in groups:
        if names:
            yield f"{count_of(len(names), f'{what} initializer')}: {listed(names)}"


def _tensors(model: ir.Model) -> Mapping[str, ir.TensorProtocol]:
    values = model.graph.initializers.values()
    return {str(value.name): value.const_value for value in values if value.const_value is not None}


def _is_same(one: ir.TensorProtocol, two: ir.TensorProtocol) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


def _nodes(one: ir.Model, two: ir.Model) -> Iterator[str]:
    before, after = ({str(node.name): _text(node) for node in model.graph} for model in (one, two))
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if names:
        yield f"{count_of(len(names), 'different node')}: {listed(names)}"


def _text(node: ir.Node) -> bytes:
    return bytes(ir.serde.serialize_node(node).SerializeToString(deterministic=True))


def _metadata(one: ir.Model, two: ir.Model) -> Iterator[str]:
    before, after = dict(one.metadata_props), dict(two.metadata_props)
    keys = sorted(key for key in {**before, **after} if before.get(key) != after.get(key))
    if keys:
        yield f"metadata: {', '.join(keys)}"
    if one.producer_version != two.producer_version:
        yield f"written by quark {one.producer_version}, now {two.producer_version}"
