"""The factors that equalization left on the channels of a quantized network's tensors, and the weights that show them.

Cross-layer equalization and SmoothQuant multiply the channels of a tensor and divide the weights behind it: the network
computes the same, and the tensor is the float one times a factor per channel. Without these factors the two would look
entirely different.

A layer whose input has the factors g and whose output has f holds the weight w f_out / g_in. So, through the graph,

    f_out = sum (v w') / sum (w' w'),    w' = w / g_in,    v the quantized weight

for each output channel, with rounding as the only noise. Operators that only pass channels on (Add, pooling, Relu ...)
pass their factors on; what others do, such as a normalization, is measured from what they compute from the float
network's tensors: sum(y z) / sum(y y), channel by channel.

A file counts as equalized if some layer, by itself, has many channels with factors far from 1. Rounding does not cause
that in one layer, although its small systematic part adds up from layer to layer. In such a file a channel gets its
factor if rounding can hardly account for it, judged by how well the factor explains the weights; if many channels of a
tensor have one, all have. Others keep 1: equalization leaves channels and whole tensors as they are, and what rounding
does to their size is an error like any other. Outputs of the network are never rescaled. As a last check, the factors
are used only if they bring most tensors closer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.compare.measures import ChannelSums
from quark.inspect.diagnose.running import Run
from quark.inspect.diagnose.sites import ACTIVATIONS, Operand, Site, Sites
from quark.onnx.graph import attribute, constant, input_value, is_constant, piece
from quark.onnx.large_tensors import MappedTensor
from quark.onnx.plan_reader import is_dequantize, is_quantizer
from quark.ops.onnx_nodes import CONSTANT_DOMAIN

Array = NDArray[Any]
Factors: TypeAlias = dict[str, Array]  # by tensor; a tensor that is not rescaled has no entry
Turn: TypeAlias = Callable[[Factors], Mapping[str, ChannelSums]]

EXPLAINED = 0.8  # least correlation of a channel
SURELY_FAR = 0.3  # of the factor's logarithm to base 2
MANY = 0.3  # share of the channels
FEW = 9  # numbers that a tensor's neighbours count for: they are not independent
DEVIATIONS = 4.0  # distance from 1, in standard deviations, that rounding may have caused
CLOSE = 1.6  # to 1, whatever the deviation, in steps of the weight: saturation makes weights smaller on the whole
MOST_TURNS = 4
PASSING = frozenset(
    {"Add", "Sub", "Sum", "Max", "Min", "Relu", "Clip", "LeakyRelu", "PRelu", "MaxPool", "AveragePool"}
    | {"GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "Pad", "Resize", "Flatten", "Reshape", "Squeeze"}
    | {"Identity", "Dropout"}
)
_DEPTH = 16


def times(array: Array, factors: Array | None, axis: int) -> Array:
    """Multiply the channels of a tensor; returns the tensor itself if there are no factors."""
    if factors is None:
        return array
    shape = [1] * array.ndim
    shape[axis] = -1
    return np.asarray(array * factors.reshape(shape).astype(array.dtype))


def find_factors(exact: ir.Model, quantized: ir.Model, sites: Sites, turn: Turn) -> Factors:
    """Return the factors of all shared tensors.

    `turn` feeds layers the float network's tensors times some factors, and returns the channel sums of every shared
    tensor that they compute.
    """
    walk = _Walk(exact, quantized, sites)
    is_sure = walk.has_rescaled_weights()
    if not is_sure and not walk.others:
        return {}  # the usual case: nothing needs to be run
    plain = turn({})
    measured = _measured(plain)
    if not is_sure and not any(is_surely_rescaled(measured[name]) for name in walk.others if name in measured):
        return {}
    factors = walk.through(measured)
    for _ in range(MOST_TURNS):
        sums = turn(factors)
        following = walk.through(_measured(sums))
        is_settled = following.keys() == factors.keys() and all(
            np.allclose(following[name], factors[name], rtol=0.02) for name in following
        )
        factors = following
        if is_settled or not walk.others:
            break
    closer = [_error(sums[name], factors[name]) < _error(plain[name], np.ones(1)) for name in factors]
    return factors if np.mean(closer or [False]) > 0.5 else {}


def factors_by_weights(weights: LayerWeights, inputs: Array | None, bits: float = 8.0) -> Array | None:
    """Find the factors of the output's channels from those of the input's; None if the float file's weight is unknown.

    `bits` is the width that the weight was rounded to.
    """
    if weights.exact is None:
        return None
    exact = weights.exact.astype(np.float64)
    if inputs is not None:
        if inputs.size != weights.quantized.shape[1] * weights.groups:
            return None
        exact = exact / weights.inputs_of(inputs)[:, :, None]
    v, w = weights.quantized.astype(np.float64).reshape(len(exact), -1), exact.reshape(len(exact), -1)
    dot, square, other = (np.einsum("oi,oi->o", a, b) for a, b in ((v, w), (w, w), (v, v)))
    return _believed(ChannelSums(dot, square, other), v.shape[1], bits)


def is_surely_rescaled(factors: Array) -> bool:
    """True if rounding cannot have given so many channels such factors.

    >>> is_surely_rescaled(np.array([1.0, 2.0, 0.5])), is_surely_rescaled(np.array([1.0, 1.1, 0.9]))
    (True, False)
    """
    return bool((np.abs(np.log2(factors)) > SURELY_FAR).mean() > MANY)


def read_factors(value: ir.Value, known: Factors) -> Array | None:
    """Return the factors of what a node reads: those of a tensor before it, through nodes that pass channels on.

    A Mul by a constant for each channel counts, because SmoothQuant inserts some.
    """
    gained: Array | None = None
    for _ in range(_DEPTH):
        node = value.producer()
        if node is None or value.name in known:
            break
        scale = _constant_factor(node)
        if scale is not None:
            gained = scale if gained is None else gained * scale
        elif not (is_quantizer(node) or node.op_type in PASSING):
            break
        before = next((data for data in node.inputs if data is not None and constant(data) is None), None)
        if before is None:
            break
        value = before
    inherited = known.get(str(value.name))
    if gained is None or inherited is None or inherited.size != gained.size:
        return inherited if gained is None else gained
    return np.asarray(inherited * gained)


def _constant_factor(node: ir.Node) -> Array | None:
    """The factors by which a Mul multiplies the channels."""
    if node.op_type != "Mul":
        return None
    held = [value for value in (constant(input_value(node, 0)), constant(input_value(node, 1))) if value is not None]
    is_vector = len(held) == 1 and held[0].size > 1 and held[0].size == max(held[0].shape)
    return held[0].reshape(-1).astype(np.float64) if is_vector and (held[0] > 0).all() else None


def _measured(sums: Mapping[str, ChannelSums]) -> dict[str, Array]:
    """Factors from what layers compute, if nothing is rounded but their inputs."""
    return {name: _believed(channel_sums, FEW, 8.0) for name, channel_sums in sums.items()}


def _believed(sums: ChannelSums, count: int, bits: float) -> Array:
    """Least squares over `count` independent numbers; 1 for channels that they do not explain, or that are as close to
    1 as rounding could bring them."""
    power = np.sqrt(sums.exact * sums.quantized)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = np.where(power > 0, sums.dot / power, 0.0)
        factors = np.where(correlation > EXPLAINED, sums.dot / sums.exact, 1.0)
        deviation = np.sqrt(np.maximum(correlation**-2.0 - 1, 0) / max(1, count - 1))
    factors = np.where(np.isfinite(factors) & (factors > 0), factors, 1.0)
    is_far = np.abs(factors - 1) > DEVIATIONS * deviation + CLOSE * 2.0**-bits
    return np.asarray(factors if is_far.mean() > MANY else np.where(is_far, factors, 1.0))


def _error(sums: ChannelSums, factors: Array) -> float:
    """The squared error with these factors, in the float network's scale."""
    return float((sums.quantized / factors**2 - 2 * sums.dot / factors + sums.exact).sum())


