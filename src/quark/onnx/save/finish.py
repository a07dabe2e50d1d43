"""From the graph to what is written: who made it, the functions that our operators need, the weights apart."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx_ir as ir

from quark.onnx.message import Message, split
from quark.onnx.save.options import SaveOptions
from quark.ops.constant_marks import define_constant_marks
from quark.ops.portable_functions import define_portable_functions

PRODUCER = "quark"


def finish(model: ir.Model, metadata: Mapping[str, str], options: SaveOptions) -> Message:
    """The model as a message, with what is to be known about its making. This uses the model up: its weights belong to
    the message now."""
    model.producer_name = PRODUCER
    model.producer_version = metadata.get("quark.version", "")
    model.metadata_props.update(metadata)
    message = split(model)
    for value in model.graph.initializers.values():
        value.const_value = None
    define_constant_marks(message.proto)
    if options.has_portable_functions:
        define_portable_functions(message.proto)
    return message


def to_proto(model: ir.Model, metadata: Mapping[str, str], options: SaveOptions) -> onnx.ModelProto:
    """The same with the weights inside, however large: beyond 2 GB protobuf holds them, and does not serialize them."""
    return finish(model, metadata, options).filled()
