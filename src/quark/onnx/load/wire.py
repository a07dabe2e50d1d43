"""Survey a serialized model, and take its large tensors out without copying them.

protobuf needs up to 100 times the memory of a file that is made of tiny messages, and copies every tensor when it
parses. So a first walk over the bytes, which follows ONNX's message types, counts what the file holds: a file beyond
LIMITS is refused before it is parsed. The same walk finds the `raw_data` of large initializers. These are not parsed,
but become views of the bytes that were read.

The limits on counts leave room for networks several times as large as any that is known. Memory is limited in relation
to the size of the file, so that it depends on what the user provides and not on what the file claims.

A protobuf message is a sequence of fields: a varint (number * 8 + kind), then a varint (kind 0), 8 bytes (1), a length
and as many bytes (2), or 4 bytes (5). A varint has 7 bits in each byte, the lowest first, and ends at the first byte
below 128.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import onnx
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from quark.errors import ModelError
from quark.onnx.load.source import Source

GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number
INITIALIZER = onnx.GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
RAW_DATA = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
LENGTH_DELIMITED = 2


class Field(NamedTuple):
    """The position of a field of a message."""

    number: int
    kind: int
    start: int  # position of the tag
    content: int
    end: int

    def is_part(self, number: int) -> bool:
        """True for the field of that number with bytes or a message as its content."""
        return self.number == number and self.kind == LENGTH_DELIMITED


class BrokenError(Exception):
    """The bytes are not a protobuf message."""


def fields(view: memoryview, position: int, end: int) -> Iterator[Field]:
    """The fields of the message at this position. Raises BrokenError if there is none."""
    while position < end:
        start = position
        tag, position = read_varint(view, position, end)
        kind, content = tag & 7, position
        if kind == 0:
            _, position = read_varint(view, position, end)
        elif kind == LENGTH_DELIMITED:
            size, content = read_varint(view, position, end)
            position = content + size
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
        else:
            raise BrokenError
        if position > end or not tag >> 3:
            raise BrokenError
        yield Field(tag >> 3, kind, start, content, position)


def head(number: int, size: int) -> bytes:
    """The tag and length before `size` bytes of content of that field."""
    return varint(number << 3 | LENGTH_DELIMITED) + varint(size)


def varint(number: int) -> bytes:
    """
    >>> varint(300).hex()
    'ac02'
    """
    result = bytearray()
    while number > 0x7F:
        result.append(number & 0x7F | 0x80)
        number >>= 7
    result.append(number)
    return bytes(result)


def read_varint(data: bytes | memoryview, position: int, end: int) -> tuple[int, int]:
    """The number at a position, and the position after it."""
    if position < end and data[position] < 0x80:
        return data[position], position + 1
    result = shift = 0
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7
    raise BrokenError


MIN_CARVED_BYTES = 1024  # below, a view costs as much as it spares; and shape inference wants to see small constants

MAX_NODES = 500_000
MAX_TENSORS = 500_000
MAX_PORTS = 200_000  # inputs and outputs of the main graph: old exporters list all weights as inputs
MAX_ENTRIES = 100_000  # functions, operator sets and metadata of the model
MAX_NUMBERS = 20_000_000  # fields with a number: those of attributes and shapes; tensors pack theirs into one field
MAX_DEPTH = 100  # protobuf's own limit
BASE_MEMORY_BYTES = 192 << 20  # for names, attributes, types and so on
MEMORY_PER_BYTE = 8  # additional bytes per byte of the file
LIMITS = (
    f"{MAX_NODES:,} nodes, {MAX_TENSORS:,} tensors, {MAX_PORTS:,} inputs and outputs, {MAX_ENTRIES:,} functions and "
    f"metadata entries, {MAX_NUMBERS:,} numbers in attributes and shapes, and names and attributes that take "
    f"{BASE_MEMORY_BYTES >> 20} MB of memory and {MEMORY_PER_BYTE} times the size of the file"
)

# protobuf's memory for one message, measured; others take less than _OTHER_BYTES
_MESSAGE_BYTES = {
    "AttributeProto": 208,
    "TensorProto": 176,
    "FunctionProto": 168,
    "NodeProto": 160,
    "GraphProto": 136,
    "ValueInfoProto": 88,
}
_OTHER_BYTES = 72
_NUMBER_BYTES = 16


@dataclass(eq=False)
class _Type:
    """A type of message, with the types of its length-delimited fields by tag. Fields of bytes are left out."""

    name: str
    memory_bytes: int
    parts: dict[int, _Type] = field(default_factory=dict)


_BYTES: Final = _Type("bytes", 40)
_TEXT: Final = _Type("string", 40)


def _types(descriptor: Descriptor, known: dict[str, _Type]) -> _Type:
    """The type that the descriptor describes, with all types that it refers to."""
    if descriptor.full_name in known:
        return known[descriptor.full_name]
    result = _Type(descriptor.name, _MESSAGE_BYTES.get(descriptor.name, _OTHER_BYTES))
    known[descriptor.full_name] = result
    for descriptor_field in descriptor.fields:
        tag = descriptor_field.number << 3 | LENGTH_DELIMITED
        if descriptor_field.type == FieldDescriptor.TYPE_MESSAGE:
            result.parts[tag] = _types(descriptor_field.message_type, known)
        elif descriptor_field.type == FieldDescriptor.TYPE_STRING:
            result.parts[tag] = _TEXT
    return result


_KNOWN: Final[dict[str, _Type]] = {}
_MODEL: Final = _types(onnx.ModelProto.DESCRIPTOR, _KNOWN)
_NODE: Final = _KNOWN[onnx.NodeProto.DESCRIPTOR.full_name]
_TENSOR: Final = _KNOWN[onnx.TensorProto.DESCRIPTOR.full_name]
_PORT_TAGS: Final = frozenset(
    onnx.GraphProto.DESCRIPTOR.fields_by_name[name].number << 3 | LENGTH_DELIMITED for name in ("input", "output")
)
_GRAPH_TAG: Final = GRAPH << 3 | LENGTH_DELIMITED
_INITIALIZER_TAG: Final = INITIALIZER << 3 | LENGTH_DELIMITED
_RAW_DATA_TAG: Final = RAW_DATA << 3 | LENGTH_DELIMITED


@dataclass(frozen=True, eq=False)
class Carved:
    """A model without the bytes of its large initializers, and these bytes by the initializer's name."""

    proto: onnx.ModelProto
    raw: dict[str, memoryview]