class _Walk:
    """The quantized graph, gone through for factors. `others` are tensors for which neither weights nor the operator
    say what becomes of the channels."""

    def __init__(self, exact: ir.Model, quantized: ir.Model, sites: Sites) -> None:
        self._models = exact, quantized
        self._order = sites.shared
        self._outputs = {str(value.name) for value in exact.graph.outputs}
        self._sites = {site.tensor: site for site in sites.sites}
        self._values = {str(value.name): value for node in quantized.graph for value in node.outputs}
        weighted = {site.tensor for site in sites.sites if site.weight is not None}
        self.others = set()
        for name in sites.shared:
            node = self._maker(name)
            is_passing = node is not None and node.op_type in PASSING
            if not is_passing and name not in weighted and name not in self._outputs:
                self.others.add(name)

    def has_rescaled_weights(self) -> bool:
        """True if the weights of some layer are the float file's times factors, whatever its input has."""
        weights = (self._by_weights(name, {}) for name in self._order)
        is_rescaled = any(factors is not None and is_surely_rescaled(factors) for factors in weights)
        self._release()
        return is_rescaled

    def through(self, measured: Mapping[str, Array]) -> Factors:
        """Factors of all shared tensors in the order of the graph; `measured` for `others`."""
        result: Factors = {}
        for name in self._order:
            if name in self._outputs:
                continue
            factors, node = self._by_weights(name, result), self._maker(name)
            if factors is None and node is not None and node.op_type in PASSING:
                known = [read_factors(value, result) for value in node.inputs if value is not None]
                factors = next((read for read in known if read is not None), np.ones(1))
            if factors is None and name in self.others:
                factors = measured.get(name)
            # a Reshape may change the channels of the tensor
            is_fitting = factors is not None and name in measured and factors.size == measured[name].size
            if factors is not None and is_fitting and (factors != 1).any():
                result[name] = factors
        self._release()
        return result

    def _release(self) -> None:
        """Release the pages of mapped files that were read: they would count as memory in use."""
        for value in (initializer for model in self._models for initializer in model.graph.initializers.values()):
            if isinstance(value.const_value, MappedTensor):
                value.const_value.release()

    def _by_weights(self, name: str, factors: Factors) -> Array | None:
        site = self._sites.get(name)
        weights = None if site is None else layer_weights(site, *self._models)
        if site is None or weights is None or weights.exact is None:
            return None
        data, weight = site.node.inputs[0], site.weight
        bits = 8.0 if weight is None else weight.element_bits
        return factors_by_weights(weights, None if data is None else read_factors(data, factors), bits)

    def _maker(self, name: str) -> ir.Node | None:
        node = self._values[name].producer()
        while node is not None and is_quantizer(node):
            node = None if node.inputs[0] is None else node.inputs[0].producer()
        return node


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The weight of a layer in both files, as arrays [out, in, positions].

    `exact` is the float file's, with the BatchNormalization that was folded since; None if it is not known. `groups`
    are those of a convolution.
    """

    quantized: Array
    exact: Array | None
    groups: int

    def inputs_of(self, channels: Array) -> Array:
        """Values of the input's channels, for each [out, in] of the weight."""
        out, per_group = self.quantized.shape[:2]
        group = np.arange(out) // max(1, out // self.groups)
        return np.asarray(channels[group[:, None] * per_group + np.arange(per_group)[None, :]])


