"""Bring the many ways to bound a tensor into one Relu or one Clip.

    Max(x, 0)                       Relu(x)
    Min(Max(x, a), b)               Clip(x, a, b)     a <= b
    Max(Min(x, b), a)               Clip(x, a, b)     a <= b
    Relu(Relu(x))                   Relu(x)
    Clip(Relu(x), a, b)             Clip(x, max(a, 0), b)     0 <= b
    Relu(Clip(x, a, b))             Clip(x, max(a, 0), b)     0 <= b

Applies to float tensors and constant numbers; the inner node must have one reader. A NaN stays or becomes a bound, as
the runtime's Max, Min, Relu and Clip have it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import (
    add_initializer,
    become,
    bypass,
    input_value,
    is_constant,
    is_float,
    is_read_once,
    nodes,
    rank,
)
from quark.onnx.optimize.rewrite import scalar


class ReluForms:
    name: ClassVar[str] = "relu_forms"
    is_default: ClassVar[bool] = True

    def apply(self, model: ir.Model) -> int:
        return sum(_rewrite(model, node) for node in nodes(model) if not node.domain)


def _rewrite(model: ir.Model, node: ir.Node) -> bool:
    if node.op_type in ("Max", "Min"):
        return _pair_to_clip(model, node) or _max_to_relu(node)
    if node.op_type == "Relu":
        return _relu_after(model, node)
    if node.op_type == "Clip":
        return _clip_after_relu(model, node)
    return False


def _bounded(node: ir.Node) -> tuple[ir.Value, float] | None:
    """The tensor and the number of a Max or Min of two, where the number does not change the shape."""
    if len(node.inputs) != 2:
        return None
    for index in (0, 1):
        value, bound = input_value(node, 1 - index), scalar(input_value(node, index))
        if value is None or bound is None or not is_float(value) or is_constant(value):
            continue
        if (rank(input_value(node, index)) or 0) <= (rank(value) or 0):
            return value, bound
    return None


def _max_to_relu(node: ir.Node) -> bool:
    found = _bounded(node)
    if node.op_type != "Max" or found is None or found[1] != 0:
        return False
    become(node, "Relu", [found[0]])
    return True


def _pair_to_clip(model: ir.Model, outer: ir.Node) -> bool:
    found = _bounded(outer)
    inner = _inner(found[0], {"Max": "Min", "Min": "Max"}[outer.op_type]) if found else None
    below = _bounded(inner) if inner is not None else None
    if found is None or below is None:
        return False
    bounds = {outer.op_type: found[1], "Min" if outer.op_type == "Max" else "Max": below[1]}
    if bounds["Max"] > bounds["Min"]:
        return False
    _become_clip(model, outer, below[0], bounds["Max"], bounds["Min"])
    return True


def _relu_after(model: ir.Model, relu: ir.Node) -> bool:
    value = input_value(relu, 0)
    inner = _inner(value, "Relu")
    if inner is not None:
        return bypass(inner)
    clip = _inner(value, "Clip")
    bounds = _clip_bounds(clip) if clip is not None else None
    if clip is None or bounds is None or bounds[1] < 0:
        return False
    source = input_value(clip, 0)
    assert source is not None
    _become_clip(model, relu, source, max(bounds[0], 0.0), bounds[1])
    return True


def _clip_after_relu(model: ir.Model, clip: ir.Node) -> bool:
    relu, bounds = _inner(input_value(clip, 0), "Relu"), _clip_bounds(clip)
    source = input_value(relu, 0) if relu is not None else None
    if source is None or bounds is None or bounds[1] < 0:
        return False
    _become_clip(model, clip, source, max(bounds[0], 0.0), bounds[1])
    return True


def _inner(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes the value for this reader alone, where it is of that operator."""
    node = value.producer() if value is not None and is_float(value) and is_read_once(value) else None
    return node if node is not None and node.op_type == op_type and not node.domain else None


def _clip_bounds(clip: ir.Node) -> tuple[float, float] | None:
    bounds = []
    for index, missing in ((1, -np.inf), (2, np.inf)):
        bound = scalar(input_value(clip, index)) if input_value(clip, index) is not None else missing
        if bound is None:
            return None
        bounds.append(float(bound))
    return bounds[0], bounds[1]


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
