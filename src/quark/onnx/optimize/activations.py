"""Rewrites of activations and bounds: Gelu, Relu, Clip, Max and Min."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import (
    add_initializer,
    become,
    bypass,
    clip_bounds,
    input_value,
    is_constant,
    is_float,
    is_read_once,
    nodes,
    opset,
    rank,
    readers,
)
from quark.onnx.optimize.rewrite import made_by, per_node, scalar
from quark.text import get_logger

GELU_OPSET = 20
TOLERANCE = 1e-3  # relative: exporters write the constants of Gelu with four digits or with seven

_log = get_logger(__name__)

# ---- fuse_gelu ----


def fuse_gelu(model: ir.Model) -> int:
    """Fuse the nodes of a decomposed Gelu into the operator Gelu.

        x * 0.5 * (1 + erf(x / sqrt(2)))                                 becomes   Gelu(x)
        x * 0.5 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))        becomes   Gelu(x, approximate="tanh")

    with the products in any order. Applies from opset 20 on, which has the operator, when nothing else reads the
    intermediate values.
    """
    matches = [match for node in nodes(model) if (match := _match_gelu(node)) is not None]
    if opset(model) < GELU_OPSET:
        if matches:
            _log.info("%d Gelu stay decomposed: Gelu needs opset 20, the model has %d", len(matches), opset(model))
        return 0
    for last, x, approximate in matches:
        become(last, "Gelu", [x], {"approximate": approximate})
    return len(matches)


def _match_gelu(node: ir.Node) -> tuple[ir.Node, ir.Value, str] | None:
    """The last node of a Gelu around this Erf or Tanh, its input, and which approximation it is."""
    if node.domain or node.op_type not in ("Erf", "Tanh"):
        return None
    x = _tanh_argument(node) if node.op_type == "Tanh" else None
    if node.op_type == "Erf":
        value = input_value(node, 0)
        div = made_by(value, "Div")
        if div is not None and _is_near(scalar(input_value(div, 1)), math.sqrt(2)):
            x = input_value(div, 0)
        else:
            x = _other_operand(made_by(value, "Mul"), math.sqrt(0.5))
    plus_one = _only_reader(node)
    if x is None or plus_one is None or plus_one.op_type != "Add":
        return None
    if not any(scalar(value) == 1.0 for value in plus_one.inputs):
        return None
    last = _times_half_x(plus_one, x)
    return None if last is None else (last, x, "none" if node.op_type == "Erf" else "tanh")


def _tanh_argument(tanh: ir.Node) -> ir.Value | None:
    inner = made_by(_other_operand(made_by(input_value(tanh, 0), "Mul"), math.sqrt(2 / math.pi)), "Add")
    if inner is None:
        return None
    for index in (0, 1):
        x = input_value(inner, 1 - index)
        cube = _other_operand(made_by(input_value(inner, index), "Mul"), 0.044715)
        if x is not None and cube is not None and _is_cube(cube, x):
            return x
    return None


def _is_cube(value: ir.Value, x: ir.Value) -> bool:
    power, product = made_by(value, "Pow"), made_by(value, "Mul")
    if power is not None:
        return input_value(power, 0) is x and scalar(input_value(power, 1)) == 3
    if product is None:
        return False
    for index in (0, 1):
        square = made_by(input_value(product, index), "Mul")
        is_square = square is not None and input_value(square, 0) is x and input_value(square, 1) is x
        if is_square and input_value(product, 1 - index) is x:
            return True
    return False


def _times_half_x(node: ir.Node, x: ir.Value) -> ir.Node | None:
    """The node at which the product of this one with x and 0.5 is complete, following its only readers."""
    has_x = has_half = False
    while not (has_x and has_half):
        reader = _only_reader(node)
        if reader is None or reader.op_type != "Mul" or reader.domain:
            return None
        other = next((value for value in reader.inputs if value is not node.outputs[0]), None)
        if other is x and not has_x:
            has_x = True
        elif _is_near(scalar(other), 0.5) and not has_half:
            has_half = True
        elif _other_operand(made_by(other, "Mul"), 0.5) is x and not has_x and not has_half:
            has_x = has_half = True
        else:
            return None
        node = reader
    return node


def _only_reader(node: ir.Node) -> ir.Node | None:
    if not is_read_once(node.outputs[0]):
        return None
    reader = readers(node.outputs[0])[0][0]
    return reader if reader.graph is node.graph else None


def _other_operand(node: ir.Node | None, number: float) -> ir.Value | None:
    """The operand beside the constant `number` of a node with two inputs."""
    for index in (0, 1):
        if node is not None and _is_near(scalar(input_value(node, index)), number):
            return input_value(node, 1 - index)
    return None


def _is_near(number: float | None, wanted: float) -> bool:
    return number is not None and math.isclose(number, wanted, rel_tol=TOLERANCE)


# ---- relu_forms ----


@per_node("Max", "Min", "Relu", "Clip")
def relu_forms(model: ir.Model, node: ir.Node) -> bool:
    """Turn the many ways to bound a tensor into one Relu or one Clip.

        Max(x, 0)                       Relu(x)
        Min(Max(x, a), b)               Clip(x, a, b)     a <= b
        Max(Min(x, b), a)               Clip(x, a, b)     a <= b
        Relu(Relu(x))                   Relu(x)
        Clip(Relu(x), a, b)             Clip(x, max(a, 0), b)     0 <= b
        Relu(Clip(x, a, b))             Clip(x, max(a, 0), b)     0 <= b

    Applies to float tensors and constant numbers; the inner node must have one reader. A NaN stays or becomes a bound,
    as with the runtime's Max, Min, Relu and Clip.
    """
    if node.op_type in ("Max", "Min"):
        bounded = _bounded(node)
        if bounded is None:
            return False
        value, bound = bounded
        inner = _inner(value, "Min" if node.op_type == "Max" else "Max")
        below = _bounded(inner) if inner is not None else None
        if below is not None:
            low, high = (bound, below[1]) if node.op_type == "Max" else (below[1], bound)
            if low <= high:
                _become_clip(model, node, below[0], low, high)
                return True
        if node.op_type != "Max" or bound != 0:
            return False
        become(node, "Relu", [value])
        return True
    inner = _inner(input_value(node, 0), "Relu")
    if node.op_type == "Relu":
        if inner is not None:
            return bypass(inner)
        inner = _inner(input_value(node, 0), "Clip")
    source = input_value(inner, 0) if inner is not None else None
    clip = node if node.op_type == "Clip" else inner
    bounds = clip_bounds(clip) if clip is not None else None
    if source is None or bounds is None or bounds[1] < 0:
        return False
    _become_clip(model, node, source, max(bounds[0], 0.0), bounds[1])
    return True


def _bounded(node: ir.Node) -> tuple[ir.Value, float] | None:
    """The tensor and the number of a Max or Min of two, if the number does not change the shape."""
    if len(node.inputs) != 2:
        return None
    for index in (0, 1):
        value, bound = input_value(node, 1 - index), scalar(input_value(node, index))
        if value is None or bound is None or not is_float(value) or is_constant(value):
            continue
        if (rank(input_value(node, index)) or 0) <= (rank(value) or 0):
            return value, bound
    return None


def _inner(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node of that operator that computes the float value for a single reader."""
    return made_by(value, op_type) if value is not None and is_float(value) and is_read_once(value) else None


