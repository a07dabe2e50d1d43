"""The definition of a rewrite, and helpers that look at constants and producers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import FLOAT_TYPES, attribute, constant, input_value, nodes, opset

Apply: TypeAlias = Callable[[ir.Model], int]


@dataclass(frozen=True)
class GraphRewrite:
    """An exact rewrite. `apply` rewrites every matching place of the main graph in place, and returns how many it
    found. The rewrite is named after that function."""

    apply: Apply
    is_default: bool = True

    @property
    def name(self) -> str:
        return self.apply.__name__


def per_node(*op_types: str) -> Callable[[Callable[[ir.Model, ir.Node], bool]], Apply]:
    """Decorate a function that rewrites one node, and returns whether it did: the result rewrites all nodes of these
    standard operators in the main graph."""

    def decorate(rewrite_node: Callable[[ir.Model, ir.Node], bool]) -> Apply:
        @functools.wraps(rewrite_node)
        def apply(model: ir.Model) -> int:
            matching = (node for node in nodes(model) if node.op_type in op_types and not node.domain)
            return sum(rewrite_node(model, node) for node in matching)

        return apply

    return decorate


def scalar(value: ir.Value | None) -> float | None:
    """The number that a constant of one element holds."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    array = constant(value)
    return None if array is None else float(array.reshape(()))


def integers(value: ir.Value | None) -> list[int] | None:
    """The elements of an integer constant."""
    if value is None or value.dtype in FLOAT_TYPES:
        return None
    array = constant(value)
    if array is None or not np.issubdtype(array.dtype, np.integer):
        return None
    return [int(number) for number in array.reshape(-1)]


def made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that computes the value, if it is of that standard operator."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and not node.domain else None


def squared(value: ir.Value | None) -> ir.Value | None:
    """d, if the value is Pow(d, 2) or Mul(d, d)."""
    power, product = made_by(value, "Pow"), made_by(value, "Mul")
    if power is not None and scalar(input_value(power, 1)) == 2:
        return input_value(power, 0)
    if product is not None and input_value(product, 0) is input_value(product, 1):
        return input_value(product, 0)
    return None


def reduction_axes(model: ir.Model, node: ir.Node) -> list[int] | None:
    """The axes of a reduction, counted from 0 if the rank is known. They are an attribute before opset 18 (13 for
    ReduceSum) and an input since. None if they are unknown, or the node reduces over everything or nothing."""
    axes = list(attribute(node, "axes") or ())
    if not axes and (opset(model) >= 18 or node.op_type == "ReduceSum"):
        axes = integers(input_value(node, 1)) or []
    value = input_value(node, 0)
    if not axes or value is None:
        return None
    if value.shape is not None:
        axes = sorted(axis % len(value.shape) for axis in axes if -len(value.shape) <= axis < len(value.shape))
    return axes
