"""Fuse decomposed normalizations into LayerNormalization, InstanceNormalization and LpNormalization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import (
    add_initializer,
    attribute,
    become,
    constant,
    dimensions,
    input_value,
    is_read_once,
    nodes,
    opset,
    rank,
    readers,
)
from quark.onnx.optimize.rewrite import integers, made_by, per_node, reduction_axes, scalar, squared
from quark.text import get_logger

LAYER_NORM_OPSET = 17
MAX_BOUND = 1.01e-12  # of a norm: 1e-12 in float32, with a margin

_log = get_logger(__name__)
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Normalization:
    """d / sqrt(mean(d^2) + epsilon) with d = x - mean(x). `last` computes the result; if constants scale and shift it
    afterwards, `affine_last` computes that result."""

    x: ir.Value
    axes: list[int]
    epsilon: float
    last: ir.Node
    scale: Array | None
    shift: Array | None
    affine_last: ir.Node


# ---- fuse_layer_norm ----


def fuse_layer_norm(model: ir.Model) -> int:
    """Fuse a decomposed layer normalization into LayerNormalization.

        (x - mean(x)) / sqrt(mean((x - mean(x))^2) + e) * g + b   becomes   LayerNormalization(x, g, b)

    Applies from opset 17 on, which has the operator, when the means are over the last axes, the sizes of these are
    known, and g and b are constants of the shape of these axes or narrower (either may be missing).
    """
    matches = [match for match in _normalizations(model) if _normalized_shape(match) is not None]
    if opset(model) < LAYER_NORM_OPSET:
        if matches:
            text = "%d layer normalizations stay decomposed: LayerNormalization needs opset 17, the model has %d"
            _log.info(text, len(matches), opset(model))
        return 0
    return sum(_to_layer_norm(model, match) for match in matches)


def _normalized_shape(match: Normalization) -> tuple[int, ...] | None:
    """The sizes of the last axes, if these are the axes of the means."""
    dims = dimensions(match.x)
    if dims is None or match.axes != list(range(len(dims) - len(match.axes), len(dims))):
        return None
    sizes = [dims[axis] for axis in match.axes]
    known = [size for size in sizes if size is not None]
    return tuple(known) if len(known) == len(sizes) else None


def _to_layer_norm(model: ir.Model, match: Normalization) -> bool:
    shape, dtype = _normalized_shape(match), match.x.dtype
    if shape is None or dtype is None:
        return False

    def fits(array: Array | None) -> bool:
        if array is None:
            return True
        sizes = zip(reversed(array.shape), reversed(shape), strict=False)
        return array.ndim <= len(shape) and all(size in (1, full) for size, full in sizes)

    scale, shift, last = match.scale, match.shift, match.affine_last
    if not (fits(scale) and fits(shift)):
        scale, shift, last = None, None, match.last
    kind = dtype.numpy()
    gamma = np.ones(shape, kind) if scale is None else np.broadcast_to(scale, shape).astype(kind)
    inputs = [match.x, add_initializer(model, f"{last.name}_scale", gamma)]
    if shift is not None:
        inputs.append(add_initializer(model, f"{last.name}_bias", np.broadcast_to(shift, shape).astype(kind)))
    become(last, "LayerNormalization", inputs, {"axis": -len(shape), "epsilon": match.epsilon})
    return True


# ---- fuse_instance_norm ----


def fuse_instance_norm(model: ir.Model) -> int:
    """Fuse a decomposed instance normalization into InstanceNormalization.

        (x - mean(x)) / sqrt(mean((x - mean(x))^2) + e) * g + b   becomes   InstanceNormalization(x, g, b)

    Applies when the means are over all axes from the third on, the number of channels is known, and g and b are
    constants with one number for each channel, or a single one (either may be missing).
    """
    count = 0
    for match in _normalizations(model):
        dims, dtype = dimensions(match.x), match.x.dtype
        if dims is None or dtype is None or len(dims) < 3 or dims[1] is None or match.axes != list(range(2, len(dims))):
            continue
        last = match.affine_last
        scale = _by_channel(match.scale, 1.0, dims[1], len(dims))
        shift = _by_channel(match.shift, 0.0, dims[1], len(dims))
        if scale is None or shift is None:
            last, scale, shift = match.last, np.ones(dims[1]), np.zeros(dims[1])
        kind = dtype.numpy()
        inputs = [
            match.x,
            add_initializer(model, f"{last.name}_scale", scale.astype(kind)),
            add_initializer(model, f"{last.name}_bias", shift.astype(kind)),
        ]
        become(last, "InstanceNormalization", inputs, {"epsilon": match.epsilon})
        count += 1
    return count


def _by_channel(array: Array | None, missing: float, channels: int, rank: int) -> Array | None:
    """One number for each channel, if the constant varies along no other axis."""
    if array is None:
        return np.full(channels, missing)
    if array.ndim > rank:
        return None
    shape = (1,) * (rank - array.ndim) + array.shape
    is_by_channel = shape[1] in (1, channels) and all(size == 1 for axis, size in enumerate(shape) if axis != 1)
    return np.broadcast_to(array.reshape(-1), (channels,)) if is_by_channel else None


# ---- what layer and instance normalization have in common ----


def _normalizations(model: ir.Model) -> list[Normalization]:
    """The normalizations of the main graph that were decomposed into

        d = x - mean(x);   y = d / sqrt(mean(d^2) + e)

    with the means over the same axes, kept as dimensions. The square may be Pow(d, 2) or Mul(d, d), the quotient Div or
    a product with Reciprocal, and the subtraction may be there twice.
    """
    matches = []
    for node in nodes(model):
        numerator, denominator = _quotient(node)
        sqrt = made_by(denominator, "Sqrt")
        total = made_by(input_value(sqrt, 0), "Add") if sqrt is not None else None
        variance, epsilon = _with_number(total)
        mean_square = made_by(variance, "ReduceMean")
        x, axes = _centred(model, numerator)
        if x is None or axes is None or mean_square is None or epsilon is None:
            continue
        deviation = squared(input_value(mean_square, 0))
        if deviation is None or _centred(model, deviation) != (x, axes) or _kept_axes(model, mean_square) != axes:
            continue
        last, matched = node, {}
        for op_type in ("Mul", "Add"):  # constants, as long as nothing else reads the result
            reader, index = readers(last.outputs[0])[0] if is_read_once(last.outputs[0]) else (None, 0)
            if reader is None or reader.graph is not last.graph or reader.op_type != op_type or reader.domain:
                continue
            array = constant(input_value(reader, 1 - index))
            if array is not None:
                last, matched[op_type] = reader, array
        matches.append(Normalization(x, axes, epsilon, node, matched.get("Mul"), matched.get("Add"), last))
    return matches


def _quotient(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """Numerator and denominator, if the node computes a quotient."""
    if node.domain:
        return None, None
    if node.op_type == "Div":
        return input_value(node, 0), input_value(node, 1)
    if node.op_type == "Mul":
        for index in (0, 1):
            reciprocal = made_by(input_value(node, index), "Reciprocal")
            if reciprocal is not None:
                return input_value(node, 1 - index), input_value(reciprocal, 0)
    return None, None


def _with_number(node: ir.Node | None) -> tuple[ir.Value | None, float | None]:
    """The tensor and the number that a node of two inputs has, in either order."""
    for index in (0, 1):
        number = scalar(input_value(node, index)) if node is not None else None
        if node is not None and number is not None:
            return input_value(node, 1 - index), number
    return None, None


def _centred(model: ir.Model, value: ir.Value | None) -> tuple[ir.Value | None, list[int] | None]:
    """x and the axes, if the value is x - mean(x)."""
    sub = made_by(value, "Sub")
    mean = made_by(input_value(sub, 1), "ReduceMean") if sub is not None else None
    if sub is None or mean is None or input_value(mean, 0) is not input_value(sub, 0):
        return None, None
    return input_value(sub, 0), _kept_axes(model, mean)


def _kept_axes(model: ir.Model, mean: ir.Node) -> list[int] | None:
    return reduction_axes(model, mean) if attribute(mean, "keepdims", 1) else None


# ---- fuse_l2_norm ----


@per_node("Div")
def fuse_l2_norm(model: ir.Model, div: ir.Node) -> bool:
    """Fuse a division by the Euclidean norm into LpNormalization.

        x / ReduceL2(x)   and   x / sqrt(ReduceSum(x^2))   become   LpNormalization(x, p=2)

    with the norm over one axis, kept as a dimension. A lower bound of the norm, max(norm, e) as exporters write it with
    e up to 1e-12, is dropped: it matters only for vectors shorter than that. A vector of zeros becomes zeros; without a
    bound it used to become NaN. Applies to float32 and float64, the only types that the runtime supports.
    """
    x = input_value(div, 0)
    if x is None or x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE) or rank(x) is None:
        return False
    norm = _without_bound(_without_expand(input_value(div, 1), x))
    reduction = made_by(norm, "ReduceL2")
    if reduction is None:
        root = made_by(norm, "Sqrt")
        reduction = made_by(input_value(root, 0), "ReduceSum") if root is not None else None
        source = squared(input_value(reduction, 0)) if reduction is not None else None
    else:
        source = input_value(reduction, 0)
    axes = reduction_axes(model, reduction) if reduction is not None and source is x else None
    if reduction is None or axes is None or len(axes) != 1 or not attribute(reduction, "keepdims", 1):
        return False
    become(div, "LpNormalization", [x], {"axis": axes[0], "p": 2})
    return True


def _without_expand(value: ir.Value | None, x: ir.Value) -> ir.Value | None:
    """Skip an Expand to the shape of x, which a division makes unnecessary by broadcasting."""
    expand = made_by(value, "Expand")
    if expand is None:
        return value
    shape = made_by(input_value(expand, 1), "Shape")
    is_shape_of_x = shape is not None and input_value(shape, 0) is x and not shape.attributes
    is_same = is_shape_of_x or integers(input_value(expand, 1)) == list(dimensions(x) or ())
    return input_value(expand, 0) if is_same else value


def _without_bound(value: ir.Value | None) -> ir.Value | None:
    """Skip a Clip or Max that only keeps the value above a tiny number."""

    def is_tiny(bound: ir.Value | None) -> bool:
        number = scalar(bound)
        return number is not None and 0 <= number <= MAX_BOUND

    clip, largest = made_by(value, "Clip"), made_by(value, "Max")
    if clip is not None and input_value(clip, 2) is None and is_tiny(input_value(clip, 1)):
        return input_value(clip, 0)
    if largest is not None and len(largest.inputs) == 2:
        for index in (0, 1):
            if is_tiny(input_value(largest, index)):
                return input_value(largest, 1 - index)
    return value
