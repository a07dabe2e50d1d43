"""From a placement and measured ranges to a plan: every scale, zero point and axis, with the rule that decided it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.errors import InvalidValueError
from quark.formats.catalog import get_format
from quark.onnx.choose.affine_choices import (
    Array,
    ChannelAxis,
    check_finite,
    choice_of_range,
    choice_of_weight,
    combine_ranges,
    derived_bias,
    fit_weight_to_bias,
    own_bias,
)
from quark.onnx.choose.before_clips import choices_before_clips
from quark.onnx.choose.operators import channel_axis, reduction_axis
from quark.onnx.choose.options import ChoiceOptions, Target, TensorOverride
from quark.onnx.choose.overrides import OVERRIDDEN
from quark.onnx.choose.placement import Placement, Request
from quark.onnx.choose.specs import AffineSpec, BlockSpec, DynamicSpec, FloatSpec, MeasuredSpec, TensorSpec, is_measured
from quark.onnx.graph import constant
from quark.plan import (
    AffineChoice,
    BlockChoice,
    Choice,
    DynamicChoice,
    FloatChoice,
    QuantizationPlan,
    Reader,
    Role,
    TensorChoice,
)
from quark.ranges import TensorRange

RangeKey = tuple[str, MeasuredSpec]


def tensors_to_measure(placement: Placement) -> list[RangeKey]:
    """The activations whose range must be known, each with the spec that it is wanted for."""
    keys: dict[RangeKey, None] = {}
    for request in placement.requests:
        if request.role is Role.ACTIVATION and is_measured(request.spec):
            keys.update(dict.fromkeys(_measured_members(placement, request.tensor, request.spec)))
    return list(keys)


def choose(
    model: ir.Model, placement: Placement, ranges: Mapping[RangeKey, TensorRange], options: ChoiceOptions
) -> QuantizationPlan:
    """The plan; the model is not touched."""
    chooser = _Chooser(model, placement, ranges, options)
    decided = [each for each in map(chooser.decide, placement.requests) if each is not None]
    before = choices_before_clips(model, placement.fused, decided) if options.target is Target.ONNX_RUNTIME else {}
    return QuantizationPlan(_merged([*decided, *before.values()], frozenset(before)), placement.skipped)


def rechoose(
    model: ir.Model,
    plan: QuantizationPlan,
    placement: Placement,
    ranges: Mapping[RangeKey, TensorRange],
    options: ChoiceOptions,
    tensors: Collection[str],
) -> QuantizationPlan:
    """The plan for constants that have other values now. A bias whose scale follows from its layer keeps it."""
    chooser = _Chooser(model, placement, ranges, options)
    requests = [each for each in placement.requests if each.tensor in tensors]
    own = [each for each in requests if each.role is not Role.BIAS or not _is_derived(each.spec)]
    decided = {(each.tensor, each.readers[0]): each for each in map(chooser.decide, own) if each is not None}
    return replace(plan, tensors=tuple(_renewed(each, decided) for each in plan))


def _renewed(each: TensorChoice, decided: Mapping[tuple[str, Reader], TensorChoice]) -> TensorChoice:
    new = decided.get((each.tensor, each.readers[0]))
    return each if new is None else replace(each, choice=new.choice, reason=new.reason)


def _measured_members(placement: Placement, tensor: str, spec: MeasuredSpec) -> list[RangeKey]:
    """Of the group of a tensor those that the others follow from; all where each follows from another."""
    members = [(name, each) for name, each in placement.groups.members((tensor, spec)) if is_measured(each)]
    return [key for key in members if key[0] not in placement.derived] or members


class _Chooser:
    def __init__(
        self,
        model: ir.Model,
        placement: Placement,
        ranges: Mapping[RangeKey, TensorRange],
        options: ChoiceOptions,
    ) -> None:
        self._placement = placement
        self._ranges = ranges
        self._options = options
        self._nodes = {str(node.name): node for node in model.graph}
        self._values = {str(value.name): value for value in model.graph.initializers.values()}
        self._overrides = {each.tensor: each for each in options.overrides}
        self._by_reader = {(r.reader.node, r.reader.index): r for r in placement.requests}
        self._weights: dict[tuple[str, int], AffineChoice | None] = {}
        self._plain: dict[tuple[str, TensorSpec, ChannelAxis | None], AffineChoice] = {}

    def decide(self, request: Request) -> TensorChoice | None:
        """The choice for one reader, or None where a bias has to stay float."""
        found = self._choice(request)
        if found is None:
            return None
        choice, reason = found
        return TensorChoice(request.tensor, request.role, choice, (request.reader,), reason)

    def _choice(self, request: Request) -> tuple[Choice, str] | None:
        spec = request.spec
        if isinstance(spec, BlockSpec):
            return self._block(request, spec)
        if isinstance(spec, FloatSpec):
            return self._float(request, spec)
        if isinstance(spec, DynamicSpec):
            return DynamicChoice(spec.format), "found at run time"
        if request.role is Role.ACTIVATION:
            return self._activation(request.tensor, spec)
        if request.role is Role.BIAS:
            return self._bias(request, spec)
        weight = self._weight(request.reader)
        if weight is None:
            return None
        return weight, _reason(_weight_reason(spec, weight), self._overrides.get(request.tensor))

    def _block(self, request: Request, spec: BlockSpec) -> tuple[Choice, str]:
        node = self._nodes.get(request.reader.node)
        axis = reduction_axis(node, request.reader.index) if node is not None and spec.follows_reduction else None
        reason = "along the axis that is summed over" if axis is not None else "along the configured axis"
        chosen = spec.axis if axis is None else axis
        values = self._values.get(request.tensor)
        if values is not None and values.shape is not None and values.const_value is not None:
            check_finite(request.tensor, values.const_value)
            chosen = chosen if -len(values.shape) <= chosen < len(values.shape) else len(values.shape) - 1
        return BlockChoice(
            spec.quantizer, chosen, spec.to_bfloat16_first
        ), f"{reason}, {spec.quantizer.scale_rule.value}"

    def _float(self, request: Request, spec: FloatSpec) -> tuple[Choice, str]:
        if not spec.is_scaled:
            return FloatChoice(spec.format, spec.is_saturating), "cast"
        if request.role is Role.ACTIVATION:
            found = self._ranges[request.tensor, spec]
            reach = max(-found.lowest, found.highest)
        else:
            reach = float(np.abs(self._constant(request.tensor).astype(np.float64)).max(initial=0.0))
        top = float(get_format(spec.format).max) if spec.format == "float16" else 2.0
        scale = float(np.float32(reach / top)) or 1.0
        return FloatChoice(spec.format, spec.is_saturating, scale), f"scaled so that {reach:.6g} becomes {top:g}"

    def _activation(self, tensor: str, spec: AffineSpec) -> tuple[AffineChoice, str]:
        members = _measured_members(self._placement, tensor, spec)
        found = combine_ranges([self._ranges[key] for key in members])
        override = self._overrides.get(tensor)
        choice = choice_of_range(spec, found, override, self._options.has_unsigned_relu)
        methods = dict.fromkeys(self._ranges[key].method or str(spec.method) for key in members)
        reason = f"{' and '.join(methods)} {found.lowest:.6g}..{found.highest:.6g}"
        others = [name for name, _ in members if name != tensor]
        if override is not None:
            if override.axis is not None:
                raise InvalidValueError(f"TensorQuantOverrides of '{tensor}': axis, and activations have one scale")
            reason = _reason(reason, override)
        return choice, reason + (f", shared with {', '.join(others[:3])}" if others else "")

    def _weight(self, reader: Reader) -> AffineChoice | None:
        """The choice for a constant operand, fitted to the bias of its node."""
        key = (reader.node, reader.index)
        if key not in self._weights:
            request = self._by_reader[key]
            self._weights[key] = self._fitted_weight(request)
        return self._weights[key]

    def _fitted_weight(self, request: Request) -> AffineChoice | None:
        spec = request.spec
        if not isinstance(spec, AffineSpec):
            return None
        choice = self._plain_weight(request, spec)
        node = self._nodes[request.reader.node]
        bias = self._by_reader.get((request.reader.node, 2))
        activation = self._activation_of(request.reader.node)
        if bias is None or bias.role is not Role.BIAS or not _is_derived(bias.spec) or activation is None:
            return choice
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm") or spec.is_power_of_two:
            return choice
        values = self._constant(request.tensor)
        return fit_weight_to_bias(choice, values, activation.scale[0], self._constant(bias.tensor))

    def _plain_weight(self, request: Request, spec: AffineSpec) -> AffineChoice:
        node, weight = self._nodes[request.reader.node], self._values[request.tensor].const_value
        assert weight is not None, request.tensor
        override = self._overrides.get(request.tensor)
        channels = self._channels(node, request.reader.index, spec, len(weight.shape), override)
        key = (request.tensor, spec, channels)
        if key not in self._plain:
            check_finite(request.tensor, weight)
            self._plain[key] = choice_of_weight(spec, weight, channels, override)
        return self._plain[key]

    def _channels(
        self, node: ir.Node, index: int, spec: AffineSpec, rank: int, override: TensorOverride | None
    ) -> ChannelAxis | None:
        if spec.group_size is not None:
            axis = reduction_axis(node, index)
            return None if axis is None else ChannelAxis(axis % rank, spec.group_size)
        if override is not None and override.axis is not None:
            if spec.is_power_of_two:
                raise InvalidValueError(f"TensorQuantOverrides of '{override.tensor}': axis with power-of-two scales")
            return ChannelAxis(_axis_of(override.axis, rank, f"TensorQuantOverrides of '{override.tensor}'"))
        is_fixed = override is not None and override.scale is not None and len(override.scale) == 1
        if is_fixed or not spec.is_per_channel:
            return None
        configured = dict(self._options.channel_axes).get(node.op_type)
        if index != 1 or not self._takes_channels(node, spec):
            return None
        option = "QDQOpTypePerChannelSupportToAxis"
        axis = channel_axis(node, rank) if configured is None else _axis_of(configured, rank, option)
        return None if axis is None else ChannelAxis(axis)

    def _takes_channels(self, node: ir.Node, spec: AffineSpec) -> bool:
        """ConvInteger has one zero point for a weight, which only symmetric channels share."""
        data = self._by_reader.get((str(node.name), 0))
        return spec.is_symmetric or node.op_type != "Conv" or data is None or not isinstance(data.spec, DynamicSpec)

    def _activation_of(self, node: str) -> AffineChoice | None:
        """What the node's first operand is quantized with, where that is affine."""
        request = self._by_reader.get((node, 0))
        if request is None or not isinstance(request.spec, AffineSpec) or request.role is not Role.ACTIVATION:
            return None
        return self._activation(request.tensor, request.spec)[0]

    def _bias(self, request: Request, spec: AffineSpec) -> tuple[AffineChoice, str] | None:
        values = self._constant(request.tensor)
        check_finite(request.tensor, values)
        if not _is_derived(spec):
            override = self._overrides.get(request.tensor)
            return own_bias(spec, values, override), _reason(f"{spec.method} of the bias itself", override)
        activation = self._activation_of(request.reader.node)
        operand = self._by_reader.get((request.reader.node, 1))
        has_weight = operand is not None and operand.role is Role.WEIGHT  # one that is computed may be of any size
        weight = self._weight(Reader(request.reader.node, 1)) if activation is not None and has_weight else None
        if activation is None or weight is None or weight.group_size is not None or values.ndim != 1:
            return None  # nothing integer that it could be added to
        choice = derived_bias(spec, activation, weight)
        if len(choice.scale) not in (1, values.size):
            return None
        return choice, "activation scale times weight scale"

    def _constant(self, tensor: str) -> Array:
        values = constant(self._values[tensor])
        assert values is not None, tensor
        return values


