"""Layers whose input can be smoothed, in the groups that must have the same scales.

A layer is a MatMul, Gemm, Conv or ConvTranspose with a constant weight. Layers that read the same tensor share its
scales, and so do layers that share a weight: a weight has one set of rows. A weight that something else reads as well,
such as the table of an embedding, stays as it is, with its layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.equalization.smooth import LayerWeight
from quark.onnx.graph import (
    attribute,
    dimensions,
    input_value,
    is_constant,
    is_float,
    nodes,
    rank,
    readers,
)
from quark.onnx.large_tensors import whole
from quark.plan import SkippedNode

Array = np.ndarray[Any, Any]
Use = tuple[str, int, int]

LAYER_TYPES = ("MatMul", "Gemm", "Conv", "ConvTranspose")


@dataclass(frozen=True, eq=False)
class Layer:
    """A node that sums over `axis` (from the end) of input number `data`, with the rows of a constant weight."""

    node: ir.Node
    data: int
    axis: int
    row_axis: int  # of the weight; for a Conv within its group

    @property
    def tensor(self) -> ir.Value:
        value = self.node.inputs[self.data]
        assert value is not None
        return value

    @property
    def weight(self) -> ir.Value:
        value = self.node.inputs[1 - self.data]
        assert value is not None
        return value

    @property
    def use(self) -> Use:
        """How the weight is read: layers that read it alike can share scales."""
        return self.node.op_type, self.row_axis, self.groups

    @property
    def is_conv(self) -> bool:
        return self.node.op_type in ("Conv", "ConvTranspose")

    @property
    def groups(self) -> int:
        return int(attribute(self.node, "group", 1))

    def arranged(self) -> LayerWeight:
        """The weight by groups, input channels, outputs and taps."""
        weight = self._array()
        if self.node.op_type == "Conv":
            return LayerWeight.of(self._by_group(weight).transpose(0, 2, 1, 3))
        if self.node.op_type == "ConvTranspose":
            return LayerWeight.of(weight.reshape(self.groups, weight.shape[0] // self.groups, weight.shape[1], -1))
        rows = np.moveaxis(weight, self.row_axis, 0)
        return LayerWeight.of(rows.reshape(1, rows.shape[0], -1, 1))

    def scaled(self, scales: Array) -> Array:
        """The weight with its rows multiplied, in float64."""
        weight = self._array().astype(np.float64)
        if self.node.op_type == "Conv":
            product = self._by_group(weight) * scales.reshape(self.groups, 1, -1, 1)
            return np.asarray(product.reshape(weight.shape))
        shape = [1] * weight.ndim
        shape[self.row_axis] = -1
        return np.asarray(weight * scales.reshape(shape))

    def _array(self) -> Array:
        assert self.weight.const_value is not None
        return whole(self.weight.const_value)

    def _by_group(self, weight: Array) -> Array:
        return weight.reshape(self.groups, weight.shape[0] // self.groups, weight.shape[1], -1)


@dataclass(frozen=True, eq=False)
class Group:
    """Layers with the same scales, in the order of the graph."""

    layers: tuple[Layer, ...]

    @property
    def tensors(self) -> dict[str, ir.Value]:
        return {str(layer.tensor.name): layer.tensor for layer in self.layers}

    @property
    def names(self) -> str:
        return ", ".join(str(layer.node.name) for layer in self.layers)

    def layers_of(self, value: ir.Value) -> list[Layer]:
        return [layer for layer in self.layers if layer.tensor is value]


def find_groups(model: ir.Model) -> tuple[list[Group], list[SkippedNode]]:
    """All groups in the order of their first layers, and the layers that cannot be smoothed, with the reason."""
    layers: list[Layer] = []
    left: list[SkippedNode] = []
    axes: dict[ir.Value, int] = {}
    for node in nodes(model):
        if node.op_type not in LAYER_TYPES or node.domain:
            continue
        found = _layer(node)
        if isinstance(found, Layer) and axes.setdefault(found.tensor, found.axis) != found.axis:
            found = f"sums over another axis of '{found.tensor.name}' than the layers before it"
        if isinstance(found, Layer):
            layers.append(found)
        else:
            left.append(_skipped(node, found))
    uses = {(layer.node, 1 - layer.data): layer.use for layer in layers}
    obstacles = [_other_reader(layer, uses) for layer in layers]
    left += [_skipped(layer.node, reason) for layer, reason in zip(layers, obstacles, strict=True) if reason]
    return _grouped([layer for layer, reason in zip(layers, obstacles, strict=True) if not reason]), left


def _skipped(node: ir.Node, reason: str) -> SkippedNode:
    return SkippedNode(str(node.name), node.op_type, reason)


def _layer(node: ir.Node) -> Layer | str:
    """The layer, or the reason why the node is none that can be smoothed."""
    inputs = input_value(node, 0), input_value(node, 1)
    constants = [is_constant(value) for value in inputs]
    if all(constants):
        return "its input is a constant"
    if node.op_type != "MatMul" and not constants[1]:
        return "its weight is not constant"
    if not any(constants):
        return "both operands are activations"
    data = constants.index(False)
    value, weight = inputs[data], inputs[1 - data]
    if value is None or weight is None or not is_float(weight):
        return "computes on integers"
    shape = dimensions(weight) or ()
    return _axes(node, data, value, len(shape)) if all(shape) else "its weight is empty"


def _axes(node: ir.Node, data: int, value: ir.Value, weight_rank: int) -> Layer | str:
    if node.op_type in ("Conv", "ConvTranspose"):
        return Layer(node, data, 1 - weight_rank, 1 if node.op_type == "Conv" else 0)
    if node.op_type == "Gemm":
        axis, row = (-2 if attribute(node, "transA", 0) else -1), (1 if attribute(node, "transB", 0) else 0)
        return Layer(node, data, axis, row)
    if data == 0:
        return Layer(node, data, -1, max(weight_rank - 2, 0))
    if rank(value) is None:
        return "the shape of its input is not known"
    return Layer(node, data, -1 if rank(value) == 1 else -2, weight_rank - 1)


def _other_reader(layer: Layer, uses: Mapping[tuple[ir.Node, int], Use]) -> str:
    """What reads the weight in another way; empty where nothing does."""
    if layer.weight.is_graph_output():
        return "its weight is an output of the model"
    for node, index in readers(layer.weight):
        if uses.get((node, index)) != layer.use:
            return f"its weight is also read by '{node.name}' in another way"
    return ""


def _grouped(layers: Sequence[Layer]) -> list[Group]:
    """Layers that are connected by tensors or weights that they share."""
    members: dict[ir.Value, list[Layer]] = {}
    for layer in layers:
        joined = members.get(layer.tensor, [])
        others = members.get(layer.weight, [])
        if others is not joined:
            joined = joined + others
        joined.append(layer)
        members.update(dict.fromkeys((value for each in joined for value in (each.tensor, each.weight)), joined))
    position = {layer: i for i, layer in enumerate(layers)}
    distinct = {id(group): sorted(group, key=position.__getitem__) for group in members.values()}
    return sorted((Group(tuple(group)) for group in distinct.values()), key=lambda group: position[group.layers[0]])
