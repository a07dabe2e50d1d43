"""From a placement and observed ranges to a plan: every scale, zero point and axis, with the rule that decided it.

The numbers are those that the ONNX side gives for the same ranges, by the same functions. Beside the plan goes what it
does not say: which places share one quantizer, and what of it is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import fx, nn

from quark.errors import InvalidValueError, ModelError
from quark.onnx.choose.affine_choices import (
    Array,
    ChannelAxis,
    combine_ranges,
    derived_bias,
    fit_weight_to_bias,
)
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
from quark.rounded import rounded
from quark.torch.choose.affine_choices import choice_for_range, choice_for_weight, onnx_spec
from quark.torch.choose.operators import operator_of, reduction_axis, weight_axis
from quark.torch.choose.parameters import parameter_of
from quark.torch.choose.placement import WEIGHT, Placement, Request
from quark.torch.graph import inputs_of
from quark.torch.specs import AffineSpec, BlockSpec, FloatSpec, Granularity, TensorSpec

RangeKey = tuple[str, AffineSpec]


@dataclass(frozen=True)
class Chosen:
    """One request, decided: the quantizer of that name stands there. `is_repeated`: the operator before it only moved
    values that went through the same quantizer, so that nothing changes, and training does without."""

    request: Request
    choice: Choice
    reason: str
    quantizer: str
    is_repeated: bool = False


@dataclass(frozen=True)
class Decisions:
    """All of them, in the order of the graph."""

    chosen: tuple[Chosen, ...]
    placement: Placement

    @property
    def plan(self) -> QuantizationPlan:
        """One entry for all readers that see a tensor the same way."""
        merged: dict[tuple[str, Role, Choice], TensorChoice] = {}
        for each in self.chosen:
            key = (each.request.tensor, each.request.role, each.choice)
            first = merged.get(key) or TensorChoice(
                each.request.tensor, each.request.role, each.choice, (), each.reason
            )
            merged[key] = replace(first, readers=(*first.readers, each.request.reader))
        return QuantizationPlan(tuple(merged.values()), self.placement.skipped)


def tensors_to_observe(placement: Placement) -> list[RangeKey]:
    """The activations whose range must be known, each with the spec that it is wanted for."""
    keys: dict[RangeKey, None] = {}
    for request in placement.requests:
        if request.role is Role.ACTIVATION and isinstance(request.spec, AffineSpec) and not request.spec.is_dynamic:
            keys.update(dict.fromkeys(_observed(placement, request.tensor, request.spec)))
    return list(keys)


def choose(network: fx.GraphModule, placement: Placement, ranges: Mapping[RangeKey, TensorRange]) -> Decisions:
    """Every decision; the network is not touched."""
    chooser = _Chooser(network, placement, ranges)
    decided = [each for each in map(chooser.decide, placement.requests) if each is not None]
    return Decisions(tuple(_with_repetitions(network, placement, decided)), placement)


def _with_repetitions(network: fx.GraphModule, placement: Placement, decided: list[Chosen]) -> list[Chosen]:
    read = {(each.request.reader.node, each.request.reader.index): each.quantizer for each in decided}
    sources = {str(node.name): [index for index, _ in inputs_of(node)] for node in network.graph.nodes}
    marked = []
    for each in decided:
        tensor = each.request.tensor
        before = [read.get((tensor, index)) for index in sources.get(tensor, ())]
        is_moved = tensor in placement.derived and bool(before)
        is_repeated = is_moved and all(quantizer == each.quantizer for quantizer in before)
        marked.append(replace(each, is_repeated=is_repeated))
    return marked


def _observed(placement: Placement, tensor: str, spec: AffineSpec) -> list[RangeKey]:
    """Of the group of a tensor those that the others follow from; all where each follows from another."""
    members = [(name, each) for name, each in placement.groups.members((tensor, spec)) if isinstance(each, AffineSpec)]
    return [key for key in members if key[0] not in placement.derived] or members


class _Chooser:
    def __init__(self, network: fx.GraphModule, placement: Placement, ranges: Mapping[RangeKey, TensorRange]) -> None:
        self._network = network
        self._placement = placement
        self._ranges = ranges
        self._nodes = {str(node.name): node for node in network.graph.nodes}
        self._by_consumer = {each.consumer: each for each in placement.requests}
        self._weights: dict[Reader, AffineChoice] = {}
        self._names: dict[object, str] = {}

    def decide(self, request: Request) -> Chosen | None:
        """The choice for one reader, or None where a bias has nothing integer that it could be added to."""
        found = self._choice(request)
        return None if found is None else Chosen(request, *found, self._quantizer_name(request))

    def _choice(self, request: Request) -> tuple[Choice, str] | None:
        spec = request.spec
        if isinstance(spec, BlockSpec):
            return self._block(request, spec)
        if isinstance(spec, FloatSpec):
            return FloatChoice(spec.format), "cast"
        if request.role is Role.BIAS:
            return self._bias(request, spec)
        if request.role is Role.WEIGHT:
            return self._weight(request), f"{spec.method} of the weight"
        if spec.is_dynamic:
            return DynamicChoice(spec.format.name), "found at run time"
        return self._activation(request.tensor, spec)

    def _block(self, request: Request, spec: BlockSpec) -> tuple[Choice, str]:
        node = self._nodes.get(request.consumer.node)
        axis = spec.axis
        if axis is None and node is not None:
            axis = reduction_axis(operator_of(self._network, node).op_type, request.consumer.index)
        axis = 1 if axis is None else axis
        return BlockChoice(spec.quantizer, axis, spec.to_bfloat16_first), f"blocks, {spec.quantizer.scale_rule.value}"

    def _activation(self, tensor: str, spec: AffineSpec) -> tuple[AffineChoice, str]:
        if spec.granularity is not Granularity.TENSOR:
            raise InvalidValueError(f"activation '{tensor}': {spec.granularity.value} scales, and activations have one")
        members = _observed(self._placement, tensor, spec)
        found = combine_ranges([self._ranges[key] for key in members])
        choice = choice_for_range(spec, found)
        _refuse_signs(tensor, spec, found, choice)
        others = [name for name, _ in members if name != tensor]
        shared = f", shared with {', '.join(others[:3])}" if others else ""
        return choice, f"{spec.method} {found.lowest:.6g}..{found.highest:.6g}{shared}"

    def _weight(self, request: Request) -> AffineChoice:
        """Fitted to the bias, where that is added to the sum of products in 32 bits."""
        if request.consumer not in self._weights:
            spec = request.spec
            assert isinstance(spec, AffineSpec)
            values = self._values(request)
            choice = choice_for_weight(spec, values, self._channels(request, spec, values.ndim))
            self._weights[request.consumer] = self._fitted(request, spec, choice, values)
        return self._weights[request.consumer]

    def _fitted(self, request: Request, spec: AffineSpec, choice: AffineChoice, values: Array) -> AffineChoice:
        bias = self._by_consumer.get(Reader(request.consumer.node, 2))
        activation = self._activation_of(request.consumer.node)
        is_free = spec.is_power_of_two or spec.learning is not None or choice.group_size is not None
        if bias is None or not _is_derived(bias) or activation is None or is_free:
            return choice
        if not self._has_scales_of_outputs(request, choice):
            return choice
        return fit_weight_to_bias(choice, values, activation.scale[0], self._values(bias))

    def _has_scales_of_outputs(self, request: Request, choice: AffineChoice) -> bool:
        """That a channel of the result has one scale: else there is no step that its bias could share."""
        return choice.axis is None or choice.axis == weight_axis(self._network, self._nodes[request.consumer.node])

    def _channels(self, request: Request, spec: AffineSpec, rank: int) -> ChannelAxis | None:
        node = self._nodes[request.consumer.node]
        op_type = operator_of(self._network, node).op_type
        if spec.granularity is Granularity.GROUP:
            axis = reduction_axis(op_type, WEIGHT) if spec.axis is None else spec.axis
            return None if axis is None else ChannelAxis(axis % rank, spec.group_size)
        if spec.granularity is Granularity.TENSOR:
            return None
        axis = spec.axis if spec.axis is not None and op_type in ("Conv", "Gemm") else weight_axis(self._network, node)
        if axis is not None and not -rank <= axis < rank:
            raise InvalidValueError(
                f"weight '{request.tensor}' has {rank} axes, and ch_axis is {axis}: expected {-rank} to {rank - 1}; 0 "
                "counts output channels"
            )
        return None if axis is None else ChannelAxis(axis % rank)

    def _activation_of(self, node: str) -> AffineChoice | None:
        """What the node's first operand is quantized with, where that is known."""
        request = self._by_consumer.get(Reader(node, 0))
        if request is None or request.role is not Role.ACTIVATION:
            return None
        if not isinstance(request.spec, AffineSpec) or request.spec.is_dynamic:
            return None
        return self._activation(request.tensor, request.spec)[0]

    def _bias(self, request: Request, spec: AffineSpec) -> tuple[AffineChoice, str] | None:
        values = self._values(request)
        if not _is_derived(request):
            return choice_for_weight(spec, values, None), f"{spec.method} of the bias itself"
        activation = self._activation_of(request.consumer.node)
        weight = self._by_consumer.get(Reader(request.consumer.node, WEIGHT))
        if activation is None or weight is None or not isinstance(weight.spec, AffineSpec):
            return None
        chosen = self._weight(weight)
        if chosen.group_size is not None or not self._has_scales_of_outputs(weight, chosen):
            return None
        return derived_bias(onnx_spec(spec), activation, chosen), "activation scale times weight scale"

    def _values(self, request: Request) -> Array:
        tensor = parameter_of(self._network, request.tensor)
        if tensor is None:
            raise ModelError(f"parameter '{request.tensor}' is not in the network")
        array = tensor.detach().float().cpu().numpy()
        if not np.isfinite(array).all():
            raise ModelError(f"parameter '{request.tensor}' holds NaN or Inf: look at how it was trained")
        return array

    def _quantizer_name(self, request: Request) -> str:
        """One name for each quantizer: that of the first tensor of its group, or of the parameter."""
        spec: TensorSpec = request.spec
        is_known = isinstance(spec, AffineSpec) and not spec.is_dynamic
        first = self._placement.groups.members((request.tensor, spec))[0][0] if is_known else request.tensor
        axis = self._block(request, spec)[0] if isinstance(spec, BlockSpec) else None
        key = (first, spec, axis, None if request.role is Role.ACTIVATION else request.consumer)
        if key not in self._names:
            plain = first.replace(".", "_")
            taken = set(self._names.values())
            numbered = (f"{plain}_{number}" for number in range(2, len(taken) + 3))
            is_free = plain not in taken and not hasattr(nn.Module, plain)  # a node may be called `to`, as modules' own
            self._names[key] = plain if is_free else next(each for each in numbered if each not in taken)
        return self._names[key]


