"""AWQ of MatMul and Gemm.

Before calibration, input channels are rescaled. The division goes into what computes the input if nothing but the
layers reads it (`quark.features.smooth_quant.folding`), and into a Mul before them otherwise: activations are float, so
it costs little beside the products. After choosing, the scales of weights are searched for the layer's inputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.account import AlgorithmFacts
from quark.compare.improvement import OutputErrors
from quark.decide.scales import ChannelAxis, choice_of_weight
from quark.decide.searched_scales import searched
from quark.decide.specs import AffineSpec, BlockSpec, GroupRule, TensorSpec
from quark.decide.view import ArrayConstant
from quark.errors import InvalidValueError
from quark.features.activation_aware.options import ActivationAwareOptions
from quark.features.activation_aware.scaling import Quantize, Scaling, find_scaling
from quark.features.compensation.input_products import (
    FEWEST_ROWS,
    ROWS_PER_COLUMN,
    evenly_spread,
    surveyed_layers,
    watched_inputs,
    with_weight_choices,
)
from quark.features.compensation.rounding import squared_error
from quark.features.smooth_quant.folding import Fold, find_fold
from quark.features.smooth_quant.groups import Group, Layer, find_groups
from quark.features.smooth_quant.on_onnx import OnnxRoad
from quark.onnx.calibrate import FloatRunner, survey
from quark.onnx.deciding import Decision, Work, quantized_errors
from quark.onnx.graph import constant, input_value
from quark.onnx.tied import tied_products
from quark.onnx.view import view_of
from quark.plan import AffineChoice, BlockChoice, SkippedNode
from quark.rounded import block_values, rounded

Array = NDArray[Any]
NAME, RANGES = "AWQ", "AWQ ranges"
LAYER_TYPES = ("Gemm", "MatMul")
MIN_GAIN = 0.02  # relative to the error, if the division is folded
MIN_MUL_GAIN = 0.1  # the same if the division takes a Mul
NO_DATA = "no calibration data was given, and random numbers are not as large as inputs are"


def before_calibration(work: Work, options: ActivationAwareOptions) -> list[AlgorithmFacts]:
    """Rescale input channels, in place, for the rounding that the configuration asks for."""
    quantize = rounding_of(work.settings.choose.default.weight)
    if not options.has_scales:
        return []
    if work.samples.is_random or not work.samples.count or quantize is None:
        reason = "weights are not quantized" if quantize is None else NO_DATA
        return [AlgorithmFacts(NAME, (), (SkippedNode("", "", reason),))]
    road = OnnxRoad(work.model)
    groups, left = _groups(work, road)
    count = min(work.samples.batches(options.sample_limit), work.samples.count)
    wanted = {
        value.name: InputMoments(layers[0].axis, count) for group in groups for value, layers in group.tensors.items()
    }
    moments: dict[str, InputMoments] = {}
    if wanted:
        calibrate = work.settings.calibrate
        with FloatRunner(work.model, wanted, providers=calibrate.providers) as runner:
            moments = survey(runner, wanted, work.samples, calibrate, sample_limit=options.sample_limit)
    changed: list[str] = []
    for group in reversed(groups):  # a layer's columns need their final scales before its rows are scaled
        change = _find_change(group, road, moments, quantize)
        if isinstance(change, str):
            left += [SkippedNode(layer.node.label, layer.node.op_type, change) for layer in group.layers]
        else:
            changed.append(_carry_out(group, road, *change))
    return [AlgorithmFacts(NAME, tuple(reversed(changed)), tuple(left))]


def watched(work: Work, options: ActivationAwareOptions) -> list[str]:
    """The inputs of layers with constant weights."""
    return watched_inputs(work, LAYER_TYPES) if options.has_clipping else []


def after_choosing(work: Decision, options: ActivationAwareOptions) -> list[AlgorithmFacts]:
    """Search for weight scales that change the layer's outputs less. All of it is taken back if
    the network's outputs on held-out samples get worse."""
    if not options.has_clipping or work.settings.options_of("compensation") is not None:
        return []  # compensation chooses scales itself
    if work.samples.is_random or not work.samples.count:
        return [] if options.has_scales else [AlgorithmFacts(RANGES, (), (SkippedNode("", "", NO_DATA),))]
    plan = work.plan
    errors = quantized_errors(work) if work.expected else OutputErrors()  # while there are no sums in memory
    _, left, surveys = surveyed_layers(work, LAYER_TYPES, options.sample_limit)
    nodes = {str(node.name): node for node in work.model.graph}
    rounded_data = {reader.node for entry in work.plan for reader in entry.readers if reader.index == 0}
    choices: dict[str, AffineChoice] = {}
    changed: list[str] = []
    for layer, sums in ((layer, sums) for layers, sums in surveys for layer in layers):
        choice, weight = layer.weight, constant(input_value(nodes[layer.name], 1))
        assert weight is not None, layer.name
        if not isinstance(choice, AffineChoice) or choice.axis is None or layer.name in rounded_data:
            reason = "its input is quantized, or its weight has no scales of groups or channels"
            left.append(SkippedNode(layer.name, layer.op_type, reason))
            continue
        gram = sums.pop(layer.name).inner
        choices[layer.name] = searched(choice, weight, gram[0])
        matrices = (
            layer.layout.to_matrices(rounded(weight, candidate) - weight) for candidate in (choice, choices[layer.name])
        )
        before, after = (float(squared_error(matrix.astype(np.float64), gram).sum()) for matrix in matrices)
        changed.append(f"{layer.name}: squared error {after / before if before > 0 else 1.0:.3g} of what it was")
    work.plan = with_weight_choices(plan, choices)
    if changed and work.expected and not quantized_errors(work).is_no_worse_than(errors):
        work.plan = plan
        reason = "the outputs on held-out samples got worse with it"
        left += [SkippedNode(change.partition(": ")[0], "", reason) for change in changed]
        changed.clear()
    return [AlgorithmFacts(RANGES, tuple(changed), tuple(left))]