def _become_clip(model: ir.Model, node: ir.Node, source: ir.Value, low: float, high: float) -> None:
    assert source.dtype is not None
    dtype = source.dtype.numpy()

    def bound(number: float, name: str) -> ir.Value | None:
        if not np.isfinite(number):
            return None
        array: np.ndarray[Any, Any] = np.array(number, dtype)
        return add_initializer(model, f"{node.name}_{name}", array)

    top = bound(high, "max")
    become(node, "Clip", [source, bound(low, "min")] + ([top] if top is not None else []))


# ---- clip_to_relu ----


@per_node("Clip")
def clip_to_relu(model: ir.Model, clip: ir.Node) -> bool:
    """Turn a Clip that only cuts off negative numbers into a Relu.

        Clip(x, 0, top) = max(x, 0)   if there is no `top`, or it is the largest number of the type

    Applies to float tensors with constant bounds.
    """
    value = input_value(clip, 0)
    if value is None or not is_float(value) or scalar(input_value(clip, 1)) != 0:
        return False
    if input_value(clip, 2) is not None:
        top = scalar(input_value(clip, 2))
        if value.dtype == ir.DataType.BFLOAT16:
            largest = 3.3895313892515355e38
        else:
            largest = float(np.finfo(np.float32 if value.dtype is None else value.dtype.numpy()).max)
        if top is None or top < largest:
            return False
    become(clip, "Relu", [value])
    return True


# ---- replace_clip6_relu ----


@per_node("Clip")
def replace_clip6_relu(model: ir.Model, clip: ir.Node) -> bool:
    """Turn Clip(x, 0, 6) into Relu(x), so that channels in front of it can be rescaled freely. Not exact.

        Clip(x, 0, 6) = Relu(x)   only if x <= 6

    The one rewrite that changes the function, so it has to be enabled. Networks that were trained with the bound lose
    accuracy, some of them much; for most, equalization that keeps the bound is the better choice.

    Applies to float tensors with constant bounds of 0 and 6.
    """
    lowest, highest = scalar(input_value(clip, 1)), scalar(input_value(clip, 2))
    if not is_float(input_value(clip, 0)) or lowest != 0 or highest != 6:
        return False
    become(clip, "Relu", [input_value(clip, 0)])
    return True
