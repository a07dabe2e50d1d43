"""Recognize a normalization that an exporter took apart.

    d = x - mean(x);   y = d / sqrt(mean(d^2) + e)

with the means over the same axes, kept as dimensions. The square may be Pow(d, 2) or Mul(d, d), the quotient Div or a
product with Reciprocal, and the subtraction may stand there twice. The result may be scaled and shifted by constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import attribute, constant, input_value, is_read_once, readers
from quark.onnx.optimize.rewrite import reduction_axes, scalar


@dataclass(frozen=True, eq=False)
class Normalization:
    """What was found: `last` is the node that makes y."""

    x: ir.Value
    axes: list[int]
    epsilon: float
    last: ir.Node


@dataclass(frozen=True, eq=False)
class Affine:
    """The product and the sum with constants behind a node, None where there is none; `last` makes the result."""

    scale: np.ndarray[Any, Any] | None
    shift: np.ndarray[Any, Any] | None
    last: ir.Node


def match_normalization(model: ir.Model, node: ir.Node) -> Normalization | None:
    """The normalization whose last node this is."""
    quotient = _quotient(node)
    if quotient is None:
        return None
    centred, root = quotient
    sqrt = made_by(root, "Sqrt")
    total = made_by(input_value(sqrt, 0), "Add") if sqrt is not None else None
    variance, epsilon = _with_number(total)
    mean_square = made_by(variance, "ReduceMean")
    x, axes = _centred(model, centred)
    if x is None or axes is None or mean_square is None or epsilon is None:
        return None
    squared = _squared(input_value(mean_square, 0))
    if squared is None or _centred(model, squared) != (x, axes) or _kept_axes(model, mean_square) != axes:
        return None
    return Normalization(x, axes, epsilon, node)


def following_affine(node: ir.Node) -> Affine:
    """The constants that the result of a node is multiplied by and added to, while it has no other reader."""
    last, found = node, {}
    for op_type in ("Mul", "Add"):
        reader = _only_reader(last)
        if reader is None or reader[0].op_type != op_type or reader[0].domain:
            continue
        array = constant(input_value(reader[0], 1 - reader[1]))
        if array is not None:
            last, found[op_type] = reader[0], array
    return Affine(found.get("Mul"), found.get("Add"), last)


def made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes the value, where it is of that standard operator."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and not node.domain else None


def _only_reader(node: ir.Node) -> tuple[ir.Node, int] | None:
    value = node.outputs[0]
    reader = readers(value)[0] if is_read_once(value) else None
    return reader if reader is not None and reader[0].graph is node.graph else None


def _quotient(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None] | None:
    """Numerator and denominator."""
    if node.domain:
        return None
    if node.op_type == "Div":
        return input_value(node, 0), input_value(node, 1)
    if node.op_type == "Mul":
        for index in (0, 1):
            reciprocal = made_by(input_value(node, index), "Reciprocal")
            if reciprocal is not None:
                return input_value(node, 1 - index), input_value(reciprocal, 0)
    return None


def _with_number(node: ir.Node | None) -> tuple[ir.Value | None, float | None]:
    """The tensor and the number that a node of two inputs has, in either order."""
    for index in (0, 1):
        number = scalar(input_value(node, index)) if node is not None else None
        if node is not None and number is not None:
            return input_value(node, 1 - index), number
    return None, None


def _centred(model: ir.Model, value: ir.Value | None) -> tuple[ir.Value | None, list[int] | None]:
    """x and the axes, where the value is x - mean(x)."""
    sub = made_by(value, "Sub")
    mean = made_by(input_value(sub, 1), "ReduceMean") if sub is not None else None
    if sub is None or mean is None or input_value(mean, 0) is not input_value(sub, 0):
        return None, None
    return input_value(sub, 0), _kept_axes(model, mean)


def _kept_axes(model: ir.Model, mean: ir.Node) -> list[int] | None:
    return reduction_axes(model, mean) if attribute(mean, "keepdims", 1) else None


def _squared(value: ir.Value | None) -> ir.Value | None:
    """d, where the value is its square."""
    power, product = made_by(value, "Pow"), made_by(value, "Mul")
    if power is not None and scalar(input_value(power, 1)) == 2:
        return input_value(power, 0)
    if product is not None and input_value(product, 0) is input_value(product, 1):
        return input_value(product, 0)
    return None