class InputMoments:
    """Mean magnitudes and products of a layer's inputs. Channels are along `axis`; each of `samples` samples gives a
    few rows."""

    is_mergeable = False  # not merged, so that the sums are the same for any number of workers

    def __init__(self, axis: int, samples: int) -> None:
        self.axis, self._samples = axis, samples
        self.count = 0
        self.magnitudes: Array = np.zeros(0)
        self.gram: Array = np.zeros((0, 0))

    def observe(self, x: Array) -> None:
        if not np.isfinite(x).all():
            raise InvalidValueError("has NaN or Inf")
        rows = np.moveaxis(x, self.axis, -1).reshape(-1, x.shape[self.axis])
        channels = rows.shape[1]
        wanted = math.ceil(max(FEWEST_ROWS, ROWS_PER_COLUMN * channels) / self._samples)
        rows = rows[evenly_spread(len(rows), wanted)].astype(np.float32, copy=False)
        if not self.count:
            self.magnitudes, self.gram = np.zeros(channels), np.zeros((channels, channels))
        self.magnitudes += np.abs(rows).sum(axis=0, dtype=np.float64)
        self.gram += rows.T @ rows
        self.count += len(rows)

    def end_of_sample(self) -> None:
        pass

    def merge(self, other: InputMoments) -> None:
        raise NotImplementedError("the sums are made in the order of the samples")


def rounding_of(spec: TensorSpec | None) -> Quantize | None:
    """Return the rounding of weights [outputs, inputs] for that spec, with their own scales; None if they stay in
    float. If the spec searches for scales, the rounding uses the ones that the search starts from."""
    if isinstance(spec, BlockSpec):
        choice = BlockChoice(spec.quantizer, 1, spec.to_bfloat16_first)
        return lambda weight: block_values(weight.astype(np.float32), choice)
    if not isinstance(spec, AffineSpec):
        return None
    is_searched = spec.group_rule in (GroupRule.SEARCHED, GroupRule.HALF_QUADRATIC)
    plain = replace(spec, group_rule=GroupRule.LOWEST_CODE) if is_searched else spec
    channels = ChannelAxis(1, spec.group_size) if spec.group_size else ChannelAxis(0) if spec.is_per_channel else None

    def quantize(weight: Array) -> Array:
        values = weight.astype(np.float32)
        return rounded(values, choice_of_weight(plain, ArrayConstant(values), channels))

    return quantize


