"""Compensation of Conv, ConvTranspose, Gemm and MatMul, from the float network's activations and their rounding."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.account import AlgorithmFacts
from quark.compare.improvement import OutputErrors
from quark.features.bias_correction import on_onnx as bias_correction
from quark.features.compensation.input_products import Sums, surveyed_layers, watched_inputs, with_weight_choices
from quark.features.compensation.layer_rounding import rounded_matrices
from quark.features.compensation.options import CompensationOptions
from quark.features.compensation.rounding import best_weights, squared_error
from quark.features.finetuning.layers import TrainedLayer
from quark.onnx.blas_threads import one_blas_thread
from quark.onnx.calibrate.runner import processor_count
from quark.onnx.deciding import Decision, Work, quantized_errors
from quark.onnx.graph import constant, input_value, set_constant
from quark.onnx.progress import track
from quark.plan import AffineChoice, SkippedNode
from quark.rounded import rounded

Array = NDArray[Any]
NAME = "compensation"
LAYER_TYPES = ("Conv", "ConvTranspose", "Gemm", "MatMul")
STRENGTHS = (0.2, 1.0, 4.0)  # shares of the mean of the diagonal that are tried
# The first share that is tried is this, over the number of samples. Rows of one sample are alike (one voice, and the
# silence after it), so few samples say little about directions in which their inputs hardly vary, however many rows.
SHARE_OF_ONE_SAMPLE = 4.0
ROWS_FOR_COLUMNS = 4  # with quantized inputs, a layer is left alone if it has more columns than this for every row
SIMILAR = 1.2  # how much less may be gained on samples that were held back
_TINY = 1e-300
MOST_LAYERS = 4  # at a time: each takes the memory of several Gram matrices
SWEEPS = 2  # over columns that were rounded: each gets the best values that the others leave it


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
    plan, before = work.plan, _final_errors(work)  # while there are no sums in memory
    found, left, products = surveyed_layers(work, LAYER_TYPES, options.sample_limit)
    nodes = {str(node.name): node for node in work.model.graph}
    changed: list[str] = []
    choices: dict[str, AffineChoice] = {}
    originals: dict[str, Array] = {}
    standing = {name: value.const_value for name, value in work.model.graph.initializers.items()}

    def compensate(layer: TrainedLayer) -> _Result | str:
        weight = constant(input_value(nodes[layer.name], 1))
        assert weight is not None, layer.name
        return _compensate(layer, weight, products.pop(layer.name), options)

    with (
        track(len(found), "compensating") as advance,
        one_blas_thread(),
        ThreadPoolExecutor(min(processor_count(), MOST_LAYERS)) as pool,
    ):
        for layer, result in zip(found, pool.map(compensate, found), strict=True):
            if isinstance(result, str):
                left.append(SkippedNode(layer.name, layer.op_type, result))
            else:
                weight = constant(input_value(nodes[layer.name], 1))
                assert weight is not None, layer.name
                originals[layer.name] = weight
                set_constant(work.model, nodes[layer.name], 1, result.weight)
                changed.append(f"{layer.name}: {result.gain}")
                if result.choice is not None:
                    choices[layer.name] = result.choice
            advance()
    work.plan = with_weight_choices(plan, choices)
    if changed and not _final_errors(work).is_no_worse_than(before):
        for name, value in work.model.graph.initializers.items():
            value.const_value = standing.get(name, value.const_value)
        work.plan = plan
        reason = "the outputs on held-out samples got worse with it"
        left += [SkippedNode(each.partition(": ")[0], "", reason) for each in changed]
        changed.clear()
    if changed:
        work.unrounded |= originals
    return [AlgorithmFacts(NAME, tuple(changed), tuple(left))]


def _final_errors(work: Decision) -> OutputErrors:
    """The errors on held-out samples with the biases that bias correction, if it follows, would leave; none without
    float outputs to compare with."""
    if not work.expected:
        return OutputErrors()
    options = work.settings.options_of("bias_correction")
    if options is None:
        return quantized_errors(work)
    plan, positions = work.plan, work.positions
    standing = {name: value.const_value for name, value in work.model.graph.initializers.items()}
    bias_correction.after_choosing(work, options)
    errors = quantized_errors(work)
    for name, value in work.model.graph.initializers.items():
        value.const_value = standing.get(name, value.const_value)
    work.plan, work.positions = plan, positions
    return errors


@dataclass(frozen=True, eq=False)
class _Result:
    """New weights, what was gained in words, and how they are rounded if their scales changed."""

    weight: Array
    gain: str
    choice: AffineChoice | None


def _compensate(layer: TrainedLayer, weight: Array, sums: Sums, options: CompensationOptions) -> _Result | str:
    """The weights and what was gained; or why they stay."""
    columns = layer.layout.matrices[2]
    if sums.data is not None and ROWS_FOR_COLUMNS * sums.seen < columns:
        return f"{sums.seen} rows of inputs do not show how {columns} columns vary together"
    strength = _strength(layer, weight, sums, options)
    if isinstance(strength, str):
        return strength
    inner = _with_diagonal(sums.inner, strength)
    matrices = layer.layout.to_matrices(weight.astype(np.float64))
    best = matrices if sums.cross is None else best_weights(matrices, inner, sums.cross, options.damping)
    attempt = rounded_matrices(layer, weight, best, inner, options, SWEEPS)
    if isinstance(attempt, str):
        return attempt
    found, groups = attempt
    plain = layer.layout.to_matrices(rounded(weight, layer.weight).astype(np.float64))
    before, after = (squared_error(best - each, inner) for each in (plain, found))
    is_better = after < before
    kept = np.where(is_better[:, :, None], found, matrices)
    total = float(before.sum())
    ratio = float(np.where(is_better, after, before).sum()) / total if total > 0 else 1.0
    if not is_better.any():
        return "no output would be closer to the float network"
    choice = None if groups is None else groups.choice(is_better)
    kept_weight = layer.layout.from_matrices(kept).astype(weight.dtype)
    return _Result(kept_weight, f"squared error {ratio:.3g} of what it was", choice)


def _strength(layer: TrainedLayer, weight: Array, sums: Sums, options: CompensationOptions) -> float | str:
    """By how much the diagonal is raised, as a share of its mean, so that correlations count that other samples have.

    Some samples are held back. If compensation gains about as much on them as on the others, it is the first share;
    otherwise the share with the least error on them is found. Returns a reason if none is better than plain rounding.
    """
    if sums.data is not None:
        return 0.0
    first = SHARE_OF_ONE_SAMPLE / sums.sample_count
    if sums.aside is None or not sums.aside.any():
        return first
    train = sums.inner - sums.aside
    matrices = layer.layout.to_matrices(weight.astype(np.float64))
    plain = matrices - layer.layout.to_matrices(rounded(weight, layer.weight).astype(np.float64))
    before = float(squared_error(plain, sums.aside).sum())
    least, chosen = before, None
    for strength in (first, *(each for each in STRENGTHS if each > first)):
        inner = _with_diagonal(train, strength)
        attempt = rounded_matrices(layer, weight, matrices, inner, options, 0)
        if isinstance(attempt, str):
            return attempt
        error = matrices - attempt[0]
        after = float(squared_error(error, sums.aside).sum())
        if after >= least and chosen is not None:
            break
        if after < least:
            least, chosen = after, strength
        own = float(squared_error(error, train).sum()) / max(float(squared_error(plain, train).sum()), _TINY)
        if strength == first and after <= SIMILAR * own * before:
            break
    return "it would not be closer on samples that were held back" if chosen is None else chosen


def _with_diagonal(inner: Array, share: float) -> Array:
    """Matrices with that share of the mean of their diagonal added to it."""
    mean = np.einsum("gii->g", inner)[:, None, None] / inner.shape[-1]
    return inner + share * mean * np.eye(inner.shape[-1]) if share else inner
