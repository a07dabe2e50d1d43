"""A message and its weights as one serialized model, without ever being one in memory.

The message is serialized with its large tensors empty. Where the bytes of a tensor belong, the serialization has a
`raw_data` of length 0: its length is written as what it should be, and so are those of the tensor and of the graph
around it; the bytes follow as they are produced. The result is what protobuf would have written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import onnx_ir as ir

from quark.onnx.message import Message
from quark.onnx.wire_format import GRAPH, INITIALIZER, RAW_DATA, Field, fields, head

Part: TypeAlias = memoryview | bytes | ir.TensorProtocol


def parts(message: Message) -> list[Part]:
    """The serialized model, in order: bytes, and tensors that stand for theirs."""
    view = memoryview(message.proto.SerializeToString(deterministic=True))
    names = (tensor.name for tensor in message.proto.graph.initializer)
    weights = (message.weights.get(name) for name in names)
    result: list[Part] = []
    for field in fields(view, 0, len(view)):
        if field.is_part(GRAPH):
            result += _enclosed(GRAPH, _graph(view, field, weights))
        else:
            result.append(view[field.start : field.end])
    return result


def _graph(view: memoryview, graph: Field, weights: Iterator[ir.TensorProtocol | None]) -> Iterator[Part]:
    for field in fields(view, graph.content, graph.end):
        weight = next(weights) if field.is_part(INITIALIZER) else None
        if weight is None:
            yield view[field.start : field.end]
        else:
            yield from _enclosed(INITIALIZER, _tensor(view, field, weight))


def _tensor(view: memoryview, tensor: Field, weight: ir.TensorProtocol) -> Iterator[Part]:
    for field in fields(view, tensor.content, tensor.end):
        if field.is_part(RAW_DATA):
            yield from _enclosed(RAW_DATA, [weight])
        else:
            yield view[field.start : field.end]


def _enclosed(number: int, content: Iterable[Part]) -> list[Part]:
    listed = list(content)
    size = sum(len(part) if isinstance(part, (bytes, memoryview)) else part.nbytes for part in listed)
    return [head(number, size), *listed]
