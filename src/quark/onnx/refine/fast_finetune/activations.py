"""What a layer's output goes through before it matters: the activation that alone reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import attribute, constant, dimensions, input_value, is_read_once, readers
from quark.reconstruction.problem import Activation, Bounds

_INFINITE = float("inf")


def activation_behind(node: ir.Node) -> tuple[Activation, ir.Value]:
    """The activation, and the value that comes out of it; None and the layer's own output where there is none, or none
    that training knows. A chain of bounds, such as Relu and Min, is one activation."""
    value, place = node.outputs[0], _channels(node)
    bounds: Bounds | None = None
    while (read := _only_reader(value)) is not None:
        reader, index = read
        found = _bounds(reader, index, place)
        if found is None:
            break
        bounds = found if bounds is None else _joined(bounds, found)
        value = reader.outputs[0]
    if bounds is not None:
        return bounds, value
    if read is not None:
        reader, index = read
        function = _FUNCTIONS.get(reader.op_type) if index == 0 and not reader.domain else None
        if function is not None:
            return function(reader), reader.outputs[0]
    return None, value


def _only_reader(value: ir.Value) -> tuple[ir.Node, int] | None:
    """The one input that reads the value, in the same graph: a branch that captures it is not always computed."""
    if not is_read_once(value):
        return None
    reader, index = readers(value)[0]
    return (reader, index) if reader.graph is value.graph else None


def _channels(node: ir.Node) -> tuple[int, int] | None:
    """How many numbers a row gives, and how many axes are behind theirs; None where they are not along one axis."""
    weight = dimensions(node.inputs[1])
    if weight is None:
        return None
    if node.op_type in ("Conv", "ConvTranspose"):
        groups = int(attribute(node, "group", 1)) if node.op_type == "ConvTranspose" else 1
        count = weight[1] if node.op_type == "ConvTranspose" else weight[0]
        return None if count is None else (count * groups, len(weight) - 2)
    if node.op_type == "InstanceNormalization":
        sizes = dimensions(node.inputs[0])
        return None if sizes is None or weight[0] is None else (weight[0], len(sizes) - 2)
    if node.op_type == "LayerNormalization" and any(size != 1 for size in weight[:-1]):
        return None
    count = weight[0] if node.op_type == "Gemm" and attribute(node, "transB", 0) else weight[-1]
    return None if count is None else (count, 0)


def _bounds(node: ir.Node, index: int, place: tuple[int, int] | None) -> Bounds | None:
    if node.domain or (index and node.op_type not in ("Min", "Max")):
        return None
    if node.op_type == "Relu":
        return Bounds(0.0, _INFINITE)
    if node.op_type == "Clip":
        low, high = (_number(node, each) for each in (1, 2))
        return None if low is None or high is None else Bounds(low, high)
    if node.op_type in ("Min", "Max") and len(node.inputs) == 2:
        values = constant(node.inputs[1 - index])
        if values is None or not _is_by_channel(values, place):
            return None
        flat = values.astype(np.float32).reshape(-1)
        return Bounds(-_INFINITE, flat) if node.op_type == "Min" else Bounds(flat, _INFINITE)
    return None


def _number(node: ir.Node, index: int) -> float | None:
    """A bound of Clip; infinite where it is left out, None where it is computed."""
    value = input_value(node, index)
    if value is None:
        return -_INFINITE if index == 1 else _INFINITE
    values = constant(value)
    return None if values is None else float(values.reshape(-1)[0])


def _is_by_channel(values: Any, place: tuple[int, int] | None) -> bool:
    """One number, or one for each channel, with as many axes behind them."""
    if values.size == 1 or place is None:
        return bool(values.size == 1)
    count, behind = place
    return bool(values.size == count and values.ndim > behind and values.shape[values.ndim - 1 - behind] == count)


def _joined(first: Bounds, second: Bounds) -> Bounds:
    """The second after the first."""
    lowest = np.clip(first.lowest, second.lowest, second.highest)
    highest = np.clip(first.highest, second.lowest, second.highest)
    return Bounds(lowest, highest)


def _leaky_relu(node: ir.Node) -> Callable[[Any], Any]:
    alpha = float(attribute(node, "alpha", 0.01))
    return lambda x: x.clamp(min=0) + alpha * x.clamp(max=0)


def _hard_sigmoid(node: ir.Node) -> Callable[[Any], Any]:
    alpha, beta = float(attribute(node, "alpha", 0.2)), float(attribute(node, "beta", 0.5))
    return lambda x: (alpha * x + beta).clamp(0, 1)


def _gelu(node: ir.Node) -> Callable[[Any], Any]:
    if str(attribute(node, "approximate", "none")) == "tanh":
        return lambda x: 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())
    return lambda x: 0.5 * x * (1 + (x * math.sqrt(0.5)).erf())


_FUNCTIONS: Mapping[str, Callable[[ir.Node], Callable[[Any], Any]]] = {
    "LeakyRelu": _leaky_relu,
    "Sigmoid": lambda node: lambda x: x.sigmoid(),
    "Tanh": lambda node: lambda x: x.tanh(),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": lambda node: lambda x: x * (x / 6 + 0.5).clamp(0, 1),
    "Gelu": _gelu,
}
