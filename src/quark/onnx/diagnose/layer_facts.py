"""What can be said of a layer beside its error: what its weight and its inputs have to do with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.fidelity import OutputFidelity
from quark.onnx.diagnose.comparison import Compared, SeenValues
from quark.onnx.diagnose.factors_read import read_factors
from quark.onnx.diagnose.layer_weights import LayerWeights, layer_weights
from quark.onnx.diagnose.operands import Kind, Operand
from quark.onnx.diagnose.rescaling import Factors
from quark.onnx.diagnose.sites import Site
from quark.onnx.diagnose.sums import pair_sums

Array = NDArray[Any]
LOW_QUANTILE = 0.05  # of the channels' sizes: a few may be empty by training


@dataclass(frozen=True, eq=False)
class LayerFacts:
    """Figures that are None could not be found, or mean nothing for the layer.

    clipped         share of the input's values that saturate
    tail            the largest input over the 99.9th percentile
    spread          how far the sizes of the weight's output channels are apart
    dead            output channels that rounding made zero, of `channels`
    products        how many products a sum has
    weight_db       SQNR of the weight alone;  input_db   of the input alone, where its scale is fixed
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
    """Reads the layer's weights, one layer at a time."""
    local = compared.local[site.tensor].fidelity(site.tensor)
    accumulated = compared.accumulated[site.tensor].fidelity(site.tensor)
    data = next((each for each in site.inputs), None)
    seen = None if data is None else compared.seen.get(str(data.source.name))
    clipped, tail, input_db = (None, None, None) if data is None or seen is None else _of_input(data, seen)
    weights = layer_weights(site, exact, quantized)
    if weights is None:
        return LayerFacts(site, local, accumulated, _parameters(site), clipped, tail, input_db=input_db)
    expected = expected_weight(site, weights, factors)
    sizes = np.abs(weights.quantized).max(axis=(1, 2))
    return LayerFacts(
        site,
        local,
        accumulated,
        int(weights.quantized.size),
        clipped,
        tail,
        _spread(sizes, expected),
        0 if expected is None else int(((sizes == 0) & (np.abs(expected).max(axis=(1, 2)) > 0)).sum()),
        len(sizes),
        math.prod(weights.quantized.shape[1:]),
        None if expected is None else pair_sums(expected, weights.quantized).fidelity("").sqnr_db,
        input_db,
    )


def expected_weight(site: Site, weights: LayerWeights, factors: Factors) -> Array | None:
    """The float file's weight, with what equalization did to it."""
    if weights.exact is None:
        return None
    expected = weights.exact
    data = next((each for each in site.inputs), None)
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
    return clipped, tail, pair_sums(values, rounded).fidelity("").sqnr_db


def _spread(sizes: Array, expected: Array | None) -> float | None:
    """Of the weight before rounding where it is known: a channel that became zero has no size left."""
    found = sizes if expected is None else np.abs(expected).max(axis=(1, 2))
    found = found[found > 0]
    return float(found.max() / np.quantile(found, LOW_QUANTILE)) if found.size > 1 else None


def _parameters(site: Site) -> int:
    weight = site.weight
    if weight is None:
        return 0
    shape = weight.value.shape
    stored = weight.source.const_value
    if shape is not None and all(isinstance(each, int) for each in shape):
        return math.prod(int(each) for each in shape if isinstance(each, int))
    return int(stored.size) if stored is not None else 0
