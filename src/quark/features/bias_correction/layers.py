"""The layers whose bias can be corrected, and where that bias is, in a graph of either road.

Conv, ConvTranspose and Gemm have a bias of their own; a MatMul has the constant of the Add behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from quark.decide.view import Array, Graph, Node, Value
from quark.plan import Choice, Reader, SkippedNode

NAME = "bias correction"
LAYER_TYPES = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer that is quantized. `data` and `weight` are how its operands are rounded; None: in float. Its bias is read
    by `adder`, as input `bias_index`: by itself, or for a MatMul by the Add behind it."""

    node: Node
    data: Choice | None
    weight: Choice | None
    adder: Node
    bias_index: int

    @property
    def name(self) -> str:
        return self.node.label

    @property
    def input(self) -> str:
        """The tensor that it reads."""
        value = self.node.inputs[0]
        assert value is not None
        return value.name

    @property
    def output(self) -> str:
        """The tensor that the bias is added to."""
        return self.adder.outputs[0].name

    @property
    def bias(self) -> Value:
        value = self.adder.inputs[self.bias_index]
        assert value is not None
        return value

    def weights(self) -> Array:
        """The weight that inference multiplies by."""
        value = self.node.inputs[1]
        assert value is not None
        assert value.constant is not None
        return value.constant.array()

    def skipped(self, reason: str) -> SkippedNode:
        return SkippedNode(self.name, self.node.op_type, reason)


def corrected_layers(
    graph: Graph, choices: Mapping[Reader, Choice], obstacle: Callable[[Node], str | None]
) -> tuple[list[Layer], list[SkippedNode]]:
    """The quantized layers whose bias can take a correction; the others with the reason. `choices` says how operands
    are read, `obstacle` why a layer cannot be corrected for a reason that its inputs do not show."""
    layers: list[Layer] = []
    left: list[SkippedNode] = []
    for node in graph:
        if node.op_type not in LAYER_TYPES or not node.is_standard:
            continue
        data, weight = choices.get(Reader(node.name, 0)), choices.get(Reader(node.name, 1))
        if data is None and weight is None:
            continue
        place = bias_place(node, obstacle)
        if isinstance(place, str):
            left.append(SkippedNode(node.label, node.op_type, place))
        else:
            layers.append(Layer(node, data, weight, *place))
    return layers, left


def bias_place(node: Node, obstacle: Callable[[Node], str | None]) -> tuple[Node, int] | str:
    """The node that adds the bias of a layer, and the number of that input; or why there is none to correct."""
    weight = node.input(1)
    if weight is None or weight.constant is None:
        return "has no constant weight"
    reason = obstacle(node)
    if reason is not None:
        return reason
    channels = output_channels(node, weight.constant.shape)
    if node.op_type != "MatMul":
        bias = node.input(2)
        if (
            bias is None
            or bias.constant is None
            or bias.constant.shape != (channels,)
            or node.setting("beta", 1.0) != 1
        ):
            return "its bias is computed, or not one number a channel"
        return node, 2
    result = node.outputs[0]
    if len(result.readers) == 1 and not result.outputs:
        add, index = result.readers[0]
        value = add.input(1 - index) if add.op_type == "Add" else None
        is_alone = value is not None and len(value.readers) == 1 and not value.outputs
        if is_alone and value is not None and value.constant is not None and value.constant.shape == (channels,):
            return add, 1 - index
    return "no bias is added to its result"


def output_channels(node: Node, shape: tuple[int, ...]) -> int:
    """The number of output channels of a layer with a weight of that shape."""
    if node.op_type == "ConvTranspose":
        return shape[1] * int(node.setting("group", 1))
    is_first = node.op_type == "Conv" or (node.op_type == "Gemm" and node.setting("transB", 0))
    return shape[0 if is_first else -1]


def middle_mean(values: Array) -> Array:
    """The mean over the first axis without the lowest and the highest quarter: a few samples with a value far outside
    the range would otherwise decide the bias of all others."""
    cut = len(values) // 4
    return np.asarray(np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0))


def phrase(layer: Layer, correction: Array) -> str:
    """A phrase about what was done to a layer, for the account."""
    return f"{layer.name}: by at most {np.abs(correction).max(initial=0.0):.3g}"
