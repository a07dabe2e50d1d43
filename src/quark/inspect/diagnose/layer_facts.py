"""What is known of a layer besides its error: figures and histograms of its weight and inputs.

Histograms show values in float and quantized, both in the quantized network's scale, so that equalization shows in
neither. Of inputs, a few values of some samples count, at the same places for both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.compare import OutputFidelity
from quark.compare.measures import fast_pair_sums
from quark.diagnosis import Histogram, WeightFacts
from quark.inspect.diagnose.equalized import Factors, LayerWeights, layer_weights, read_factors, times
from quark.inspect.diagnose.networks import Compared, SeenValues, give_types, kept_places
from quark.inspect.diagnose.running import Run
from quark.inspect.diagnose.sites import Kind, Operand, Site, Sites
from quark.onnx.calibrate.runner import each_in_order
from quark.onnx.data import Sample
from quark.onnx.graph import COMPUTED, FLOAT_TYPES, piece

Array = NDArray[Any]
LOW_QUANTILE = 0.05  # quantile of the channels' sizes: training may leave a few empty
BINS = 64


@dataclass(frozen=True, eq=False)
class LayerFacts:
    """Figures are None if they could not be computed, or do not apply to the layer.

    clipped         share of the input's values that saturate
    tail            the largest input over the 99.9th percentile
    spread          how far the sizes of the weight's output channels are apart
    dead            output channels that rounding made zero, of `channels`
    products        how many products a sum has
    weight_db       SQNR of the weight alone;  input_db   of the input alone, if its scale is fixed
    """

    site: Site
    local: OutputFidelity
    accumulated: OutputFidelity
    parameters: int = 0
    clipped: float | None = None
    tail: float | None = None
    spread: float | None = None
    dead: int = 0
    channels: int = 0
    products: int = 0
    weight_db: float | None = None
    input_db: float | None = None


def find_facts(site: Site, compared: Compared, exact: ir.Model, quantized: ir.Model, factors: Factors) -> LayerFacts:
    """Compute the figures of one layer; reads its weights."""
    local = OutputFidelity.of(site.tensor, compared.local[site.tensor])
    accumulated = OutputFidelity.of(site.tensor, compared.accumulated[site.tensor])
    data = next(iter(site.inputs), None)
    seen = None if data is None else compared.seen.get(str(data.source.name))
    clipped, tail, input_db = (None, None, None) if data is None or seen is None else _of_input(data, seen)
    weights = layer_weights(site, exact, quantized)
    if weights is None:
        return LayerFacts(site, local, accumulated, _parameters(site), clipped, tail, input_db=input_db)
    expected = _expected_weight(site, weights, factors)
    sizes = np.abs(weights.quantized).max(axis=(1, 2))
    # the sizes before rounding if they are known: a channel that became zero has none left
    known = sizes if expected is None else np.abs(expected).max(axis=(1, 2))
    known = known[known > 0]
    return LayerFacts(
        site,
        local,
        accumulated,
        int(weights.quantized.size),
        clipped,
        tail,
        float(known.max() / np.quantile(known, LOW_QUANTILE)) if known.size > 1 else None,
        0 if expected is None else int(((sizes == 0) & (np.abs(expected).max(axis=(1, 2)) > 0)).sum()),
        len(sizes),
        math.prod(weights.quantized.shape[1:]),
        None if expected is None else fast_pair_sums(expected, weights.quantized).sqnr_db,
        input_db,
    )


def _expected_weight(site: Site, weights: LayerWeights, factors: Factors) -> Array | None:
    """The float file's weight, rescaled as equalization did it."""
    if weights.exact is None:
        return None
    expected = weights.exact
    data = next(iter(site.inputs), None)
    before = None if data is None else read_factors(data.source, factors)
    if before is not None and before.size == expected.shape[1] * weights.groups:
        expected = expected / weights.inputs_of(before)[:, :, None]
    behind = factors.get(site.tensor)
    if behind is not None and behind.size == len(expected):
        expected = expected * behind[:, None, None]
    return np.asarray(expected, np.float32)


def _of_input(data: Operand, seen: SeenValues) -> tuple[float | None, float | None, float | None]:
    values = seen.values
    if not values.size:
        return None, None, None
    size, most = np.quantile(np.abs(values), 0.999), max(-seen.lowest, seen.highest)
    tail = float(most / size) if size > 0 else None
    if data.kind is not Kind.AFFINE or data.limits is None or not data.step:
        return None, tail, None
    low, high = data.limits
    values = values.astype(np.float64)  # limits may lie beyond float32
    clipped = float(((values < low - data.step / 2) | (values > high + data.step / 2)).mean())
    rounded = np.clip(np.rint(values / data.step) * data.step, low, high)
    return clipped, tail, fast_pair_sums(values, rounded).sqnr_db


def _parameters(site: Site) -> int:
    weight = site.weight
    if weight is None:
        return 0
    shape = weight.value.shape
    stored = weight.source.const_value
    if shape is not None and all(isinstance(size, int) for size in shape):
        return math.prod(int(size) for size in shape if isinstance(size, int))
    return int(stored.size) if stored is not None else 0