class _Span(NamedTuple):
    """A field: from its tag to its end, and where its content begins."""

    start: int
    content: int
    end: int


@dataclass(eq=False)
class _LargeTensor:
    """An initializer of the main graph, large enough to be carved. `index` counts the initializers."""

    span: _Span
    index: int
    raw: list[_Span] = field(default_factory=list)


@dataclass(eq=False)
class _Survey:
    """The main graph and its large initializers, if they can be carved.

    protobuf merges a graph that is stored in several parts, and takes the last `raw_data` of a tensor that has several.
    No exporter writes such files. Repeated fields are not carved, but left to protobuf.
    """

    graph: _Span | None = None
    graphs: int = 0
    large: list[_LargeTensor] = field(default_factory=list)


def carve(source: Source) -> Carved:
    """Parse the model without its large initializers.

    Raises ModelError if the bytes are not an ONNX model, or hold more than LIMITS.
    """
    view = memoryview(source.data)
    try:
        survey = _survey(source)
        pieces, raw = _without_large_tensors(view, survey)
        proto = onnx.ModelProto.FromString(pieces[0] if len(pieces) == 1 else b"".join(pieces))
    except ModelError:
        raise
    except Exception as error:  # ours, or protobuf's DecodeError
        raise _not_a_model(source) from error
    if not proto.HasField("graph"):
        raise _not_a_model(source)
    names = [tensor.name for tensor in proto.graph.initializer]
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise ModelError(f"'{source.name}': two initializers are called '{twice}'. Names must be unique: rename one")
    return Carved(proto, {names[index]: content for index, content in raw.items()})


# beginnings of files that are mistaken for models, and what to do about them
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


def _too_much(source: Source, what: str) -> ModelError:
    return ModelError(
        f"'{source.name}' holds more than {what}, as no known network does. At most there may be {LIMITS}"
    )