def _groups(work: Work, road: OnnxRoad) -> tuple[list[Group], list[SkippedNode]]:
    """The groups of layers that can be rescaled, and the layers that cannot, with the reason."""
    possible, others = find_groups(view_of(work.model), road.obstacle)
    left = [SkippedNode(node.label, node.op_type, reason) for node, reason in others if node.op_type in LAYER_TYPES]
    tied = tied_products(work.model, work.settings.choose)
    groups = []
    for group in possible:
        reason = ""
        if any(layer.node.op_type not in LAYER_TYPES for layer in group.layers):
            continue
        if any(layer.node.name in tied for layer in group.layers):
            reason = "its weight is stored together with the table of an embedding"
        elif any(layer.data != 0 or layer.weight.rank != 2 for layer in group.layers):
            reason = "its weight is not a matrix behind its input"
        if reason:
            left += [SkippedNode(layer.node.label, layer.node.op_type, reason) for layer in group.layers]
        else:
            groups.append(group)
    return groups, left


@dataclass(frozen=True, eq=False)
class _Inputs:
    """Statistics of the inputs of a group, over all tensors that it reads."""

    magnitudes: Array
    gram: Array

    def with_other(self, other: _Inputs) -> _Inputs:
        return _Inputs(self.magnitudes + other.magnitudes, self.gram + other.gram)


def _find_change(
    group: Group, road: OnnxRoad, moments: Mapping[str, InputMoments], quantize: Quantize
) -> tuple[Scaling, list[Fold | None]] | str:
    """The scales of the group, and how each of its tensors is divided by them (None: by a Mul), or why it stays."""
    known = [moments[value.name] for value in group.tensors if value.name in moments]
    if len(known) < len(group.tensors) or not all(moment.count for moment in known):
        return "its input was not looked at"
    inputs = functools.reduce(_Inputs.with_other, [_Inputs(moment.magnitudes, moment.gram) for moment in known])
    distinct = {layer.weight: layer for layer in group.layers}.values()
    weights = [_matrix(layer) for layer in distinct]
    scaling = find_scaling(weights, inputs.magnitudes, inputs.gram, quantize)
    gain = 1 - scaling.error / scaling.error_before if scaling.error_before > 0 else 0.0
    if gain < MIN_GAIN:
        return f"no scales would lower its error by {MIN_GAIN:.0%}"
    if not all(road.is_possible(layer.rows_times(scaling.scales)) for layer in group.layers):
        return "its weight would leave the range of its type"
    folds: list[Fold | None] = []
    for value, layers in group.tensors.items():
        readers = [(layer.node, layer.data) for layer in layers]
        is_free = not value.outputs and all(reader in readers for reader in value.readers)
        folds.append(find_fold(value, _factor(layers[0], scaling.scales), road) if is_free else None)
    if None in folds and gain < MIN_MUL_GAIN:
        return f"would take a Mul to lower its error by {gain:.0%}"
    return scaling, folds


def _carry_out(group: Group, road: OnnxRoad, scaling: Scaling, folds: Sequence[Fold | None]) -> str:
    """Change the graph; returns what was done, in words."""
    for layer in {layer.weight: layer for layer in group.layers}.values():
        road.write([layer.rows_times(scaling.scales)])
    for layers, fold in zip(group.tensors.values(), folds, strict=True):
        if fold is not None:
            road.write(fold.edits)
        else:
            road.insert_mul([(layer.node, layer.data) for layer in layers], _factor(layers[0], scaling.scales))
    into = [f"folded into {fold.into.op_type} {fold.into.label}" for fold in folds if fold is not None]
    into += [f"{folds.count(None)} Mul inserted"] if None in folds else []
    names = ", ".join(layer.node.label for layer in group.layers)
    ratio = scaling.error / scaling.error_before
    return f"{names}: exponent {scaling.exponent:g}, {' and '.join(into)}, error {ratio:.3g} of what it was"


def _matrix(layer: Layer) -> Array:
    """The weight as [outputs, inputs]."""
    weight = layer.weight.array()
    assert weight is not None, layer.node.label
    return weight.T if layer.row_axis == 0 else weight


def _factor(layer: Layer, scales: Array) -> Array:
    """The divisor of the layer's input for these scales, in a shape that broadcasts to it."""
    return (1 / scales).reshape(-1, *(1,) * (-layer.axis - 1))
