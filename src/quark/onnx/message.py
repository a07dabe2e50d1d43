"""A model as a protobuf message without its large weights, and these beside it.

protobuf copies every tensor, and refuses 2 GB. So large weights never go through it: they stay empty in the message,
and are written behind it, into it or beside it by whoever needs the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

MIN_APART_BYTES = 1024  # smaller tensors stay in the message, where shape inference finds them

Tensor = ir.TensorProtocol


def is_sizable(tensor: Tensor) -> bool:
    """That a tensor is worth being kept apart."""
    return tensor.nbytes >= MIN_APART_BYTES and tensor.dtype != ir.DataType.STRING


@dataclass(frozen=True, eq=False)
class Message:
    """`proto` has all but the bytes of `weights`, which are by the name of the initializer."""

    proto: onnx.ModelProto
    weights: dict[str, Tensor]

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())

    def apart(self) -> Iterator[tuple[onnx.TensorProto, Tensor]]:
        """The empty tensors of the message in their order, each with what it stands for."""
        for proto in self.proto.graph.initializer:
            if proto.name in self.weights:
                yield proto, self.weights[proto.name]

    def filled(self) -> onnx.ModelProto:
        """The message with its weights. This uses it up: each weight is dropped when protobuf has its copy."""
        for proto, tensor in list(self.apart()):
            proto.raw_data = tensor.tobytes()
            del self.weights[proto.name]
        return self.proto

    def to_graph(self) -> ir.Model:
        """A model that shares the weights."""
        model = ir.serde.deserialize_model(self.proto)
        for name, tensor in self.weights.items():
            model.graph.initializers[name].const_value = tensor
        return model


def split(model: ir.Model, is_apart: Callable[[Tensor], bool] = is_sizable) -> Message:
    """The model as a message, with the weights that `is_apart` says apart. The model is as before."""
    kept = {
        value: value.const_value
        for value in model.graph.initializers.values()
        if value.const_value is not None and is_apart(value.const_value)
    }
    try:
        for value, tensor in kept.items():
            value.const_value = _Empty(tensor)
        proto = ir.serde.serialize_model(model)
    finally:
        for value, tensor in kept.items():
            value.const_value = tensor
    return Message(proto, {str(value.name): tensor for value, tensor in kept.items()})


def refer(proto: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Let an empty tensor of a message be bytes of a file."""
    proto.raw_data = b""
    onnx.external_data_helper.set_external_data(proto, location, offset=offset, length=length)
    proto.ClearField("raw_data")
    proto.data_location = onnx.TensorProto.EXTERNAL


class _Empty(ir.LazyTensor):
    """Type, shape and name of a tensor, and no bytes."""

    def __init__(self, like: Tensor) -> None:
        shape, notes = ir.Shape(like.shape.numpy()), dict(like.metadata_props)
        super().__init__(_nothing, like.dtype, shape, name=like.name, doc_string=like.doc_string, metadata_props=notes)

    def tobytes(self) -> bytes:
        return b""


def _nothing() -> Tensor:
    return ir.Tensor(np.empty(0, np.uint8))
