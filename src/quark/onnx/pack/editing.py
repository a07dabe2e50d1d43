"""A model that is being packed or unpacked, and the record of its packing in its metadata.

The record is JSON, with all that is needed to restore every weight. Files come from anywhere, so everything in it is
checked when it is read: an entry that does not fit the graph is a ModelError that says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import onnx
import onnx_ir as ir
from onnx import TensorProto

from quark.errors import ModelError, QuarkError
from quark.files.foreign import RECORD, Fields, parse_json, short
from quark.formats.spec import BlockFormat
from quark.onnx.file_graph import empty
from quark.onnx.graph import FreeNames
from quark.onnx.large_tensors import Message, is_sizable
from quark.onnx.load.structure import opset_versions
from quark.ops.onnx_nodes import all_nodes, subgraphs
from quark.ops.schema import quantizer_of

KEY = "quark.packed"
VERSION = 1
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)  # the types of weights


class Editing:
    """A copy of a message that can be changed; the weights are shared."""

    def __init__(self, message: Message) -> None:
        self.proto = onnx.ModelProto()
        self.proto.CopyFrom(message.proto)
        self.weights = dict(message.weights)
        self.graph = self.proto.graph
        self.constants = {tensor.name: tensor for tensor in self.graph.initializer}
        self.order = [tensor.name for tensor in self.graph.initializer]
        self.inputs = {info.name for info in self.graph.input}
        self.outputs = {info.name for info in self.graph.output}
        self.fresh = FreeNames(_all_names(self.graph)).free

    @property
    def opset(self) -> int:
        return opset_versions(self.proto.opset_import)[""]

    def tensor(self, name: str) -> ir.TensorProtocol:
        """An initializer of the main graph."""
        if name in self.weights:
            return self.weights[name]
        return ir.serde.deserialize_tensor(self.constants[name])

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """The nodes that read a value, also inside subgraphs."""
        return [node for node in all_nodes(self.graph.node) if name in node.input]

    def add_constant(self, name: str, tensor: ir.TensorProtocol, like: onnx.TensorProto | None = None) -> None:
        """Add an initializer at the end, with the documentation and metadata of another one."""
        proto = onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=tensor.shape.numpy())
        if like is not None:
            if like.doc_string:
                proto.doc_string = like.doc_string
            proto.metadata_props.extend(like.metadata_props)
        if is_sizable(tensor):
            empty(proto)
            self.weights[name] = tensor
        else:
            proto.raw_data = tensor.tobytes()
        self.constants[name] = proto
        self.order.append(name)

    def remove_constant(self, name: str) -> None:
        self.order.remove(name)
        del self.constants[name]
        self.weights.pop(name, None)

    def put_first(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Put nodes that read nothing but constants before all others."""
        everything = [*nodes, *self.graph.node]
        kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in everything]
        del self.graph.node[:]
        self.graph.node.extend(kept)

    def import_domain(self, domain: str, version: int) -> None:
        if all(entry.domain != domain for entry in self.proto.opset_import):
            self.proto.opset_import.append(onnx.helper.make_opsetid(domain, version))

    def message(self) -> Message:
        """The result, with the initializers in their order."""
        tensors = [onnx.TensorProto.FromString(self.constants[name].SerializeToString()) for name in self.order]
        del self.graph.initializer[:]
        self.graph.initializer.extend(tensors)
        return Message(self.proto, {name: self.weights[name] for name in self.order if name in self.weights})


def _all_names(graph: onnx.GraphProto) -> set[str]:
    """The names of values and nodes, also in subgraphs."""
    names = {info.name for info in (*graph.input, *graph.output, *graph.value_info)}
    names.update(tensor.name for tensor in graph.initializer)
    for node in graph.node:
        names.update((node.name, *node.input, *node.output))
        for inner in subgraphs(node):
            names |= _all_names(inner)
    return names


@dataclass(frozen=True)
class WeightRecord:
    """One weight: its format as the operator on it says it, its tensors by role, the values that unpacking makes."""

    name: str
    operator: str
    attributes: Mapping[str, int | str]
    shape: tuple[int, ...]
    dtype: int
    layout: str
    planes: Mapping[str, str]
    values: tuple[str, ...]
    position: int  # among the initializers

    @property
    def format(self) -> BlockFormat:
        return quantizer_of(self.operator, self.attributes)[0].format

    @property
    def axis(self) -> int:
        return quantizer_of(self.operator, self.attributes)[1]


@dataclass(frozen=True)
class Record:
    """The packing of a file; `values` are what several weights read, `ir_version` is that of the unpacked file."""

    profile: str
    ir_version: int
    values: tuple[str, ...]
    weights: tuple[WeightRecord, ...]

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))


def is_packed(proto: onnx.ModelProto) -> bool:
    """True if the model has a record of its packing."""
    return any(entry.key == KEY for entry in proto.metadata_props)


def write_record(proto: onnx.ModelProto, record: Record) -> None:
    """Put the record into the metadata of the model."""
    entry = proto.metadata_props.add()
    entry.key, entry.value = KEY, record.to_json()


def read_record(proto: onnx.ModelProto, name: str) -> Record:
    """Read the record of a packed file. `name` is what errors call the file."""
    text = next((entry.value for entry in proto.metadata_props if entry.key == KEY), None)
    if text is None:
        raise ModelError(f"'{name}' is not packed: it has no entry '{KEY}' in its metadata. There is nothing to unpack")
    label = f"'{name}', metadata '{KEY}' (pack the model again if it is damaged)"
    fields = Fields(parse_json(text, label, RECORD, ModelError), label, error=ModelError)
    if fields.value("version") != VERSION:
        version = short(fields.value("version"))
        raise ModelError(f"'{name}' is packed by version {version}, and this is version {VERSION}")
    weights = tuple(_weight(mapping) for mapping in fields.mappings("weights"))
    return Record(fields.text("profile"), fields.integer("ir_version"), fields.texts("values"), weights)


def _weight(fields: Fields) -> WeightRecord:
    if fields.integer("dtype") not in FLOATS:
        fields.refuse("dtype", f"one of {', '.join(map(str, FLOATS))}")
    planes = fields.mapping("planes")
    record = WeightRecord(
        name=fields.text("name"),
        operator=fields.text("operator"),
        attributes=dict(fields.mapping("attributes").content),
        shape=fields.shape("shape"),
        dtype=fields.integer("dtype"),
        layout=fields.text("layout"),
        planes={role: planes.text(role) for role in planes},
        values=fields.texts("values"),
        position=fields.integer("position"),
    )
    try:
        record.format  # noqa: B018 - an operator that we do not have is found out here
    except QuarkError as error:
        raise ModelError(f"weight '{record.name}': {error}") from error
    return record
