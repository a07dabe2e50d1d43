"""The factors that equalization left on the channels of a quantized network's tensors.

Cross-layer equalization and SmoothQuant multiply the channels of a tensor and divide the weights behind it: the network
computes the same, and the tensor is the float one times a factor per channel. Compared as they are, the two would look
like a disaster.

A layer whose input has the factors g and whose output has f holds the weight w f_out / g_in. So, through the graph,

    f_out = sum (v w') / sum (w' w'),    w' = w / g_in,    v the quantized weight

for each output channel: with rounding as the only noise. Operators that only pass channels on (Add, pooling, Relu ...)
pass their factors on; what others do, such as a normalization, is seen in what they compute of the float network's
tensors: sum(y z) / sum(y y), channel by channel.

A file is taken for an equalized one where some layer, by itself, has many channels with factors far from 1: rounding
does not bring that about, but from layer to layer its small systematic part adds up. In such a file a
channel has its factor where rounding can hardly account for it, by how well the factor explains the weights; where many
channels of a tensor have one, all have. Others keep 1: equalization leaves channels and whole tensors as they are, and
what rounding does to their size is an error like any other. Outputs of the network are never rescaled. That factors are
right is checked by what they are for: most tensors must come closer.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quark.onnx.diagnose.layer_weights import LayerWeights
from quark.onnx.diagnose.sums import ChannelSums

Array = NDArray[Any]
Factors: TypeAlias = dict[str, Array]  # by tensor; one that is not rescaled is not there

EXPLAINED = 0.8  # least correlation of a channel
SURELY_FAR = 0.3  # of the factor's logarithm to base 2
MANY = 0.3  # share of the channels
FEW = 9  # numbers that a tensor's neighbours count for: they are not independent
DEVIATIONS = 4.0  # from 1 that rounding may have brought about
CLOSE = 1.6  # to 1, whatever the deviation, in steps of the weight: saturation makes weights smaller on the whole


def factors_by_weights(weights: LayerWeights, inputs: Array | None, bits: float = 8.0) -> Array | None:
    """Of the output's channels, where the input's are known; None where the float file's weight is not. `bits` are
    those that the weight was rounded to."""
    if weights.exact is None:
        return None
    exact = weights.exact.astype(np.float64)
    if inputs is not None:
        if inputs.size != weights.quantized.shape[1] * weights.groups:
            return None
        exact = exact / weights.inputs_of(inputs)[:, :, None]
    quantized = weights.quantized.astype(np.float64)
    rows = [each.reshape(len(exact), -1) for each in (quantized, exact)]
    dot, square, other = (np.einsum("oi,oi->o", a, b) for a, b in ((rows[0], rows[1]), (rows[1],) * 2, (rows[0],) * 2))
    return _believed(ChannelSums(dot, square, other), rows[0].shape[1], bits)


def factors_of_sums(sums: ChannelSums) -> Array:
    """By what a layer computes, where nothing is rounded but its input."""
    return _believed(sums, FEW, 8.0)


def _believed(sums: ChannelSums, count: int, bits: float) -> Array:
    """Of least squares over `count` independent numbers; 1 for channels that they do not explain, or that are as close
    to 1 as rounding could bring them."""
    power = np.sqrt(sums.exact * sums.quantized)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = np.where(power > 0, sums.dot / power, 0.0)
        factors = np.where(correlation > EXPLAINED, sums.dot / sums.exact, 1.0)
        deviation = np.sqrt(np.maximum(correlation**-2.0 - 1, 0) / max(1, count - 1))
    factors = np.where(np.isfinite(factors) & (factors > 0), factors, 1.0)
    is_far = np.abs(factors - 1) > DEVIATIONS * deviation + CLOSE * 2.0**-bits
    return np.asarray(factors if is_far.mean() > MANY else np.where(is_far, factors, 1.0))


def is_surely_rescaled(factors: Array) -> bool:
    """That so many channels cannot have come by such factors by rounding.

    >>> is_surely_rescaled(np.array([1.0, 2.0, 0.5])), is_surely_rescaled(np.array([1.0, 1.1, 0.9]))
    (True, False)
    """
    return bool((np.abs(np.log2(factors)) > SURELY_FAR).mean() > MANY)


def times(array: Array, factors: Array | None, axis: int) -> Array:
    """The tensor with its channels multiplied; itself where there is nothing to do."""
    if factors is None:
        return array
    shape = [1] * array.ndim
    shape[axis] = -1
    return np.asarray(array * factors.reshape(shape).astype(array.dtype))
