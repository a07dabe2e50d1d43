"""How protobuf lays a message out in bytes.

A message is a sequence of fields: a varint (number * 8 + kind), then a varint (kind 0), 8 bytes (1), a length and as
many bytes (2), or 4 bytes (5). A varint has 7 bits a byte, the lowest first, and ends at the first byte below 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import onnx

GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number
INITIALIZER = onnx.GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
RAW_DATA = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
LENGTH_DELIMITED = 2


class Field(NamedTuple):
    """Where a field of a message lies."""

    number: int
    kind: int
    start: int  # of the tag
    content: int
    end: int

    def is_part(self, number: int) -> bool:
        """That it is that field, with bytes or a message as its content."""
        return self.number == number and self.kind == LENGTH_DELIMITED


class BrokenError(Exception):
    """The bytes are no protobuf message."""


def fields(view: memoryview, position: int, end: int) -> Iterator[Field]:
    """The fields of the message that lies there; a BrokenError where none does."""
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
    """What stands before `size` bytes of content of that field."""
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
    """The number at a position, and the position behind it."""
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
