"""Pictures of the worst layers: their weights and inputs in bins, in float and as they are quantized.

Both are in the quantized network's scale, so that what equalization did shows in neither. Of inputs, a few values of
some samples count, at the same places for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.diagnosis import Histogram
from quark.onnx.data import Sample
from quark.onnx.diagnose.comparison import kept_places
from quark.onnx.diagnose.layer_facts import expected_weight
from quark.onnx.diagnose.layer_weights import layer_weights
from quark.onnx.diagnose.networks import give_types
from quark.onnx.diagnose.rescaling import Factors, times
from quark.onnx.diagnose.running import Run, each_in_order
from quark.onnx.diagnose.sites import Site, Sites
from quark.onnx.piece import piece

Array = NDArray[Any]
BINS = 64


def weight_histogram(site: Site, exact: ir.Model, quantized: ir.Model, factors: Factors) -> Histogram | None:
    """The float file's weight where it is known, and what it became; else what is there."""
    weight, found = site.weight, layer_weights(site, exact, quantized)
    if weight is None or found is None:
        return None
    expected = expected_weight(site, found, factors)
    name = str(weight.source.name)
    if expected is None:
        return _histogram(name, found.quantized, None, weight.limits)
    return _histogram(name, expected, found.quantized, weight.limits)


def input_histograms(
    chosen: Sequence[Site],
    exact: ir.Model,
    quantized: ir.Model,
    sites: Sites,
    factors: Factors,
    samples: Sequence[Sample],
) -> dict[str, Histogram]:
    """By the tensor of the layer: of the first quantized input of each."""
    given = {str(value.name) for value in exact.graph.inputs}
    known = set(sites.shared) | given
    operands = {site.tensor: site.inputs[0] for site in chosen if site.inputs}
    operands = {name: each for name, each in operands.items() if str(each.source.name) in known}
    if not operands or not samples:
        return {}
    values = list(dict.fromkeys(str(each.value.name) for each in operands.values()))
    cut = piece(quantized, sites.shared, values)
    give_types(cut, exact)
    rounding = Run(cut, "the quantizers of the layers")
    computed = [name for name in rounding.inputs if name not in given]
    before = Run(piece(exact, [], computed), "the float model") if computed else None
    parts: dict[str, list[tuple[Array, Array]]] = {name: [] for name in operands}

    def one(index: int, sample: Sample) -> dict[str, tuple[Array, Array]]:
        tensors: dict[str, Array] = {**sample, **({} if before is None else before(sample, computed))}
        scaled = {
            name: times(tensors[name], factors.get(name), sites.channel_axis(name, tensors[name].ndim))
            for name in rounding.inputs
        }
        rounded = rounding(scaled, values)
        found = {}
        for name, each in operands.items():
            source, result = scaled[str(each.source.name)], rounded[str(each.value.name)]
            places = kept_places(source.size, index)
            found[name] = (source.reshape(-1)[places], result.reshape(-1)[places])
        return found

    def see(found: Mapping[str, tuple[Array, Array]]) -> None:
        for name, each in found.items():
            parts[name].append(each)

    each_in_order(one, samples, see)
    return {
        name: _histogram(
            str(operands[name].source.name),
            np.concatenate([each[0] for each in found]),
            np.concatenate([each[1] for each in found]),
            operands[name].limits,
        )
        for name, found in parts.items()
    }


def _histogram(name: str, values: Array, quantized: Array | None, clip: tuple[float, float] | None) -> Histogram:
    arrays = [each[np.isfinite(each)].ravel() for each in (values, quantized) if each is not None]
    lowest = min((float(each.min()) for each in arrays if each.size), default=0.0)
    highest = max((float(each.max()) for each in arrays if each.size), default=1.0)
    if not highest > lowest:
        highest = lowest + 1.0
    counts = [tuple(int(n) for n in np.histogram(each, BINS, (lowest, highest))[0]) for each in arrays]
    return Histogram(name, lowest, highest, counts[0], counts[1] if quantized is not None else None, clip)
