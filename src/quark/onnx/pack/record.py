"""What a packed file says about its packing, in its metadata: enough to restore every weight.

The entry is JSON. Files come from anywhere, so that everything in it is checked when it is read: an entry that does not
fit the graph is a ModelError that says so, and sizes are compared before memory is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import onnx
from onnx import TensorProto

from quark.errors import ModelError, QuarkError
from quark.files.foreign import RECORD, Fields, parse_json, short
from quark.formats.spec import BlockFormat
from quark.ops.schema import quantizer_of

KEY = "quark.packed"
VERSION = 1
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)  # what weights may be


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
    return any(entry.key == KEY for entry in proto.metadata_props)


def write_record(proto: onnx.ModelProto, record: Record) -> None:
    entry = proto.metadata_props.add()
    entry.key, entry.value = KEY, record.to_json()


def read_record(proto: onnx.ModelProto, name: str) -> Record:
    """The entry of a packed file, which `name` is for messages."""
    text = next((entry.value for entry in proto.metadata_props if entry.key == KEY), None)
    if text is None:
        raise ModelError(f"'{name}' is not packed: it has no entry '{KEY}' in its metadata. There is nothing to unpack")
    label = f"'{name}', metadata '{KEY}' (pack the model again if it is damaged)"
    fields = Fields(parse_json(text, label, RECORD, ModelError), label, error=ModelError)
    if fields.value("version") != VERSION:
        version = short(fields.value("version"))
        raise ModelError(f"'{name}' is packed by version {version}, and this is version {VERSION}")
    weights = tuple(_weight(each) for each in fields.mappings("weights"))
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
