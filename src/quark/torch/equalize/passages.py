"""Operators that let a positive scale of each channel through: f(x / s) = f(x) / s.

A rule answers for one operator: where channels that are known of one of its tensors lie in its others. A tensor is the
node that makes it. What has no rule here, or does not fit its rule, ends the matter: CannotScaleError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from quark.equalization.channels import CannotScaleError, Channels, through_permutation, through_shapes
from quark.torch.equalize.channels import size_of, sizes_of
from quark.torch.graph import is_constant, module_of, rank_of

aten = torch.ops.aten
Link: TypeAlias = tuple[fx.Node, Channels]


@dataclass(frozen=True)
class Passage:
    """The tensors that share channels at a node. `bound`: the node clips to 0..bound, which lets a scale through only
    as far as the bound is not reached."""

    links: tuple[Link, ...]
    bound: float | None = None


Rule: TypeAlias = Callable[[fx.Node, fx.Node, Channels], Passage]


def passage(network: fx.GraphModule, node: fx.Node, value: fx.Node, channels: Channels) -> Passage:
    """What the node does with the channels of `value`, one of its tensors; CannotScaleError where it mixes them, or
    where a scale does not come through."""
    if isinstance(module_of(network, node), (nn.modules.dropout._DropoutNd, nn.Identity)):
        return _same(node, value, channels)
    rule = RULES.get(node.target) if node.op == "call_function" else None
    if rule is None:
        raise CannotScaleError(f"{name_of(network, node)} does not commute with a scale")
    return rule(node, value, channels)


def name_of(network: fx.GraphModule, node: fx.Node) -> str:
    """The operator or the kind of module."""
    module = module_of(network, node)
    if module is not None:
        return type(module).__name__
    target: Any = node.target
    return str(target._schema.name).removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else str(target)


def _argument(node: fx.Node, index: int, name: str, missing: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, missing)


def _data(node: fx.Node) -> fx.Node:
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or is_constant(first):
        raise CannotScaleError("it has no tensor to scale")
    return first


def _same(node: fx.Node, value: fx.Node, channels: Channels) -> Passage:
    data = _data(node)
    if value is not node and (value is not data or value in node.all_input_nodes[1:]):
        raise CannotScaleError("it reads it as something other than its data")
    return Passage(((data, channels), (node, channels)))


def _over_positions(node: fx.Node, value: fx.Node, channels: Channels) -> Passage:
    """Pooling and resizing, which go over what follows the second axis."""
    if channels.axis != 1 or size_of(_data(node), 1) != size_of(node, 1):
        raise CannotScaleError("it goes over the channels")
    return _same(node, value, channels)


def _clip(node: fx.Node, value: fx.Node, channels: Channels) -> Passage:
    low, high = _bounds(node)
    passed = _same(node, value, channels)
    if all(bound == 0 or math.isinf(bound) for bound in (low, high)):
        return passed
    if low != 0 or not 0 < high < math.inf:
        raise CannotScaleError(f"clipping from {low:g} to {high:g} does not commute with a scale")
    if channels.width != 1:
        raise CannotScaleError("it clips a tensor that was flattened")
    return Passage(passed.links, bound=high)


def _bounds(node: fx.Node) -> tuple[float, float]:
    if node.target is aten.relu6.default:
        return 0.0, 6.0
    is_hardtanh = node.target is aten.hardtanh.default
    low = _argument(node, 1, "min_val" if is_hardtanh else "min", -1.0 if is_hardtanh else None)
    high = _argument(node, 2, "max_val" if is_hardtanh else "max", 1.0 if is_hardtanh else None)
    if isinstance(low, fx.Node) or isinstance(high, fx.Node):
        raise CannotScaleError("it clips to bounds that are not constant")
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def _factor(node: fx.Node, value: fx.Node, channels: Channels) -> Passage:
    """Multiplied or divided by a constant: linear, so that the constant stays."""
    tensors = [each for each in node.args[:2] if isinstance(each, fx.Node) and not is_constant(each)]
    if len(tensors) != 1 or (node.target is aten.div.Tensor and tensors[0] is not node.args[0]):
        raise CannotScaleError("it multiplies or divides two activations")
    return Passage(_alike(node, tensors, channels))


def _together(node: fx.Node, value: fx.Node, channels: Channels) -> Passage:
    """Sums and extremes of two: both are scaled the same."""
    tensors = [each for each in node.args[:2] if isinstance(each, fx.Node) and not is_constant(each)]
    if len(tensors) != 2:
        raise CannotScaleError("it adds a constant")
    return Passage(_alike(node, tensors, channels))


def _alike(node: fx.Node, tensors: list[fx.Node], channels: Channels) -> tuple[Link, ...]:
    size = size_of(node, channels.axis)
    if size is None or any(rank_of(each) != rank_of(node) or size_of(each, channels.axis) != size for each in tensors):
        raise CannotScaleError("it changes the shape of the channels")
    return ((node, channels), *((each, channels) for each in dict.fromkeys(tensors)))


def _concat(node: fx.Node, value: fx.Node, channels: Channels) -> Passage:
    rank = rank_of(node)
    tensors = _argument(node, 0, "tensors", ())
    if rank is None or int(_argument(node, 1, "dim", 0)) % rank == channels.axis:
        raise CannotScaleError("it joins channels")
    if any(not isinstance(each, fx.Node) or is_constant(each) for each in tensors):
        raise CannotScaleError("it joins a constant")
    return Passage(((node, channels), *((each, channels) for each in dict.fromkeys(tensors))))


def _over_other_axes(node: fx.Node, value: fx.Node, channels: Channels) -> Passage:
    """Means, sums, extremes and slices, of any axes but that of the channels."""
    rank, axes = rank_of(_data(node)), _argument(node, 1, "dim")
    if rank is None or axes is None or axes == []:
        raise CannotScaleError("it goes over axes that are not known, or all")
    numbers = [int(axis) % rank for axis in (axes if isinstance(axes, (list, tuple)) else [axes])]
    if channels.axis in numbers:
        raise CannotScaleError("it goes over the channels")
    if rank_of(node) != rank and any(axis < channels.axis for axis in numbers):
        raise CannotScaleError("it moves the channels")
    return _same(node, value, channels)


def _pad(node: fx.Node, value: fx.Node, channels: Channels) -> Passage:
    rank, pads = rank_of(_data(node)), _argument(node, 1, "pad")
    if rank is None or not isinstance(pads, (list, tuple)):
        raise CannotScaleError("it pads by a number that is not known")
    pair = 2 * (rank - 1 - channels.axis)  # pads are given from the last axis on
    if any(pads[pair : pair + 2]):
        raise CannotScaleError("it adds channels")
    is_plain = node.target is aten.pad.default
    mode = _argument(node, 2, "mode", "constant") if is_plain else "constant"
    fill = _argument(node, 3 if is_plain else 2, "value", 0)
    if mode == "constant" and fill:
        raise CannotScaleError("it pads with something other than zeros")
    return _same(node, value, channels)


def _reshape(node: fx.Node, value: fx.Node, channels: Channels) -> Passage:
    data = _data(node)
    sizes = sizes_of(data), sizes_of(node)
    before, behind = through_shapes(*sizes, channels, value is data, "it")
    return Passage(((data, before), (node, behind)))


def _transpose(node: fx.Node, value: fx.Node, channels: Channels) -> Passage:
    data = _data(node)
    order = list(range(rank_of(data) or 0))
    if node.target is aten.permute.default:
        order = [int(axis) % len(order) for axis in _argument(node, 1, "dims")]
    elif len(order) > 1:
        first, second = (0, 1) if node.target is aten.t.default else (int(each) for each in node.args[1:3])  # type: ignore[arg-type]
        order[first], order[second] = order[second], order[first]
    before, behind = through_permutation(order, channels, value is data, "it")
    return Passage(((data, before), (node, behind)))


def _shape_only(node: fx.Node, value: fx.Node, channels: Channels) -> Passage:
    return Passage(())


_NAMES: Mapping[Rule, str] = {
    _same: "relu.default leaky_relu.default prelu.default neg.default abs.default clone.default contiguous.default "
    "alias.default detach.default",
    _over_positions: "max_pool1d.default max_pool2d.default max_pool3d.default avg_pool1d.default avg_pool2d.default "
    "avg_pool3d.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default "
    "upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest2d.default upsample_bilinear2d.vec "
    "upsample_bilinear2d.default",
    _clip: "hardtanh.default relu6.default clamp.default clamp_min.default",
    _factor: "mul.Tensor div.Tensor mul.Scalar div.Scalar",
    _together: "add.Tensor sub.Tensor maximum.default minimum.default",
    _concat: "cat.default concat.default",
    _over_other_axes: "mean.dim sum.dim_IntList amax.default amin.default slice.Tensor",
    _pad: "pad.default constant_pad_nd.default",
    _reshape: "view.default reshape.default flatten.using_ints squeeze.dim squeeze.dims squeeze.default "
    "unsqueeze.default _unsafe_view.default",
    _transpose: "permute.default transpose.int t.default",
    _shape_only: "sym_size.int",
}


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload, None)  # not every version of torch has every operator


RULES: Mapping[Any, Rule] = {
    found: rule for rule, names in _NAMES.items() for name in names.split() if (found := _overload(name)) is not None
}
