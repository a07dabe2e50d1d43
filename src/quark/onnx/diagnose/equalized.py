"""Go through a quantized graph for the factors that equalization left; `rescaling` says how they are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from quark.onnx.diagnose.factors_read import PASSING, read_factors
from quark.onnx.diagnose.layer_weights import layer_weights, release_weights
from quark.onnx.diagnose.operands import is_quantizer
from quark.onnx.diagnose.rescaling import (
    Array,
    Factors,
    factors_by_weights,
    factors_of_sums,
    is_surely_rescaled,
)
from quark.onnx.diagnose.sites import Sites
from quark.onnx.diagnose.sums import ChannelSums

MOST_TURNS = 4

Turn: TypeAlias = Callable[[Factors], Mapping[str, ChannelSums]]


def find_factors(exact: ir.Model, quantized: ir.Model, sites: Sites, turn: Turn) -> Factors:
    """`turn` gives, for factors, the channel sums of every shared tensor that layers compute by themselves, given the
    float network's tensors times these."""
    walk = _Walk(exact, quantized, sites)
    is_sure = walk.has_rescaled_weights()
    if not is_sure and not walk.others:
        return {}  # as with most files: nothing needs to be run
    plain = turn({})
    measured = {name: factors_of_sums(each) for name, each in plain.items()}
    if not is_sure and not any(is_surely_rescaled(measured[name]) for name in walk.others if name in measured):
        return {}
    factors = walk.through(measured)
    for _ in range(MOST_TURNS):
        sums = turn(factors)
        found = walk.through({name: factors_of_sums(each) for name, each in sums.items()})
        is_settled = found.keys() == factors.keys() and all(np.allclose(found[n], factors[n], rtol=0.02) for n in found)
        factors = found
        if is_settled or not walk.others:
            break
    closer = [_error(sums[name], factors.get(name)) < _error(plain[name], None) for name in factors]
    return factors if np.mean(closer or [False]) > 0.5 else {}


class _Walk:
    def __init__(self, exact: ir.Model, quantized: ir.Model, sites: Sites) -> None:
        self._models = exact, quantized
        self._order = sites.shared
        self._outputs = {str(value.name) for value in exact.graph.outputs}
        self._sites = {site.tensor: site for site in sites.sites}
        self._values = {str(value.name): value for node in quantized.graph for value in node.outputs}
        # neither weights nor the operator say what becomes of their channels
        self.others = {name for name in sites.shared if name not in self._outputs and self._is_other(name)}

    def has_rescaled_weights(self) -> bool:
        """That the weights of some layer are the float file's times factors, whatever its input has."""
        found = any(
            factors is not None and is_surely_rescaled(factors)
            for factors in (self._by_weights(name, {}) for name in self._order)
        )
        self._release()
        return found

    def through(self, measured: Mapping[str, Array]) -> Factors:
        """Factors of all shared tensors in the order of the graph; `measured` for `others`."""
        found: Factors = {}
        for name in self._order:
            if name in self._outputs:
                continue
            factors = self._by_weights(name, found)
            if factors is None:
                factors = self._passed_on(name, found)
            if factors is None and name in self.others:
                factors = measured.get(name)
            # a Reshape may leave the tensor with other channels than those that came in
            is_fitting = factors is not None and name in measured and factors.size == measured[name].size
            if factors is not None and is_fitting and (factors != 1).any():
                found[name] = factors
        self._release()
        return found

    def _release(self) -> None:
        for model in self._models:
            release_weights(model)

    def _by_weights(self, name: str, found: Factors) -> Array | None:
        site = self._sites.get(name)
        weights = None if site is None else layer_weights(site, *self._models)
        if site is None or weights is None or weights.exact is None:
            return None
        data, weight = site.node.inputs[0], site.weight
        bits = 8.0 if weight is None else weight.element_bits
        return factors_by_weights(weights, None if data is None else read_factors(data, found), bits)

    def _passed_on(self, name: str, found: Factors) -> Array | None:
        node = self._maker(name)
        if node is None or node.op_type not in PASSING:
            return None
        known = [read_factors(value, found) for value in node.inputs if value is not None]
        return next((each for each in known if each is not None), np.ones(1))

    def _is_other(self, name: str) -> bool:
        node = self._maker(name)
        is_weighted = name in self._sites and self._sites[name].weight is not None
        return not is_weighted and (node is None or node.op_type not in PASSING)

    def _maker(self, name: str) -> ir.Node | None:
        node = self._values[name].producer()
        while node is not None and is_quantizer(node):
            node = None if node.inputs[0] is None else node.inputs[0].producer()
        return node


def _error(sums: ChannelSums, factors: Array | None) -> float:
    """Squared, with these factors, in the float network's scale."""
    f = np.ones(1) if factors is None else factors
    return float((sums.quantized / f**2 - 2 * sums.dot / f + sums.exact).sum())
