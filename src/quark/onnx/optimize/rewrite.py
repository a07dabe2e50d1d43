"""What a rewrite is, and the questions about constants that many of them ask."""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import FLOAT_TYPES, attribute, constant, input_value, opset


class GraphRewrite(Protocol):
    """An exact rewrite. Implementations are small classes, one in a file."""

    name: ClassVar[str]  # the file's
    is_default: ClassVar[bool]

    def apply(self, model: ir.Model) -> int:
        """Rewrite every place in the main graph where it applies, in place; return how many there were."""
        ...


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
    return [int(each) for each in array.reshape(-1)]


def reduction_axes(model: ir.Model, node: ir.Node) -> list[int] | None:
    """The axes of a reduction, an attribute before opset 18 (13 for ReduceSum) and an input since; counted from 0 where
    the rank is known. None where they are not known, and where the node reduces over everything or nothing."""
    axes = list(attribute(node, "axes") or ())
    if not axes and (opset(model) >= 18 or node.op_type == "ReduceSum"):
        axes = integers(input_value(node, 1)) or []
    value = input_value(node, 0)
    if not axes or value is None:
        return None
    if value.shape is not None:
        axes = sorted(axis % len(value.shape) for axis in axes if -len(value.shape) <= axis < len(value.shape))
    return axes