def _is_derived(spec: TensorSpec) -> bool:
    """A bias of 32 bits has the scale of what it is added to; narrower ones have their own."""
    return isinstance(spec, AffineSpec) and spec.format == "int32"


def _reason(rule: str, override: TensorOverride | None) -> str:
    return rule if override is None else OVERRIDDEN + rule


def _axis_of(axis: int, rank: int, option: str) -> int:
    if not -rank <= axis < rank:
        raise InvalidValueError(f"{option}: axis {axis}, and the weight has {rank} dimensions")
    return axis % rank


def _weight_reason(spec: TensorSpec, choice: AffineChoice) -> str:
    assert isinstance(spec, AffineSpec)
    where = "the tensor" if choice.axis is None else f"each channel of axis {choice.axis}"
    where = where if choice.group_size is None else f"each group of {choice.group_size} along axis {choice.axis}"
    return f"{spec.method} of {where}"


def _merged(decided: Iterable[TensorChoice], separate: frozenset[str]) -> tuple[TensorChoice, ...]:
    """One entry for all readers that see a tensor the same way.

    Readers of the tensors in `separate` keep entries of their own: behind an activation that stays a float node,
    ONNX Runtime on x86 turns int8 pairs into uint8 ones only where each has a single reader, and without that makes no
    integer kernel of the reader.
    """
    merged: dict[tuple[str, Role, Choice, Reader | None], TensorChoice] = {}
    for each in decided:
        key = (each.tensor, each.role, each.choice, each.readers[0] if each.tensor in separate else None)
        first = merged.get(key)
        merged[key] = each if first is None else replace(first, readers=(*first.readers, *each.readers))
    return tuple(merged.values())
