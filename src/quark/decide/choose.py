"""Turn a placement and measured ranges into decisions: scales, zero points and axes, each with the rule behind it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from quark.decide.end_layers import OPTION
from quark.decide.operators import channel_axis, is_embedding, reduction_axis, weight_inputs
from quark.decide.options import ChoiceOptions, Target, TensorOverride
from quark.decide.placement import FusedActivation, Placement, Request
from quark.decide.scales import (
    ChannelAxis,
    choice_of_range,
    choice_of_weight,
    combine_ranges,
    derived_bias,
    fit_weight_to_bias,
    int16_scale,
    own_bias,
    searched_float_scales,
    with_lowest_code,
)
from quark.decide.specs import AffineSpec, BlockSpec, DynamicSpec, FloatSpec, MeasuredSpec, TensorSpec, is_measured
from quark.decide.view import Array, Constant, Graph, Node
from quark.errors import InvalidValueError, ModelError, unknown_name
from quark.formats.affine import integer_format
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
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
from quark.ranges import MinMax, TensorRange, range_of

RangeKey = tuple[str, MeasuredSpec]
_OF_TABLE = "the table's"
_LEAST_FLOAT = float(np.finfo(np.float32).smallest_subnormal)
_LEAST_SOFTMAX_SUM = 1 / 128  # lower bound of scale times positions, with a margin of a sixth
_OVERRIDDEN = "TensorQuantOverrides over "  # prefix of the reason for every choice that an override affected


def tensors_to_measure(placement: Placement) -> list[RangeKey]:
    """The activations whose range must be known, each with the spec that it is wanted for."""
    keys: dict[RangeKey, None] = {}
    for request in placement.requests:
        for spec in (request.spec, request.first):
            if request.role is Role.ACTIVATION and spec is not None and is_measured(spec):
                keys.update(dict.fromkeys(_measured_members(placement, request.tensor, spec)))
    return list(keys)


def _measured_members(placement: Placement, tensor: str, spec: MeasuredSpec) -> list[RangeKey]:
    """The members of a tensor's group that determine the others' ranges; all members if none does."""
    members = [
        (name, member_spec)
        for name, member_spec in placement.groups.members((tensor, spec))
        if is_measured(member_spec)
    ]
    return [key for key in members if key[0] not in placement.derived] or members


@dataclass(frozen=True)
class Decision:
    """One request with what was chosen for it, and why; `first` is the choice for `Request.first`."""

    request: Request
    choice: Choice
    reason: str
    first: Choice | None = None


def decide(
    graph: Graph,
    placement: Placement,
    ranges: Mapping[RangeKey, TensorRange],
    options: ChoiceOptions,
    kept: Mapping[Reader, tuple[Choice, str]] | None = None,
) -> list[Decision]:
    """Decide every request, except for biases that have to stay float. The graph is not changed. `kept` has choices
    that were made before for weights, with their reasons."""
    chooser = _Chooser(graph, placement, ranges, options, kept)
    return [decision for decision in map(chooser.decide, placement.requests) if decision is not None]


def choose(
    graph: Graph, placement: Placement, ranges: Mapping[RangeKey, TensorRange], options: ChoiceOptions
) -> QuantizationPlan:
    """Choose the plan. The graph is not changed."""
    decided = [_tensor_choice(decision) for decision in decide(graph, placement, ranges, options)]
    before = choices_before_clips(graph, placement.fused, decided) if options.target is Target.ONNX_RUNTIME else {}
    return QuantizationPlan(_merged([*decided, *before.values()], frozenset(before)), placement.skipped)


def rechoose(
    graph: Graph,
    plan: QuantizationPlan,
    placement: Placement,
    ranges: Mapping[RangeKey, TensorRange],
    options: ChoiceOptions,
    tensors: Collection[str],
) -> QuantizationPlan:
    """Update the plan for constants whose values have changed. A bias whose scale follows from its layer keeps it."""
    chooser = _Chooser(graph, placement, ranges, options)
    own = [request for request in placement.requests if request.tensor in tensors and not is_derived_bias(request)]
    decided = {
        (decision.request.tensor, decision.request.reader): decision
        for decision in map(chooser.decide, own)
        if decision
    }

    def renewed(entry: TensorChoice) -> TensorChoice:
        new = decided.get((entry.tensor, entry.readers[0]))
        return entry if new is None else replace(entry, choice=new.choice, reason=new.reason)

    return replace(plan, tensors=tuple(renewed(entry) for entry in plan))


def is_derived_bias(request: Request) -> bool:
    """True for a bias of 32 bits, whose scale is that of the sum it is added to; narrower biases have scales of their
    own."""
    return request.role is Role.BIAS and isinstance(request.spec, AffineSpec) and request.spec.format == "int32"


def check_overrides(names: Iterable[str], overrides: Iterable[TensorOverride]) -> None:
    """Check that every override names an existing tensor."""
    known = set(names)
    for override in overrides:
        if override.tensor not in known:
            raise unknown_name("tensor (TensorQuantOverrides)", override.tensor, sorted(known))


def unused_overrides(plan: QuantizationPlan, overrides: Iterable[TensorOverride]) -> list[str]:
    """A remark for every override that has no effect on the plan."""
    used = {entry.tensor for entry in plan if entry.reason.startswith(_OVERRIDDEN)}
    unused = (override.tensor for override in overrides if override.tensor not in used)
    return [f"TensorQuantOverrides of '{name}': nothing reads it quantized with a scale of its own" for name in unused]


class _Chooser:
    def __init__(
        self,
        graph: Graph,
        placement: Placement,
        ranges: Mapping[RangeKey, TensorRange],
        options: ChoiceOptions,
        kept: Mapping[Reader, tuple[Choice, str]] | None = None,
    ) -> None:
        self._kept = kept or {}
        self._placement = placement
        self._ranges = ranges
        self._options = options
        self._nodes = graph.by_name
        self._values = graph.constants()
        self._overrides = {override.tensor: override for override in options.overrides}
        self._by_consumer = {request.consumer: request for request in placement.requests}
        self._weights: dict[Reader, AffineChoice | None] = {}
        self._plain: dict[tuple[str, TensorSpec, ChannelAxis | None], AffineChoice] = {}
        self._softmaxes = {node.outputs[0].name: node for node in graph if node.op_type == "Softmax"}
        self._ends = {*placement.first_layers, *placement.last_layers}
        self._of_tables: dict[RangeKey, TensorRange] = {}
        self._tables = {  # by the tensor of its rows
            graph.by_name[request.consumer.node].outputs[0].name: request
            for request in placement.requests
            if request.role is Role.WEIGHT and is_embedding(graph.by_name[request.consumer.node])
        }

    def decide(self, request: Request) -> Decision | None:
        """The choice for one reader, or None if a bias has to stay float."""
        spec, chosen = request.spec, None
        if request.consumer in self._kept:
            return Decision(request, *self._kept[request.consumer])
        if isinstance(spec, BlockSpec):
            chosen = self._block(request, spec)
        elif isinstance(spec, FloatSpec):
            chosen = self._float(request, spec)
        elif isinstance(spec, DynamicSpec):
            chosen = DynamicChoice(spec.format), "found at run time"
        elif request.role is Role.ACTIVATION:
            chosen = self._activation(request.tensor, spec)
        elif request.role is Role.BIAS:
            chosen = self._bias(request, spec)
        elif (weight := self._weight(request.consumer)) is not None:
            where = "the tensor" if weight.axis is None else f"each channel of axis {weight.axis}"
            if weight.group_size is not None:
                where = f"each group of {weight.group_size} along axis {weight.axis}"
            chosen = weight, _reason(f"{spec.method} of {where}", self._overrides.get(request.tensor))
        if chosen is None:
            return None
        ends, choice, reason = self._options.ends, *chosen
        if ends and ends.layer and request.consumer.node in self._ends:
            is_wider = request.spec in (ends.layer.activation, ends.layer.weight)
            reason += f"; {OPTION}" if is_wider else ""
        first = None
        if request.first is not None:  # chosen for the writer, so the axes of this reader do not matter
            before = self.decide(replace(request, spec=request.first, first=None, consumer=Reader("", 0)))
            first = None if before is None else before.choice
        return Decision(request, choice, reason, first)

    def _block(self, request: Request, spec: BlockSpec) -> tuple[Choice, str]:
        node = self._nodes.get(request.consumer.node)
        axis = reduction_axis(node, request.consumer.index) if node is not None and spec.follows_reduction else None
        reason = "along the axis that is summed over" if axis is not None else "along the configured axis"
        chosen = spec.axis if axis is None else axis
        if request.tensor in self._values:
            rank = len(self._constant(request.tensor).shape)
            chosen = chosen if -rank <= chosen < rank else rank - 1
        quantizer = self._with_tensor_scale(request, spec)
        choice = BlockChoice(quantizer, chosen, spec.to_bfloat16_first)
        return choice, _reason(f"{reason}, {spec.quantizer.scale_rule.value}", self._type_override(request))

    def _with_tensor_scale(self, request: Request, spec: BlockSpec) -> BlockQuantizer:
        """The quantizer with the tensor scale of a constant, or of a measured range if the spec wants that."""
        quantizer = spec.quantizer
        if not quantizer.format.has_tensor_scale:
            return quantizer
        if request.tensor in self._values:
            array = self._constant(request.tensor).array()
            return quantizer.fixed(array.astype(np.float32, copy=False))
        if not spec.is_calibrated:
            return quantizer
        tensor_range = self._ranges[request.tensor, spec]
        reach = np.float32(max(-tensor_range.lowest, tensor_range.highest))
        return replace(quantizer, tensor_scale=float(reach / np.float32(quantizer.format.reach)))

    def _float(self, request: Request, spec: FloatSpec) -> tuple[Choice, str]:
        if not spec.is_scaled:
            return FloatChoice(spec.format, spec.is_saturating), _reason("cast", self._type_override(request))
        axis, node = None, self._nodes.get(request.consumer.node)
        if request.role is Role.ACTIVATION:
            tensor_range = self._ranges[request.tensor, spec]
            low, high = np.array([tensor_range.lowest]), np.array([tensor_range.highest])
        else:
            constant = self._constant(request.tensor)
            channels = None if node is None else self._channels(node, request, spec, len(constant.shape))
            axis = None if channels is None else channels.axis
            low, high = constant.extremes(axis)
        reach = np.maximum(-low.astype(np.float64), high)
        top = 2.0 if spec.format == "bfloat16" else float(get_format(spec.format).max)
        scale = (reach / top).astype(np.float32)
        scale[scale < (np.finfo(np.float32).tiny if spec.is_eight_bits else _LEAST_FLOAT)] = 1.0
        where = "" if axis is None else f" in each channel of axis {axis}"
        reason = f"scaled so that {reach.max(initial=0.0):.6g} becomes {top:g}"
        if spec.is_eight_bits:
            reason = f"{spec.method}: the largest magnitude becomes {top:g}{where or f', {reach[0]:.6g}'}"
        if spec.has_searched_scales and request.role is Role.WEIGHT:
            scale = searched_float_scales(constant.array(), scale, axis, spec.format)
            reason = f"least squared error{where}"
        choice = FloatChoice(spec.format, spec.is_saturating, tuple(scale.astype(float).tolist()), axis)
        if spec.is_eight_bits and request.role is Role.WEIGHT and node is not None:
            choice = self._fitted_float(node, choice, constant)
        return choice, _reason(reason, self._type_override(request))

    def _fitted_float(self, node: Node, weight: FloatChoice, constant: Constant) -> FloatChoice:
        """The choice for a weight of 8-bit floats, with scales at which ONNX Runtime can round its bias to 32 bits."""
        bias, data = node.input(2), self._by_consumer.get(Reader(node.name, 0))
        is_known = data is not None and data.role is Role.ACTIVATION and isinstance(data.spec, FloatSpec)
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm") or bias is None or bias.constant is None:
            return weight
        if data is None or not is_known or not _has_scales_of_outputs(node, weight, constant):
            return weight
        assert isinstance(data.spec, FloatSpec)
        activation, _ = self._float(data, data.spec)
        assert isinstance(activation, FloatChoice)
        return fit_weight_to_bias(weight, constant.array(), activation.scale[0], bias.constant.array())

    def _type_override(self, request: Request) -> TensorOverride | None:
        """The override that gave the request a type other than integers."""
        override = self._overrides.get(request.tensor)
        return override if override is not None and override.spec is not None else None

    def _activation(self, tensor: str, spec: AffineSpec) -> tuple[AffineChoice, str]:
        override = self._overrides.get(tensor)
        if override is not None and override.axis is not None:
            raise InvalidValueError(f"TensorQuantOverrides of '{tensor}': axis, and activations have one scale")
        if not spec.has_one_scale:
            scales = "channel" if spec.group_size is None else "group"
            raise InvalidValueError(f"activation '{tensor}': {scales} scales, and activations have one")
        members = _measured_members(self._placement, tensor, spec)
        tensor_range = combine_ranges([self._range(key) for key in members])
        choice = choice_of_range(spec, tensor_range, override, self._options.has_unsigned_relu)
        least = self._least_softmax_scale(tensor, spec)
        if override is None and choice.scale[0] < least:
            tensor_range = replace(tensor_range, highest=tensor_range.highest * least / choice.scale[0])
            choice = choice_of_range(spec, tensor_range, None, self._options.has_unsigned_relu)
        if spec.learning is not None and not spec.integer.signed and tensor_range.lowest < -choice.scale[0] / 2:
            raise InvalidValueError(
                f"tensor '{tensor}' goes down to {tensor_range.lowest:.3g}, and {spec.format} codes that learn begin "
                f"at 0: give its layer int{spec.integer.bits} by layer_quant_config; unsigned types are for what a "
                "ReLU gives"
            )
        methods = dict.fromkeys(self._range(key).method or str(spec.method) for key in members)
        reason = _reason(f"{' and '.join(methods)} {tensor_range.lowest:.6g}..{tensor_range.highest:.6g}", override)
        others = [name for name, _ in members if name != tensor]
        return choice, reason + (f", shared with {', '.join(others[:3])}" if others else "")

    def _least_softmax_scale(self, tensor: str, spec: AffineSpec) -> float:
        """The smallest scale for the result of a Softmax that ONNX Runtime computes from codes; 0 for other tensors.

        QLinearSoftmax overflows, and all its codes become 0, if scale times positions is below exp(-5). With a smaller
        scale, as flat distributions have in asymmetric 8 bits, all results would be zero.
        """
        least = 0.0
        for name, member_spec in self._placement.groups.members((tensor, spec)):
            softmax = self._softmaxes.get(name)
            read = None if softmax is None else self._by_consumer.get(Reader(softmax.name, 0))
            if softmax is None or read is None or not (_is_byte(member_spec) and _is_byte(read.spec)):
                continue
            shape = softmax.outputs[0].shape or (None,)
            axis = softmax.setting("axis", -1)
            positions = shape[axis] if isinstance(axis, int) and -len(shape) <= axis < len(shape) else None
            least = max(least, _LEAST_SOFTMAX_SUM / (positions or 1))
        return least

    def _range(self, key: RangeKey) -> TensorRange:
        """The range of an activation. Rows of a quantized table have that of the table: with the same scale they are
        rounded once, and ONNX Runtime gathers codes."""
        name, spec = key
        table = self._tables.get(name)
        if table is None or not isinstance(spec, AffineSpec) or table.spec != spec or spec.is_power_of_two:
            return self._ranges[key]
        if key not in self._of_tables:
            constant = self._constant(table.tensor)
            if isinstance(spec.method, MinMax):
                (low,), (high,) = constant.extremes()
                self._of_tables[key] = TensorRange(float(low), float(high), method=_OF_TABLE)
            else:
                tensor_range = range_of(constant.array(), spec.method, spec.integer, spec.is_symmetric)
                self._of_tables[key] = replace(tensor_range, method=_OF_TABLE)
        return self._of_tables[key]

    def _weight(self, reader: Reader) -> AffineChoice | None:
        """The choice for a constant operand, fitted to the bias of its node where that is added to the sum of products
        in 32 bits; None if it is not quantized to integers."""
        if reader not in self._weights:
            request = self._by_consumer[reader]
            spec = request.spec
            known = self._kept.get(reader)
            if known is not None:
                self._weights[reader] = known[0] if isinstance(known[0], AffineChoice) else None
            else:
                self._weights[reader] = self._fitted_weight(request, spec) if isinstance(spec, AffineSpec) else None
        return self._weights[reader]

    def _fitted_weight(self, request: Request, spec: AffineSpec) -> AffineChoice:
        node, constant = self._nodes[request.consumer.node], self._values[request.tensor].constant
        assert constant is not None, request.tensor
        channels = self._channels(node, request, spec, len(constant.shape))
        key = (request.tensor, spec, channels)
        if key not in self._plain:
            override = self._overrides.get(request.tensor)
            plain = choice_of_weight(spec, self._constant(request.tensor), channels, override)
            if self._options.has_lowest_code and override is None:
                plain = with_lowest_code(plain, spec, self._constant(request.tensor))
            self._plain[key] = plain
        choice = self._plain[key]
        bias = self._by_consumer.get(Reader(node.name, 2))
        activation = self._activation_of(node.name)
        is_free = spec.is_power_of_two or spec.learning is not None or choice.group_size is not None
        if bias is None or not is_derived_bias(bias) or activation is None or is_free:
            return choice
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm") or not _has_scales_of_outputs(node, choice, constant):
            return choice
        is_raised = self._options.has_fitted_weights
        values, bias_values = constant.array(), self._array(bias.tensor)
        fitted = fit_weight_to_bias(choice, values, activation.scale[0], bias_values, is_raised=is_raised)
        if spec.has_int16_scale and fitted is not choice:
            fitted = replace(fitted, scale=tuple(int16_scale(scale, is_upward=True) for scale in fitted.scale))
        return fitted

    def _channels(self, node: Node, request: Request, spec: AffineSpec | FloatSpec, rank: int) -> ChannelAxis | None:
        override, index = self._overrides.get(request.tensor), request.consumer.index
        is_integer = isinstance(spec, AffineSpec)
        if isinstance(spec, AffineSpec) and spec.group_size is not None:
            axis = reduction_axis(node, index) if spec.axis is None else spec.axis
            return None if axis is None else ChannelAxis(axis % rank, spec.group_size)
        if override is not None and override.axis is not None:
            if isinstance(spec, AffineSpec) and spec.is_power_of_two:
                raise InvalidValueError(f"TensorQuantOverrides of '{override.tensor}': axis with power-of-two scales")
            return ChannelAxis(_axis_of(override.axis, rank, f"TensorQuantOverrides of '{override.tensor}'"))
        is_fixed = override is not None and override.scale is not None and len(override.scale) == 1
        is_single = is_fixed or (override is not None and override.has_one_scale) or not spec.is_per_channel
        if is_single or index not in weight_inputs(node):
            return None
        data = self._by_consumer.get(Reader(node.name, 0))
        is_dynamic = data is not None and isinstance(data.spec, DynamicSpec)
        if is_integer and not spec.is_symmetric and node.op_type == "Conv" and is_dynamic:
            # ConvInteger has one zero point per weight, which channels can share only if they are symmetric
            return None
        configured = dict(self._options.channel_axes).get(node.op_type)
        if configured is not None:
            return ChannelAxis(_axis_of(configured, rank, "QDQOpTypePerChannelSupportToAxis"))
        if spec.axis is not None and node.op_type in ("Conv", "Gemm"):
            if not -rank <= spec.axis < rank:
                raise InvalidValueError(
                    f"weight '{request.tensor}' has {rank} axes, and ch_axis is {spec.axis}: expected {-rank} to "
                    f"{rank - 1}; 0 counts output channels"
                )
            return ChannelAxis(spec.axis % rank)
        axis = channel_axis(node, rank)
        return None if axis is None else ChannelAxis(axis)

    def _activation_of(self, node: str) -> AffineChoice | None:
        """The choice for the node's first operand, if it is affine."""
        request = self._by_consumer.get(Reader(node, 0))
        if request is None or not isinstance(request.spec, AffineSpec) or request.role is not Role.ACTIVATION:
            return None
        return self._activation(request.tensor, request.spec)[0]

    def _bias(self, request: Request, spec: AffineSpec) -> tuple[AffineChoice, str] | None:
        values = self._array(request.tensor)
        if not is_derived_bias(request):
            override = self._overrides.get(request.tensor)
            return own_bias(spec, values, override), _reason(f"{spec.method} of the bias itself", override)
        node = self._nodes[request.consumer.node]
        activation = self._activation_of(node.name)
        operand = self._by_consumer.get(Reader(node.name, 1))
        has_weight = operand is not None and operand.role is Role.WEIGHT  # a computed weight has no scale
        weight = self._weight(Reader(node.name, 1)) if activation is not None and has_weight else None
        if operand is None or activation is None or weight is None or weight.group_size is not None or values.ndim != 1:
            return None  # no integer sum that it could be added to
        if not _has_scales_of_outputs(node, weight, self._values[operand.tensor].constant):
            return None
        choice = derived_bias(spec.format, activation, weight)
        if len(choice.scale) not in (1, values.size):
            return None
        return choice, "activation scale times weight scale"

    def _array(self, tensor: str) -> Array:
        return self._constant(tensor).array()

    def _constant(self, tensor: str) -> Constant:
        """The constant of that name; raises an error if it has NaN or Inf, which have no scale."""
        constant = self._values[tensor].constant
        assert constant is not None, tensor
        if not constant.is_finite():
            raise ModelError(f"tensor '{tensor}' holds NaN or Inf: expected finite weights; look at how it was trained")
        return constant