def bias_roundings(placement: Placement) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """For every layer whose bias is an integer with a scale of its own: what becomes of a bias of such values."""

    def rounding(spec: AffineSpec) -> Callable[[torch.Tensor], torch.Tensor]:
        def kept(values: torch.Tensor) -> torch.Tensor:
            array = values.detach().float().cpu().numpy()
            return torch.from_numpy(rounded(array, choice_for_weight(spec, array, None))).to(values)

        return kept

    return {
        each.consumer.node: rounding(each.spec)
        for each in placement.requests
        if each.role is Role.BIAS and isinstance(each.spec, AffineSpec) and not _is_derived(each)
    }


def _refuse_signs(tensor: str, spec: AffineSpec, found: TensorRange, choice: AffineChoice) -> None:
    """Codes that learn begin at 0 where they have no sign: all below would be lost, and no step brings it back."""
    if spec.learning is not None and not spec.format.signed and found.lowest < -choice.scale[0] / 2:
        raise InvalidValueError(
            f"tensor '{tensor}' goes down to {found.lowest:.3g}, and {spec.format} codes that learn begin at 0: give "
            f"its layer int{spec.format.bits} by layer_quant_config; unsigned types are for what a ReLU gives"
        )


def _is_derived(request: Request) -> bool:
    """A bias of 32 bits has the scale of what it is added to; narrower ones have their own."""
    return request.role is Role.BIAS and isinstance(request.spec, AffineSpec) and request.spec.format.bits == 32