def weight_histogram(site: Site, exact: ir.Model, quantized: ir.Model, factors: Factors) -> Histogram | None:
    """The float file's weight and the quantized one, or only the latter if the float file's is unknown."""
    weight, weights = site.weight, layer_weights(site, exact, quantized)
    if weight is None or weights is None:
        return None
    expected, name = _expected_weight(site, weights, factors), str(weight.source.name)
    if expected is None:
        return _histogram(name, weights.quantized, None, weight.limits)
    return _histogram(name, expected, weights.quantized, weight.limits)


def input_histograms(
    chosen: Sequence[Site],
    exact: ir.Model,
    quantized: ir.Model,
    sites: Sites,
    factors: Factors,
    samples: Sequence[Sample],
) -> dict[str, Histogram]:
    """Histograms of the first quantized input of each layer, by the layer's tensor.

    What the quantizer reads is a tensor of the float network, or is computed from one, such as a centered input.
    """
    given = {str(value.name) for value in exact.graph.inputs}
    operands = {site.tensor: site.inputs[0] for site in chosen if site.inputs}
    if not operands or not samples:
        return {}
    values = list(dict.fromkeys(str(operand.value.name) for operand in operands.values()))
    sources = dict.fromkeys(str(operand.source.name) for operand in operands.values())
    inner = [name for name in sources if name not in given and name not in sites.shared]
    cut = piece(quantized, sites.shared, [*values, *inner])
    give_types(cut, exact)
    # a quantized tensor that is an output of the network has the name of the float one: then it is given as well
    results = {name: f"{name}{COMPUTED}" if name in sites.shared else name for name in values}
    rounding = Run(cut, "the quantizers of the layers")
    computed = [name for name in rounding.inputs if name not in given]
    before = Run(piece(exact, [], computed), "the float model") if computed else None
    parts: dict[str, list[tuple[Array, Array]]] = {name: [] for name in operands}

    def run_sample(index: int, sample: Sample) -> dict[str, tuple[Array, Array]]:
        tensors: dict[str, Array] = {**sample, **({} if before is None else before(sample, computed))}
        scaled = {
            name: times(tensors[name], factors.get(name), sites.channel_axis(name, tensors[name].ndim))
            for name in rounding.inputs
        }
        read = {**scaled, **rounding(scaled, [*results.values(), *inner])}
        pairs = {}
        for name, operand in operands.items():
            source, result = read[str(operand.source.name)], read[results[str(operand.value.name)]]
            places = kept_places(source.size, index)
            pairs[name] = (source.reshape(-1)[places], result.reshape(-1)[places])
        return pairs

    def see(pairs: Mapping[str, tuple[Array, Array]]) -> None:
        for name, pair in pairs.items():
            parts[name].append(pair)

    each_in_order(run_sample, samples, see)
    return {
        name: _histogram(
            str(operands[name].source.name),
            np.concatenate([part[0] for part in of_operand]),
            np.concatenate([part[1] for part in of_operand]),
            operands[name].limits,
        )
        for name, of_operand in parts.items()
    }


def _histogram(name: str, values: Array, quantized: Array | None, clip: tuple[float, float] | None) -> Histogram:
    arrays = [array[np.isfinite(array)].ravel() for array in (values, quantized) if array is not None]
    lowest = min((float(array.min()) for array in arrays if array.size), default=0.0)
    highest = max((float(array.max()) for array in arrays if array.size), default=1.0)
    if not highest > lowest:
        highest = lowest + 1.0
    counts = [tuple(int(n) for n in np.histogram(array, BINS, (lowest, highest))[0]) for array in arrays]
    return Histogram(name, lowest, highest, counts[0], counts[1] if quantized is not None else None, clip)


def find_weight_facts(exact: ir.Model, quantized: ir.Model, layers: list[LayerFacts]) -> WeightFacts | None:
    """The bits of a parameter: in the float file, in the formats of the quantized one, and on disk.

    Weights of layers count by their format, with scales; other parameters, biases too, as in the float file. None for a
    network without parameters.
    """
    held = [value.const_value for value in exact.graph.initializers.values()]
    floats = [tensor for tensor in held if tensor is not None and tensor.dtype in FLOAT_TYPES]
    parameters = sum(int(tensor.size) for tensor in floats)
    if not parameters:
        return None
    float_bits = 8 * sum(int(tensor.nbytes) for tensor in floats) / parameters
    by_weight = {id(layer.site.weight.source): layer for layer in layers if layer.site.weight is not None}
    counted = [
        (layer.parameters, layer.site.weight.bits) for layer in by_weight.values() if layer.site.weight is not None
    ]
    in_formats = min(parameters, sum(count for count, _ in counted))
    format_bits = (sum(count * bits for count, bits in counted) + (parameters - in_formats) * float_bits) / parameters
    stored = sum(
        int(value.const_value.nbytes)
        for value in quantized.graph.initializers.values()
        if value.const_value is not None
    )
    return WeightFacts(parameters, float_bits, format_bits, 8 * stored / parameters)
