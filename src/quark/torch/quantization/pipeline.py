"""The whole: capture, optimize, equalize, place, observe, choose, refine, insert. Each line is a folder.

Training is the user's, between this and `freeze`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from quark.account import AlgorithmFacts
from quark.errors import InvalidValueError
from quark.mixed_precision import MixedPlan
from quark.npu import Operation
from quark.plan import QuantizationPlan, Role
from quark.ranges import TensorRange
from quark.torch.capture import Batch, Batches, capture, input_names
from quark.torch.choose import (
    Decisions,
    Placement,
    bias_roundings,
    choose,
    npu_operations,
    place,
    tensors_to_observe,
    with_plan,
)
from quark.torch.equalize import clip_tensors, equalize_cross_layer
from quark.torch.graph import Network
from quark.torch.insert import insert
from quark.torch.observe import RangeKey, channel_extremes, observe
from quark.torch.optimize import optimize
from quark.torch.refine import LayerChoices, correct_biases, give_biases
from quark.torch.specs import Settings
from quark.torch.train.networks import QuantizedNetwork, is_derived_bias, with_state
from quark.torch.train.positions import settle_positions

_RANDOM_BATCHES = 4


def quantize_network(
    model: nn.Module | ExportedProgram,
    loader: Iterable[Any] | None,
    settings: Settings,
    plan: QuantizationPlan | MixedPlan | None = None,
) -> QuantizedNetwork:
    """Quantize a model by the settings, with the types that a plan has for its layers where there is one; the model
    itself is not touched."""
    batches = _batches(model, loader, settings)
    network = capture(model, lambda: _first(batches, model))
    optimize(network)
    settings = settings if plan is None else with_plan(network, settings, plan)
    algorithms = _equalize(network, batches if loader is not None else None, settings)
    has_correction = settings.correct_biases is not None and batches is not None and loader is not None
    if has_correction:
        give_biases(network)
    placement = place(network, settings)
    ranges = _observe(network, placement, batches)
    decisions, operations, settled = _decide(network, placement, ranges, settings)
    if has_correction and batches is not None and settings.correct_biases is not None:
        roundings = bias_roundings(placement)
        corrected = correct_biases(network, _layers(decisions), batches, settings.correct_biases, roundings)
        decisions, operations, settled = _decide(network, placement, ranges, settings)
        algorithms = (*algorithms, corrected)
    insert(network, decisions)
    return _finished(network, decisions, operations, (*algorithms, *settled), settings)


def _batches(model: nn.Module | ExportedProgram, loader: Iterable[Any] | None, settings: Settings) -> Batches | None:
    if loader is not None:
        return Batches(loader, input_names(model))
    if not isinstance(model, ExportedProgram) or model.example_inputs is None:
        return None
    warnings.warn(
        "no calibration data: ranges are found from random numbers, which says little about real data; hand a loader "
        "to quantize_model",
        stacklevel=4,
    )
    generator = torch.Generator().manual_seed(settings.seed)
    like = model.example_inputs[0]
    random = [tuple(_random_like(each, generator) for each in like) for _ in range(_RANDOM_BATCHES)]
    return Batches(random, input_names(model))


def _random_like(tensor: Any, generator: torch.Generator) -> Any:
    if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator)
    return tensor


def _first(batches: Batches | None, model: object) -> Batch:
    if batches is None:
        raise InvalidValueError(
            f"{type(model).__name__} has to be traced with an example: hand calibration data to quantize_model, or "
            "quark.torch.export_for_training(model, example_inputs) in the place of the model"
        )
    return next(iter(batches))


def _equalize(network: Network, batches: Batches | None, settings: Settings) -> tuple[AlgorithmFacts, ...]:
    if settings.equalize is None:
        return ()
    wanted = clip_tensors(network, settings.equalize) if batches is not None else {}
    extremes = channel_extremes(network, wanted, batches or ())
    return (equalize_cross_layer(network, settings.equalize, extremes),)


def _observe(network: Network, placement: Placement, batches: Batches | None) -> Mapping[RangeKey, TensorRange]:
    wanted = tensors_to_observe(placement)
    if wanted and batches is None:
        raise InvalidValueError(
            f"{len(wanted)} activations have static scales, such as '{wanted[0][0]}', and there is no data: "
            "hand a loader to quantize_model, or take is_dynamic=True or weights alone"
        )
    return observe(network, wanted, batches or ())


def _decide(
    network: Network, placement: Placement, ranges: Mapping[RangeKey, TensorRange], settings: Settings
) -> tuple[Decisions, tuple[Operation, ...], tuple[AlgorithmFacts, ...]]:
    """All choices; for an NPU, within its limits."""
    decisions = choose(network, placement, ranges)
    if not settings.applies_npu_rules:
        return decisions, (), ()
    operations = npu_operations(network, decisions)
    moved, facts = settle_positions(operations, {each.quantizer: each.choice for each in decisions.chosen})
    chosen = (replace(each, choice=moved.get(each.quantizer, each.choice)) for each in decisions.chosen)
    return replace(decisions, chosen=tuple(chosen)), operations, (facts,)


def _layers(decisions: Decisions) -> dict[str, LayerChoices]:
    """For every layer with a weight, how its operands are quantized."""
    found: dict[str, LayerChoices] = {}
    inputs = {each.request.consumer.node: each.choice for each in decisions.chosen if each.request.consumer.index == 0}
    for each in decisions.chosen:
        if each.request.role is Role.WEIGHT:
            node = each.request.consumer.node
            found[node] = LayerChoices(inputs.get(node), each.choice)
    return found


def _finished(
    network: Network,
    decisions: Decisions,
    operations: tuple[Operation, ...],
    algorithms: tuple[AlgorithmFacts, ...],
    settings: Settings,
) -> QuantizedNetwork:
    plan = decisions.plan
    state = {
        "plan": plan,
        "algorithms": algorithms,
        "config": settings.config,
        "operations": operations,
        "repeated": tuple(each for each in decisions.chosen if each.is_repeated),
        "derived_biases": tuple(each for each in plan if is_derived_bias(each.role, each.choice)),
    }
    quantized: QuantizedNetwork = with_state(network, QuantizedNetwork, state)
    return quantized.eval()
