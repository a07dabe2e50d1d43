"""What a packed file says about its packing, in its metadata: enough to restore every weight.

The entry is JSON. Files come from anywhere, so that everything in it is checked when it is read: an entry that does not
fit the graph is a ModelError that says so, and sizes are compared before memory is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import onnx

from quark.errors import ModelError, QuarkError
from quark.formats.spec import BlockFormat
from quark.ops.schema import quantizer_of

KEY = "quark.packed"
VERSION = 1


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
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            raise ModelError(f"'{name}' is packed by version {content['version']}, and this is version {VERSION}")
        weights = tuple(_weight(each) for each in content["weights"])
        return Record(str(content["profile"]), int(content["ir_version"]), _texts(content["values"]), weights)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"'{name}': its metadata entry '{KEY}' is damaged: {error!r}. Pack the model again") from error


def _weight(content: Any) -> WeightRecord:
    record = WeightRecord(
        name=str(content["name"]),
        operator=str(content["operator"]),
        attributes={str(key): value for key, value in content["attributes"].items()},
        shape=tuple(_size(each) for each in content["shape"]),
        dtype=int(content["dtype"]),
        layout=str(content["layout"]),
        planes={str(role): str(each) for role, each in content["planes"].items()},
        values=_texts(content["values"]),
        position=_size(content["position"]),
    )
    try:
        record.format  # noqa: B018 - an operator that we do not have is found out here
    except QuarkError as error:
        raise ModelError(f"weight '{record.name}': {error}") from error
    return record


def _texts(content: Any) -> tuple[str, ...]:
    return tuple(str(each) for each in content)


def _size(content: Any) -> int:
    if not isinstance(content, int) or isinstance(content, bool) or not 0 <= content < 1 << 48:
        raise ValueError(f"{content!r} is no size")
    return content