def _survey(source: Source) -> _Survey:  # noqa: C901, PLR0915 - one loop with few calls, for speed
    """Walk over all messages of a model, each field once.

    Raises BrokenError if the bytes are not a message, UnicodeDecodeError if a text is not UTF-8, and ModelError beyond
    LIMITS. This is one loop with few calls, because files have up to millions of fields.
    """
    data = source.data
    memory_left = BASE_MEMORY_BYTES + MEMORY_PER_BYTE * len(data)
    nodes_left, tensors_left, numbers_left = MAX_NODES, MAX_TENSORS, MAX_NUMBERS
    ports_left, entries_left = MAX_PORTS, MAX_ENTRIES
    survey = _Survey()
    initializers = 0
    is_in_main_graph = False
    enclosing: list[tuple[int, _Type]] = []  # the messages around the present one: where each ends, and its type
    position, end, kind = 0, len(data), _MODEL
    parts = kind.parts
    while True:
        while position == end:
            if not enclosing:
                return survey
            end, kind = enclosing.pop()
            parts = kind.parts
        start = position
        tag = data[position]
        position += 1
        if tag > 0x7F:
            tag, position = read_varint(data, start, end)
        if tag & 7 == LENGTH_DELIMITED:
            length, position = read_varint(data, position, end)
            content, position = position, position + length
            if position > end or tag < 8:
                raise BrokenError
            inner = parts.get(tag, _BYTES)
            memory_left -= inner.memory_bytes
            if inner is _BYTES:
                if tag == _RAW_DATA_TAG and kind is _TENSOR and survey.large and survey.large[-1].span.end == end:
                    tensor = survey.large[-1]
                    if len(tensor.raw) < 2:
                        tensor.raw.append(_Span(start, content, position))
            elif inner is _TEXT:
                if length and not (text := bytes(data[content:position])).isascii():
                    text.decode()
            else:
                depth = len(enclosing)
                if depth == 0:
                    is_in_main_graph = tag == _GRAPH_TAG
                    entries_left -= 1
                    if is_in_main_graph:
                        survey.graph = _Span(start, content, position)
                        survey.graphs += 1
                    if entries_left < 0:
                        raise _too_much(source, f"{MAX_ENTRIES:,} functions, operator sets and metadata entries")
                elif depth == 1 and is_in_main_graph and tag in _PORT_TAGS:
                    ports_left -= 1
                    if ports_left < 0:
                        raise _too_much(source, f"{MAX_PORTS:,} inputs and outputs")
                if inner is _NODE:
                    nodes_left -= 1
                    if nodes_left < 0:
                        raise _too_much(source, f"{MAX_NODES:,} nodes")
                elif inner is _TENSOR:
                    tensors_left -= 1
                    if tensors_left < 0:
                        raise _too_much(source, f"{MAX_TENSORS:,} tensors")
                    if depth == 1 and is_in_main_graph and tag == _INITIALIZER_TAG:
                        if length >= MIN_CARVED_BYTES:
                            survey.large.append(_LargeTensor(_Span(start, content, position), initializers))
                        initializers += 1
                if depth == MAX_DEPTH:
                    raise _too_much(source, f"{MAX_DEPTH} levels of messages inside each other")
                enclosing.append((end, kind))
                position, end, kind = content, position, inner
                parts = kind.parts
        else:
            numbers_left -= 1
            memory_left -= _NUMBER_BYTES
            if numbers_left < 0:
                raise _too_much(source, f"{MAX_NUMBERS:,} numbers")
            wire = tag & 7
            if wire == 0:
                _, position = read_varint(data, position, end)
            elif wire == 5:
                position += 4
            elif wire == 1:
                position += 8
            else:
                raise BrokenError
            if position > end or tag < 8:
                raise BrokenError
        if memory_left < 0:
            raise _too_much(source, "the names and attributes that its size allows")


def _without_large_tensors(view: memoryview, survey: _Survey) -> tuple[list[bytes | memoryview], dict[int, memoryview]]:
    """The model in pieces, and the bytes that are left out by the number of the initializer."""
    graph = survey.graph
    tensors = [tensor for tensor in survey.large if len(tensor.raw) == 1]
    if graph is None or survey.graphs > 1 or not tensors:
        return [view], {}
    inside: list[bytes | memoryview] = []
    position = graph.content
    for tensor in tensors:
        span, raw = tensor.span, tensor.raw[0]
        content = [view[span.content : raw.start], view[raw.end : span.end]]
        inside += [view[position : span.start], head(INITIALIZER, sum(map(len, content))), *content]
        position = span.end
    inside.append(view[position : graph.end])
    pieces = [view[: graph.start], head(GRAPH, sum(map(len, inside))), *inside, view[graph.end :]]
    return pieces, {tensor.index: view[tensor.raw[0].content : tensor.raw[0].end] for tensor in tensors}
