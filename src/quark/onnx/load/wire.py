"""Take the large tensors out of a serialized model without copying them.

protobuf copies every tensor when it parses, and again whenever Python looks at it. But the wire format says where the
bytes of a tensor lie: this module walks over a ModelProto's graph, leaves out the `raw_data` of large initializers, and
parses the rest, which is small. The tensors become views of the bytes that were read.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from quark.errors import ModelError
from quark.onnx.load.source import Source
from quark.onnx.wire_format import GRAPH, INITIALIZER, RAW_DATA, Field, fields, head

MIN_CARVED_BYTES = 1024  # below, a view costs as much as it spares; and shape inference wants to see small constants


@dataclass(frozen=True, eq=False)
class Carved:
    """A model without the bytes of its large initializers, and these bytes by the initializer's name."""

    proto: onnx.ModelProto
    raw: dict[str, memoryview]


def carve(source: Source) -> Carved:
    """The model with its large initializers apart. Bytes that are no ONNX model are a ModelError."""
    view = memoryview(source.data)
    try:
        pieces, raw = _without_large_tensors(view)
        proto = onnx.ModelProto.FromString(b"".join(pieces))
    except Exception as error:  # ours, or protobuf's DecodeError
        raise _not_a_model(source) from error
    if not proto.HasField("graph") or not _is_text_readable(proto):
        raise _not_a_model(source)
    return Carved(proto, _by_name(proto, raw, source))


def _is_text_readable(message: Message) -> bool:
    """That every text is UTF-8: protobuf hands out bytes where it is not, and no name of a model may be such."""
    for field, content in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = [content] if isinstance(content, Message) else content
            if not all(_is_text_readable(each) for each in inner):
                return False
        elif field.type == FieldDescriptor.TYPE_STRING:
            texts = [content] if isinstance(content, (str, bytes)) else content
            if not all(isinstance(text, str) for text in texts):
                return False
    return True


def _by_name(proto: onnx.ModelProto, raw: dict[int, memoryview], source: Source) -> dict[str, memoryview]:
    names = [tensor.name for tensor in proto.graph.initializer]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise ModelError(f"'{source.name}': two initializers are called '{twice}'. Names must be unique: rename one")
    return {names[index]: view for index, view in raw.items()}


# how files begin that are taken for models, and what to do about them
_MISTAKEN = {
    b"version https://git-lfs": "It is a pointer of Git LFS, not the file: fetch it with 'git lfs pull'",
    b"<": "It is a web page or XML: look at where it was downloaded from",
    b"PK": "It is an archive, as torch.save writes them: export the network with torch.onnx.export",
    b"\x80": "It is a pickle, as torch.save writes them: export the network with torch.onnx.export",
    b"\x89HDF": "It is HDF5, as Keras writes it: convert it with tf2onnx",
}


def _not_a_model(source: Source) -> ModelError:
    # every ONNX file that we know of starts with the field ir_version
    if source.data[:1] == b"\x08" and len(source.data) > 1 and 0 < source.data[1] < 0x80:
        return ModelError(
            f"'{source.name}' is damaged: it starts as an ONNX model and breaks off or goes wrong within its "
            f"{len(source.data)} bytes. Fetch or export it again"
        )
    start = bytes(source.data[:32]).lstrip()
    hint = next((f". {text}" for prefix, text in _MISTAKEN.items() if start.startswith(prefix)), "")
    return ModelError(f"'{source.name}' is not an ONNX model ({len(source.data)} bytes that do not parse as one){hint}")


def _without_large_tensors(view: memoryview) -> tuple[list[bytes | memoryview], dict[int, memoryview]]:
    pieces: list[bytes | memoryview] = []
    raw: dict[int, memoryview] = {}
    count = 0
    for field in fields(view, 0, len(view)):
        if field.is_part(GRAPH):
            graph, count = _graph_without(view, field, raw, count)
            pieces += _as_field(GRAPH, graph)
        else:
            pieces.append(view[field.start : field.end])
    return pieces, raw


def _graph_without(
    view: memoryview, graph: Field, raw: dict[int, memoryview], count: int
) -> tuple[list[bytes | memoryview], int]:
    pieces: list[bytes | memoryview] = []
    for field in fields(view, graph.content, graph.end):
        if not field.is_part(INITIALIZER):
            pieces.append(view[field.start : field.end])
            continue
        if field.end - field.content < MIN_CARVED_BYTES:
            pieces.append(view[field.start : field.end])
        else:
            pieces += _as_field(INITIALIZER, _tensor_without(view, field, raw, count))
        count += 1
    return pieces, count


def _tensor_without(
    view: memoryview, tensor: Field, raw: dict[int, memoryview], index: int
) -> list[bytes | memoryview]:
    pieces: list[bytes | memoryview] = []
    for field in fields(view, tensor.content, tensor.end):
        if field.is_part(RAW_DATA):
            raw[index] = view[field.content : field.end]  # where there are two, the last one holds
        else:
            pieces.append(view[field.start : field.end])
    return pieces


def _as_field(number: int, pieces: list[bytes | memoryview]) -> list[bytes | memoryview]:
    return [head(number, sum(len(piece) for piece in pieces)), *pieces]