def _has_scales_of_outputs(node: Node, weight: AffineChoice | FloatChoice, constant: Constant | None) -> bool:
    """True if each channel of the result has one scale, which its bias can share."""
    if weight.axis is None or constant is None:
        return True
    rank = len(constant.shape)
    axis = channel_axis(node, rank)
    return axis is not None and weight.axis % rank == axis % rank


def _is_byte(spec: TensorSpec) -> bool:
    """True for integers of 8 bits with any scale."""
    return isinstance(spec, AffineSpec) and spec.integer.bits == 8 and not spec.is_power_of_two


def _reason(rule: str, override: TensorOverride | None) -> str:
    return rule if override is None else _OVERRIDDEN + rule


def _axis_of(axis: int, rank: int, option: str) -> int:
    if not -rank <= axis < rank:
        raise InvalidValueError(f"{option}: axis {axis}, and the weight has {rank} dimensions")
    return axis % rank


def choices_before_clips(
    graph: Graph, fused: Iterable[FusedActivation], decided: Iterable[TensorChoice]
) -> dict[str, TensorChoice]:
    """Quantizers between an operator and its Relu or Clip, by the name of the activation's output.

    ONNX Runtime drops such an activation only if the lowest code stands for zero or more. Otherwise, the same quantizer
    before and behind the activation changes no value (rounding is monotone, and a rounded number rounds to itself) and
    leaves the operator between two quantizers, so that it becomes an integer kernel. Before any other activation it
    would change values.
    """
    after: dict[str, set[Choice]] = {}
    for entry in decided:
        if entry.role is Role.ACTIVATION:
            after.setdefault(entry.tensor, set()).update(
                [entry.choice] if entry.first is None else [entry.choice, entry.first]
            )
    before: dict[str, TensorChoice] = {}
    for pair in fused:
        choices = after.get(pair.output, set())
        choice = next(iter(choices)) if len(choices) == 1 else None
        if graph.by_name[pair.activation].op_type not in ("Relu", "Clip") or not isinstance(choice, AffineChoice):
            continue
        integer = integer_format(choice.format)
        if integer.bits <= 8 and choice.zero_point[0] != integer.qmin:
            reason = "the same as behind the activation, for an integer kernel"
            reader = Reader(pair.activation, 0)
            before[pair.output] = TensorChoice(pair.tensor, Role.ACTIVATION, choice, (reader,), reason)
    return before


def _tensor_choice(decision: Decision) -> TensorChoice:
    readers = (decision.request.reader,)
    return TensorChoice(
        decision.request.tensor, decision.request.role, decision.choice, readers, decision.reason, decision.first
    )


def _merged(decided: Iterable[TensorChoice], separate: frozenset[str]) -> tuple[TensorChoice, ...]:
    """One entry for all readers that see a tensor the same way.

    Readers of the tensors in `separate` keep entries of their own: behind an activation that stays a float node,
    ONNX Runtime on x86 turns int8 pairs into uint8 ones only where each has a single reader, and without that makes no
    integer kernel of the reader.
    """
    merged: dict[tuple[str, Role, Choice, Choice | None, Reader | None], TensorChoice] = {}
    for entry in decided:
        apart = entry.readers[0] if entry.tensor in separate else None
        key = (entry.tensor, entry.role, entry.choice, entry.first, apart)
        first = merged.get(key)
        merged[key] = entry if first is None else replace(first, readers=(*first.readers, *entry.readers))
    return tuple(merged.values())
