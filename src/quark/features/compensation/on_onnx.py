"""Compensation of Conv, ConvTranspose, Gemm and MatMul, from the float network's activations and their rounding."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

from numpy.typing import NDArray

from quark.account import AlgorithmFacts
from quark.compare.improvement import OutputErrors
from quark.features.bias_correction import on_onnx as bias_correction
from quark.features.compensation.input_products import Sums, surveyed_layers, watched_inputs, with_weight_choices
from quark.features.compensation.layers import CompensatedLayer, compensated_layer
from quark.features.compensation.options import CompensationOptions
from quark.features.finetuning.layers import TrainedLayer
from quark.onnx.blas_threads import one_blas_thread
from quark.onnx.calibrate.runner import processor_count
from quark.onnx.deciding import Decision, Work, quantized_errors
from quark.onnx.graph import constant, input_value, set_constant
from quark.onnx.large_tensors import free_memory
from quark.onnx.progress import track
from quark.plan import AffineChoice, SkippedNode

Array = NDArray[Any]
NAME = "compensation"
LAYER_TYPES = ("Conv", "ConvTranspose", "Gemm", "MatMul")
MOST_LAYERS = 4  # at a time
# matrices of float32 that rounding a layer takes in addition to its sums: 1.3 GB with 4096 columns
GRAM_MATRICES = 20


def watched(work: Work, options: CompensationOptions) -> list[str]:
    """The inputs of layers with constant weights."""
    return watched_inputs(work, LAYER_TYPES)


def after_choosing(work: Decision, options: CompensationOptions) -> list[AlgorithmFacts]:
    """Round weights in place, and choose new scales for groups. Output channels that would get worse stay as they are.

    A layer that improves by itself may still make the network worse. So both networks, with the biases that belong to
    each, are compared on held-out samples, and all layers are rolled back if the outputs got worse."""
    if work.samples.is_random or not work.samples.count:
        reason = "no calibration data was given, and random numbers do not vary together as inputs do"
        return [AlgorithmFacts(NAME, (), (SkippedNode("", "", reason),))]
    correction = work.settings.options_of("bias_correction")
    beside = [] if correction is None else [(bias_correction.unmeasured(work, correction), correction.sample_limit)]
    count, left, surveys = surveyed_layers(work, LAYER_TYPES, options.sample_limit, *beside)
    first = next(surveys, ([], {}))  # correction needs it for the errors before compensation
    before = _final_errors(work)
    standing = work.state
    nodes = {str(node.name): node for node in work.model.graph}
    changed: list[str] = []
    choices: dict[str, AffineChoice] = {}
    originals: dict[str, Array] = {}

    def weight_of(layer: TrainedLayer) -> Array:
        weight = constant(input_value(nodes[layer.name], 1))
        assert weight is not None, layer.name
        return weight

    def compensate(layer: TrainedLayer, sums: dict[str, Sums]) -> CompensatedLayer | str:
        return compensated_layer(layer, weight_of(layer), sums.pop(layer.name), options)

    with track(count, "compensating") as advance, one_blas_thread():
        for layers, sums in chain([first], surveys):
            with ThreadPoolExecutor(_layers_at_a_time(sums)) as pool:
                for layer, result in zip(layers, pool.map(partial(compensate, sums=sums), layers), strict=True):
                    if isinstance(result, str):
                        left.append(SkippedNode(layer.name, layer.op_type, result))
                    else:
                        originals[layer.name] = weight_of(layer)
                        set_constant(work.model, nodes[layer.name], 1, result.weight)
                        changed.append(f"{layer.name}: {result.gain}")
                        if result.choice is not None:
                            choices[layer.name] = result.choice
                    advance()
    work.plan = with_weight_choices(work.plan, choices)
    if changed and not _final_errors(work).is_no_worse_than(before):
        work.restore(standing)
        reason = "the outputs on held-out samples got worse with it"
        left += [SkippedNode(change.partition(": ")[0], "", reason) for change in changed]
        changed.clear()
    if changed:
        work.unrounded |= originals
    return [AlgorithmFacts(NAME, tuple(changed), tuple(left))]


def _layers_at_a_time(sums: Mapping[str, Sums]) -> int:
    """The number of layers that are rounded side by side: one for each processor, if they fit into the free memory. The
    result is the same for any number."""
    most, free = min(processor_count(), MOST_LAYERS), free_memory()
    if free is None:
        return most
    return max(1, min(most, free // (GRAM_MATRICES * max((own.inner.nbytes for own in sums.values()), default=1))))


def _final_errors(work: Decision) -> OutputErrors:
    """The errors on held-out samples with the biases that bias correction, if it follows, would leave; none without
    float outputs to compare with."""
    if not work.expected:
        return OutputErrors()
    options = work.settings.options_of("bias_correction")
    if options is None:
        return quantized_errors(work)
    standing = work.state
    bias_correction.after_choosing(work, options)
    errors = quantized_errors(work)
    work.restore(standing)
    return errors
