"""Operators that let a positive scale of each channel through: f(x / s) = f(x) / s.

A rule answers for one operator: where channels that are known of one of its tensors lie in its others, and which of its
constants have to be scaled along. What has no rule here, or does not fit its rule, ends the matter: CannotScaleError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from quark.equalization.channels import CannotScaleError, Channels
from quark.onnx.equalize.channels import size_of
from quark.onnx.equalize.reshapes import through_reshape, through_transpose
from quark.onnx.graph import attribute, constant, input_value, opset, rank

Link: TypeAlias = tuple[ir.Value, Channels]


@dataclass(frozen=True)
class Passage:
    """The tensors that share channels at a node, and the inputs that hold constants to divide along. `bound`: the node
    is Clip(0, bound), which lets a scale through only if the bound is divided too."""

    links: tuple[Link, ...]
    constants: tuple[tuple[int, Channels], ...] = ()
    bound: float | None = None


Rule: TypeAlias = Callable[[ir.Model, ir.Node, ir.Value, Channels], Passage]


def passage(model: ir.Model, node: ir.Node, value: ir.Value, channels: Channels) -> Passage:
    """What the node does with the channels of `value`, one of its tensors; CannotScaleError where it mixes them, or
    where a scale does not come through."""
    rule = RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if rule is None or node.graph is not model.graph:
        raise CannotScaleError(f"{node.op_type} does not commute with a scale")
    return rule(model, node, value, channels)


def _ends(node: ir.Node, channels: Channels) -> tuple[Link, ...]:
    """First input and first output, with the same channels."""
    first = input_value(node, 0)
    if first is None or constant(first) is not None:
        raise CannotScaleError(f"{node.op_type} has no tensor to scale")
    return (first, channels), (node.outputs[0], channels)


def _same(model: ir.Model, node: ir.Node, value: ir.Value, channels: Channels) -> Passage:
    links = _ends(node, channels)
    if all(value is not each for each, _ in links):
        raise CannotScaleError(f"{node.op_type} reads it as something other than its data")
    return Passage(links)


def _pool(model: ir.Model, node: ir.Node, value: ir.Value, channels: Channels) -> Passage:
    if channels.axis != 1:
        raise CannotScaleError(f"{node.op_type} goes over the channels")
    return _same(model, node, value, channels)


def _prelu(model: ir.Model, node: ir.Node, value: ir.Value, channels: Channels) -> Passage:
    if constant(input_value(node, 1)) is None:
        raise CannotScaleError("its slope is not constant")
    return _same(model, node, value, channels)


def _clip(model: ir.Model, node: ir.Node, value: ir.Value, channels: Channels) -> Passage:
    bounds = []
    for index, missing in ((1, -math.inf), (2, math.inf)):
        array = constant(input_value(node, index))
        if input_value(node, index) is None:
            bounds.append(missing)
        elif array is None or array.size != 1:
            raise CannotScaleError("Clip has a bound that is not constant")
        else:
            bounds.append(float(array.reshape(())))
    low, high = bounds
    passed = _same(model, node, value, channels)
    if all(bound == 0 or math.isinf(bound) for bound in bounds):
        return passed
    if low != 0 or not 0 < high < math.inf:
        raise CannotScaleError(f"Clip from {low:g} to {high:g} does not commute with a scale")
    if channels.width != 1 or rank(value) is None:
        raise CannotScaleError("Clip of a tensor that was flattened, or whose rank is not known")
    return Passage(passed.links, bound=high)


def _factor(model: ir.Model, node: ir.Node, value: ir.Value, channels: Channels) -> Passage:
    """Multiplied or divided by a constant: linear, so that the constant stays."""
    indexes = [index for index in (0, 1) if constant(input_value(node, index)) is None]
    if len(indexes) != 1 or (node.op_type == "Div" and indexes != [0]):
        raise CannotScaleError(f"{node.op_type} of two activations")
    data = input_value(node, indexes[0])
    if data is None or rank(data) is None or rank(data) != rank(node.outputs[0]):
        raise CannotScaleError(f"{node.op_type} changes the rank")
    if size_of(data, channels.axis) is None or size_of(data, channels.axis) != size_of(node.outputs[0], channels.axis):
        raise CannotScaleError(f"{node.op_type} changes the number of channels")
    return Passage(((data, channels), (node.outputs[0], channels)))


def _together(model: ir.Model, node: ir.Node, value: ir.Value, channels: Channels) -> Passage:
    """Sums and extremes of several: all are scaled the same."""
    total, own = rank(node.outputs[0]), rank(value)
    size = size_of(value, channels.axis)
    if total is None or own is None or size is None:
        raise CannotScaleError(f"{node.op_type} of tensors of unknown shape")
    from_end = channels.axis - own  # broadcasting counts from the end
    links: list[Link] = [(node.outputs[0], Channels(total + from_end, channels.width))]
    constants = []
    for index, each in enumerate(node.inputs):
        array = constant(each)
        if each is None:
            continue
        here = rank(each) if array is None else array.ndim
        axis = -1 if here is None else here + from_end
        known = size_of(each, axis) if array is None else array.shape[axis] if axis >= 0 else None
        if known == size:
            target = Channels(axis, channels.width)
            if array is None:
                links.append((each, target))
            else:
                constants.append((index, target))
        elif array is None or array.any():
            raise CannotScaleError(f"{node.op_type} with something that has no such channels")
    if any(size_of(each, where.axis) not in (size, None) for each, where in links):
        raise CannotScaleError(f"{node.op_type} changes the number of channels")
    return Passage(tuple(links), tuple(constants))


def _concat(model: ir.Model, node: ir.Node, value: ir.Value, channels: Channels) -> Passage:
    own = rank(value)
    if own is None or int(attribute(node, "axis", 0)) % own == channels.axis:
        raise CannotScaleError("Concat joins channels")
    links, constants = [(node.outputs[0], channels)], []
    for index, each in enumerate(node.inputs):
        if each is not None and constant(each) is None:
            links.append((each, channels))
        elif each is not None:
            constants.append((index, channels))
    return Passage(tuple(links), tuple(constants))


def _split(model: ir.Model, node: ir.Node, value: ir.Value, channels: Channels) -> Passage:
    own = rank(value)
    if own is None or int(attribute(node, "axis", 0)) % own == channels.axis:
        raise CannotScaleError("Split takes channels apart")
    return Passage((_ends(node, channels)[0], *((each, channels) for each in node.outputs)))


def _over_other_axes(model: ir.Model, node: ir.Node, value: ir.Value, channels: Channels) -> Passage:
    """Reductions, Slice: of any axes but that of the channels."""
    own = rank(input_value(node, 0))
    axes = _axes(model, node)
    if own is None or axes is None:
        raise CannotScaleError(f"{node.op_type} over axes that are not known")
    axes = [axis % own for axis in axes]
    if channels.axis in axes:
        raise CannotScaleError(f"{node.op_type} goes over the channels")
    if rank(node.outputs[0]) != own and any(axis < channels.axis for axis in axes):
        raise CannotScaleError(f"{node.op_type} moves the channels")
    return _same(model, node, value, channels)


def _axes(model: ir.Model, node: ir.Node) -> list[int] | None:
    if node.op_type == "Slice":
        starts, given = constant(input_value(node, 1)), input_value(node, 3)
        axes = constant(given) if given is not None else None if starts is None else np.arange(starts.size)
        return None if axes is None else [int(axis) for axis in axes.reshape(-1)]
    if opset(model) < 18 and node.op_type != "ReduceSum":
        return list(attribute(node, "axes") or ()) or None
    found = constant(input_value(node, 1))
    return [int(axis) for axis in found.reshape(-1)] or None if found is not None else None


def _pad(model: ir.Model, node: ir.Node, value: ir.Value, channels: Channels) -> Passage:
    own, pads, axes = rank(input_value(node, 0)), constant(input_value(node, 1)), constant(input_value(node, 3))
    if own is None or pads is None or (input_value(node, 3) is not None and axes is None):
        raise CannotScaleError("Pad by a number that is not known")
    order = list(range(own)) if axes is None else [int(axis) % own for axis in axes.reshape(-1)]
    if channels.axis in order and pads.reshape(2, -1)[:, order.index(channels.axis)].any():
        raise CannotScaleError("Pad adds channels")
    fill = input_value(node, 2)
    found = constant(fill)
    if attribute(node, "mode", "constant") == "constant" and fill is not None and (found is None or found.any()):
        raise CannotScaleError("Pad with something other than zeros")
    return _same(model, node, value, channels)


def _resize(model: ir.Model, node: ir.Node, value: ir.Value, channels: Channels) -> Passage:
    before, after = (size_of(each, channels.axis) for each, _ in _ends(node, channels))
    if before is None or before != after:
        raise CannotScaleError("Resize goes over the channels")
    if attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        raise CannotScaleError("Resize fills in a number")
    return _same(model, node, value, channels)


def _transpose(model: ir.Model, node: ir.Node, value: ir.Value, channels: Channels) -> Passage:
    return Passage(through_transpose(node, value, channels))


def _reshape(model: ir.Model, node: ir.Node, value: ir.Value, channels: Channels) -> Passage:
    return Passage(through_reshape(node, value, channels))


def _shape_only(model: ir.Model, node: ir.Node, value: ir.Value, channels: Channels) -> Passage:
    return Passage(())


def _rules(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: Mapping[str, Rule] = {
    **_rules(_same, "Relu LeakyRelu Identity Dropout Neg Abs"),
    **_rules(_pool, "MaxPool AveragePool GlobalAveragePool GlobalMaxPool"),
    **_rules(_prelu, "PRelu"),
    **_rules(_clip, "Clip"),
    **_rules(_factor, "Mul Div"),
    **_rules(_together, "Add Sub Sum Mean Max Min"),
    **_rules(_concat, "Concat"),
    **_rules(_split, "Split"),
    **_rules(_over_other_axes, "ReduceMean ReduceSum ReduceMax ReduceMin Slice"),
    **_rules(_pad, "Pad"),
    **_rules(_resize, "Resize"),
    **_rules(_transpose, "Transpose"),
    **_rules(_reshape, "Flatten Reshape Squeeze Unsqueeze"),
    **_rules(_shape_only, "Shape Size"),
}
