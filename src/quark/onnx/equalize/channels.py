"""Where tensors and layers have their channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.equalization.channels import CannotScaleError, Channels
from quark.onnx.graph import attribute, dimensions, input_value, is_constant, is_float, rank

Array: TypeAlias = NDArray[Any]
LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


@dataclass(frozen=True, eq=False)
class Layer:
    """A node that multiplies by a constant weight: in every group, `inputs` channels into `outputs`."""

    node: ir.Node
    weight: ir.Value
    groups: int
    outputs: int
    inputs: int
    is_input_first: bool  # the weight counts its input channels before its output channels

    @property
    def name(self) -> str:
        return str(self.node.name)

    @property
    def dtype(self) -> np.dtype[Any]:
        assert self.weight.dtype is not None
        return np.dtype(self.weight.dtype.numpy())

    @property
    def is_depthwise(self) -> bool:
        """That each channel becomes one channel."""
        return self.outputs == self.inputs == 1

    @property
    def source(self) -> tuple[ir.Value, Channels]:
        """The tensor that it reads."""
        value = self.node.inputs[0]
        assert value is not None
        return value, Channels(_channel_axis(self.node, value))

    @property
    def result(self) -> tuple[ir.Value, Channels]:
        """The tensor that it makes."""
        return self.node.outputs[0], Channels(_channel_axis(self.node, self.node.outputs[0]))

    def view(self, array: Array) -> Array:
        """A weight by group, output channel, input channel, and the rest."""
        sizes = (self.inputs, self.outputs) if self.is_input_first else (self.outputs, self.inputs)
        by_group = array.reshape(self.groups, *sizes, -1)
        return by_group.swapaxes(1, 2) if self.is_input_first else by_group

    def resembles(self, other: Layer) -> bool:
        """That the two read the same weight in the same way."""
        mine = (self.node.op_type, self.groups, self.outputs, self.inputs, self.is_input_first)
        return mine == (other.node.op_type, other.groups, other.outputs, other.inputs, other.is_input_first)


def layer_of(node: ir.Node) -> Layer:
    """The node as a layer; CannotScaleError where its weight is not a constant of a known form."""
    weight = input_value(node, 1)
    if weight is None or not is_constant(weight) or not is_float(weight) or weight.const_value is None:
        raise CannotScaleError("its weight is not constant")
    if weight.is_graph_output():
        raise CannotScaleError("its weight is an output of the graph")
    if is_constant(input_value(node, 0)):
        raise CannotScaleError("its input is constant")
    shape = tuple(weight.const_value.shape.numpy())
    if node.op_type in ("Conv", "ConvTranspose"):
        return _convolution(node, weight, shape)
    if len(shape) != 2 or 0 in shape or attribute(node, "transA", 0):
        raise CannotScaleError("it is not a product with one matrix from the right")
    is_input_first = not attribute(node, "transB", 0)
    inputs, outputs = shape if is_input_first else shape[::-1]
    return Layer(node, weight, 1, outputs, inputs, is_input_first)


def _convolution(node: ir.Node, weight: ir.Value, shape: tuple[int, ...]) -> Layer:
    groups = int(attribute(node, "group", 1))
    if len(shape) < 3 or 0 in shape or groups < 1 or shape[0] % groups:
        raise CannotScaleError("its weight does not fit its groups")
    first, second = shape[0] // groups, shape[1]
    if node.op_type == "Conv":
        return Layer(node, weight, groups, first, second, is_input_first=False)
    return Layer(node, weight, groups, second, first, is_input_first=True)


def _channel_axis(node: ir.Node, value: ir.Value) -> int:
    if node.op_type != "MatMul":
        return 1
    known = rank(value)
    if not known:
        raise CannotScaleError("the rank of its tensors is not known")
    return known - 1


def size_of(value: ir.Value, axis: int) -> int | None:
    """The size along an axis, where it is known."""
    known = dimensions(value)
    return known[axis] if known is not None and 0 <= axis < len(known) else None


def reach_of_channels(array: Array, channels: Channels) -> Array:
    """The largest magnitude of every channel of a constant."""
    before = int(np.prod(array.shape[: channels.axis]))
    magnitudes = np.abs(array.astype(np.float64)).reshape(before, array.shape[channels.axis] // channels.width, -1)
    reach: Array = magnitudes.max(axis=(0, 2))
    return reach


def along(scales: Array, channels: Channels, array_rank: int) -> Array:
    """The scales in a shape that multiplies a tensor of that rank."""
    return np.repeat(scales, channels.width).reshape(-1, *(1,) * (array_rank - channels.axis - 1))