def layer_weights(site: Site, exact: ir.Model, quantized: ir.Model) -> LayerWeights | None:
    """The weights of a Conv, Gemm or MatMul; None for other layers, and if the weight is not quantized."""
    operand = site.weight
    if operand is None or site.node.op_type not in ("Conv", "Gemm", "MatMul"):
        return None
    weight = _arranged(site.node, operand.index, _rounded_weight(operand, quantized))
    if weight is None:
        return None
    reference = _exact_weight(exact, site.tensor)
    is_same = reference is not None and reference.shape == weight.shape
    groups = int(attribute(site.node, "group", 1)) if site.node.op_type == "Conv" else 1
    return LayerWeights(weight, reference if is_same else None, groups)


def _rounded_weight(operand: Operand, model: ir.Model) -> Array:
    """The numbers that the node reads, computed without a session in the usual cases."""
    writer = operand.value.producer()
    if writer is not None and writer.domain == CONSTANT_DOMAIN and is_constant(writer.inputs[0]):
        return np.asarray(constant(writer.inputs[0]))
    if writer is not None and is_dequantize(writer) and not attribute(writer, "block_size", 0):
        codes, scale, zero_point = (constant(input_value(writer, index)) for index in range(3))
        if codes is not None and scale is not None and codes.dtype.kind in "iu":
            shape = [1] * codes.ndim
            if scale.size > 1:
                shape[int(attribute(writer, "axis", 1))] = -1
            zero = 0 if zero_point is None else zero_point.astype(np.int32).reshape(shape)
            return np.asarray((codes.astype(np.int32) - zero) * scale.reshape(shape), np.float32)
    name = str(operand.value.name)
    return Run(piece(model, [], [name]), f"the constants of '{name}'")({})[name]


def _exact_weight(model: ir.Model, tensor: str) -> Array | None:
    """The weight of the node that computes a tensor, before its activation and BatchNormalization."""
    value: ir.Value | None = next((v for node in model.graph for v in node.outputs if v.name == tensor), None)
    node = None if value is None else value.producer()
    scale: Array | None = None
    while node is not None and node.op_type in ACTIVATIONS | {"BatchNormalization"}:
        if node.op_type == "BatchNormalization":
            gain, variance = constant(input_value(node, 1)), constant(input_value(node, 4))
            if gain is None or variance is None:
                return None
            scale = np.asarray(gain / np.sqrt(variance + float(attribute(node, "epsilon", 1e-5))), np.float32)
        value = input_value(node, 0)
        node = None if value is None else value.producer()
    if node is None:
        return None
    for index in (1, 0):
        held = constant(input_value(node, index))
        weight = None if held is None else _arranged(node, index, held)
        if weight is not None:
            return weight if scale is None else np.asarray(weight * scale[:, None, None], np.float32)
    return None


def _arranged(node: ir.Node, index: int, array: Array) -> Array | None:
    """The weight as [out, in, positions]."""
    if node.op_type == "Conv" and index == 1 and array.ndim >= 3:
        return array.reshape(*array.shape[:2], -1).astype(np.float32)
    if array.ndim != 2 or array.dtype.kind != "f" or index != 1 or node.op_type not in ("Gemm", "MatMul"):
        return None
    is_turned = node.op_type == "Gemm" and bool(attribute(node, "transB", 0))
    return np.asarray(array if is_turned else array.T, np.float32)[:, :, None]
