"""The layers whose bias can be corrected, and where that bias is.

Conv, ConvTranspose and Gemm have one; `give_biases` gives them one of zeros where it is missing, and one of their own
where layers share it. MatMul has the constant of the Add behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.graph import add_initializer, attribute, constant, input_value, is_read_once, readers, replace_input
from quark.onnx.refine.taps import Taps, taps_of
from quark.plan import Choice, QuantizationPlan, Reader, SkippedNode

LAYER_TYPES = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer that the plan quantizes. `data` and `weight` are how it sees its operands; None: in float."""

    node: ir.Node
    taps: Taps
    data: Choice | None
    weight: Choice | None
    bias_of: Reader

    @property
    def name(self) -> str:
        return str(self.node.name)

    @property
    def input(self) -> str:
        return str(self.node.inputs[0].name)  # type: ignore[union-attr]

    @property
    def output(self) -> str:
        """The tensor that the bias is added to: of the layer, or of the Add behind it."""
        is_own = self.bias_of.node == self.name
        node = self.node if is_own else readers(self.node.outputs[0])[0][0]
        return str(node.outputs[0].name)

    @property
    def has_space(self) -> bool:
        """That channels are along axis 1, with space behind them; otherwise they are the last axis."""
        return bool(self.taps.windows)

    @property
    def weights(self) -> NDArray[Any]:
        values = constant(self.node.inputs[1])
        assert values is not None, self.name
        return values


def give_biases(model: ir.Model) -> None:
    """Let every Conv, ConvTranspose and Gemm have a constant bias of its own, zeros where it has none."""
    for node in model.graph:
        weight = constant(input_value(node, 1)) if node.op_type in LAYER_TYPES[:3] and not node.domain else None
        if weight is None or taps_of(node, weight) is None:
            continue
        bias = input_value(node, 2)
        values = constant(bias)
        if bias is not None and (values is None or is_read_once(bias)):
            continue
        own = np.zeros(_output_channels(node, weight), weight.dtype) if values is None else values.copy()
        replace_input(node, 2, add_initializer(model, f"{node.name}_bias", own))


def layer_inputs(model: ir.Model) -> list[str]:
    """The tensors that layers with constant weights read."""
    nodes = [each for each in model.graph if each.op_type in LAYER_TYPES and not each.domain]
    values = [each.inputs[0] for each in nodes if constant(each.inputs[1]) is not None and each.inputs[0] is not None]
    return list(dict.fromkeys(str(value.name) for value in values if constant(value) is None))


def layer_outputs(model: ir.Model) -> list[str]:
    """The tensors that biases of layers with constant weights are added to."""
    nodes = [each for each in model.graph if each.op_type in LAYER_TYPES and not each.domain]
    found = [_layer(each, None, None) for each in nodes if constant(each.inputs[1]) is not None]
    return list(dict.fromkeys(each.output for each in found if isinstance(each, Layer)))


def layers(model: ir.Model, plan: QuantizationPlan) -> tuple[list[Layer], list[SkippedNode]]:
    """The layers that the plan quantizes and whose bias can take a correction; the others with the reason."""
    choices = {(reader.node, reader.index): each.choice for each in plan for reader in each.readers}
    found: list[Layer] = []
    left: list[SkippedNode] = []
    for node in model.graph:
        if node.op_type not in LAYER_TYPES or node.domain:
            continue
        data, weight = choices.get((str(node.name), 0)), choices.get((str(node.name), 1))
        if data is None and weight is None:
            continue
        layer = _layer(node, data, weight)
        if isinstance(layer, str):
            left.append(SkippedNode(str(node.name), node.op_type, layer))
        else:
            found.append(layer)
    return found, left


def _layer(node: ir.Node, data: Choice | None, weight: Choice | None) -> Layer | str:
    values = constant(node.inputs[1])
    if values is None:
        return "has no constant weight"
    taps = taps_of(node, values)
    if taps is None:
        return "the shape of its output is given, not computed" if node.op_type == "ConvTranspose" else "many matrices"
    bias_of = _bias_of(node, _output_channels(node, values))
    return bias_of if isinstance(bias_of, str) else Layer(node, taps, data, weight, bias_of)


def _bias_of(node: ir.Node, channels: int) -> Reader | str:
    if node.op_type != "MatMul":
        values = constant(input_value(node, 2))
        is_plain = values is not None and values.shape == (channels,) and attribute(node, "beta", 1.0) == 1.0
        return Reader(str(node.name), 2) if is_plain else "its bias is computed, or not one number a channel"
    for add, index in readers(node.outputs[0]) if is_read_once(node.outputs[0]) else ():
        value = input_value(add, 1 - index)
        values = constant(value) if add.op_type == "Add" else None
        if value is not None and values is not None and values.shape == (channels,) and is_read_once(value):
            return Reader(str(add.name), 1 - index)
    return "nothing is added to its result"


def _output_channels(node: ir.Node, weight: NDArray[Any]) -> int:
    if node.op_type == "Conv":
        return int(weight.shape[0])
    if node.op_type == "ConvTranspose":
        return int(weight.shape[1]) * int(attribute(node, "group", 1))
    if node.op_type == "Gemm" and attribute(node, "transB", 0):
        return int(weight.shape[0])
    return int(weight.shape[-1])


def inputs_of(found: list[Layer]) -> Iterator[tuple[str, list[Layer]]]:
    """Every tensor that layers read, with those layers."""
    by_tensor: dict[str, list[Layer]] = {}
    for layer in found:
        by_tensor.setdefault(layer.input, []).append(layer)
    yield from by_tensor.items()
