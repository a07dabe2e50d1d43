"""Correct each bias by the mean error that rounding makes in its layer.

    b' = b + E[y_float - y_quantized]     for each output channel

E is the mean over positions, and over samples the mean of the middle half: a few samples with a value far outside the
range would otherwise decide the bias of all others.

Both outputs are computed from the float network's activations, so that only the layer's own rounding counts, of its
input and of its weights. A correction that follows the quantized network layer by layer also undoes what earlier layers
did, and on residual networks runs away with it.

The mean of y over positions is linear in the taps of `taps.py`: with x the input, e the error of its rounding, w and v
the float and the rounded weights,

    E[y_float - y_quantized] = sum of (w - v) * E[x] - v * E[e]

so that a few sums for each channel and sample are all that a pass over the samples has to keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.account import AlgorithmFacts
from quark.errors import InvalidValueError
from quark.onnx.graph import constant, set_constant
from quark.onnx.refine.layers import Layer, inputs_of, layers
from quark.onnx.refine.tap_sums import tap_sums
from quark.onnx.refine.taps import Taps, mean_products
from quark.plan import Choice, QuantizationPlan, SkippedNode
from quark.rounded import rounded

Array = NDArray[Any]
NAME = "bias correction"


class TapMeans:
    """The mean taps of one tensor and of the error of its rounding, sample by sample, for all layers that read it."""

    is_mergeable = True

    def __init__(self, wanted: list[tuple[Taps, Choice | None]]) -> None:
        self._means: dict[tuple[Taps, Choice | None], list[tuple[Array, Array]]] = {key: [] for key in wanted}

    def observe(self, x: Array) -> None:
        x = x.astype(np.float32, copy=False)
        for key, sums in tap_sums(x, self._means):
            if not np.isfinite(sums.values).all():
                raise InvalidValueError("has NaN or Inf")
            count = np.float32(max(sums.positions, 1))
            self._means[key].append((sums.values / count, sums.errors / count))

    def end_of_sample(self) -> None:
        pass

    def merge(self, other: TapMeans) -> None:
        for key, found in other._means.items():
            self._means[key] += found

    def means(self, taps: Taps, choice: Choice | None) -> tuple[Array, Array]:
        """The mean taps of the tensor, and of the error, [samples, channels, *kernel]."""
        found = self._means[taps, choice]
        return np.concatenate([each for each, _ in found]), np.concatenate([each for _, each in found])


def tensors_to_average(model: ir.Model, plan: QuantizationPlan) -> dict[str, TapMeans]:
    """What a pass over the samples has to gather, by tensor."""
    found, _ = layers(model, plan)
    return {name: TapMeans([(each.taps, each.data) for each in readers]) for name, readers in inputs_of(found)}


def correct_biases(
    model: ir.Model, plan: QuantizationPlan, means: Mapping[str, TapMeans]
) -> tuple[AlgorithmFacts, frozenset[str]]:
    """Change the biases of the float model in place; with the account, the names of the constants that changed."""
    found, left = layers(model, plan)
    nodes = {str(node.name): node for node in model.graph}
    changed: list[str] = []
    tensors: list[str] = []
    for layer in found:
        correction = mean_error(layer, *means[layer.input].means(layer.taps, layer.data))
        reader = nodes[layer.bias_of.node]
        bias = constant(reader.inputs[layer.bias_of.index])
        assert bias is not None, layer.name
        with np.errstate(over="ignore"):
            corrected = (bias.astype(np.float64) + correction).astype(bias.dtype)
        if not np.isfinite(corrected).all():
            left.append(SkippedNode(layer.name, layer.node.op_type, f"the correction is beyond {bias.dtype}"))
            continue
        tensors.append(str(set_constant(model, reader, layer.bias_of.index, corrected).name))
        changed.append(f"{layer.name}: by at most {np.abs(correction).max(initial=0.0):.3g}")
    return AlgorithmFacts(NAME, tuple(changed), tuple(left)), frozenset(tensors)


def mean_error(layer: Layer, values: Array, errors: Array) -> Array:
    """y_float - y_quantized of each output channel: the mean over positions, the middle mean over samples."""
    exact = layer.weights.astype(np.float32)
    seen = exact if layer.weight is None else rounded(exact, layer.weight)
    of_samples = mean_products(layer.node, exact - seen, values) - mean_products(layer.node, seen, errors)
    return _middle_mean(of_samples)


def _middle_mean(values: Array) -> Array:
    """The mean over the first axis without the lowest and the highest quarter."""
    cut = len(values) // 4
    return np.asarray(np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0))
