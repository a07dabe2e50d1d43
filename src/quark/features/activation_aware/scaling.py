"""The algebra of AWQ: scales for input channels, and clipped ranges, by what rounding does to a layer's outputs.

A layer sums over its input channels j. Dividing channel j of the input by s_j > 0 and multiplying column j of the
weights by it changes nothing in float:

    y_k = sum_j w_kj x_j = sum_j (w_kj s_j) (x_j / s_j)

but the weights are rounded as W s now, so that in y they are Q(W s) / s. Channels with large inputs get a large s, and
their weights a finer step (Lin et al., AWQ, 2023). The exponent of the magnitudes is searched:

    s_j = m_j^a                  m_j: mean |x_j|
    s_j = m_j^a / v_j^(1 - a)    v_j: mean |w_kj| over the outputs

each with a geometric mean of 1. The error of a candidate is that of the outputs, relative to their power:

    E |D x|^2 / E |W x|^2 = tr(D G D') / tr(W G W'),    D = Q(W s) / s - W,    G = E[x x']

Layers that read the same input share s, and the mean of their errors counts.

Everything is numpy; weights are [outputs, inputs]. `quantize` is the rounding that the weights will get, from numbers
to numbers of the same shape, with scales of its own for what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.decide.searched_scales import gram_blocks

Array = NDArray[Any]
Quantize = Callable[[Array], Array]

EXPONENTS = tuple(step / 10 for step in range(1, 11))
CLIPS = tuple(1 - step / 20 for step in range(11))  # shares of a group's range, the largest first
SPREAD = 1e4  # no channel counts as quieter than 1/SPREAD of the loudest
MOST_OUTPUTS = 512  # outputs of a layer that the search uses, evenly spaced


@dataclass(frozen=True, eq=False)
class Scaling:
    """Scales of the input channels, with the relative error of the outputs before and after. All scales are 1 if no
    candidate is better."""

    scales: Array  # [inputs]
    exponent: float
    error: float
    error_before: float


def find_scaling(
    weights: Sequence[Array],
    magnitudes: Array,
    gram: Array,
    quantize: Quantize | Sequence[Quantize],
    exponents: Sequence[float] = EXPONENTS,
    tie: Callable[[Array], Array] = np.asarray,
) -> Scaling:
    """The scales with the least error for layers that read the same input.

    `weights` are the layers' [outputs, inputs], `magnitudes` the mean |x| of each input channel, and `gram` the sum or
    mean of x x'. `quantize` is one rounding for all layers, or one for each. `tie` gives channels the same scale that
    have to have it.

    >>> weights = np.array([[1.0, 0.3], [-1.0, 0.3]])
    >>> scaling = find_scaling([weights], np.array([1.0, 100.0]), np.diag([1.0, 1e4]), np.rint)
    >>> scaling.error < scaling.error_before, bool(scaling.scales[1] > scaling.scales[0])
    (True, True)
    """
    rounds = [quantize] * len(weights) if callable(quantize) else list(quantize)
    sampled = [np.asarray(weight, np.float64)[:: -(-len(weight) // MOST_OUTPUTS)] for weight in weights]
    gram = np.asarray(gram, np.float64)
    powers = [_power(weight, gram) for weight in sampled]

    def error(scales: Array) -> float:
        pairs = zip(sampled, rounds, powers, strict=True)
        shares = [_power(_rounded(w, scales, rounding) - w, gram) / power for w, rounding, power in pairs if power > 0]
        return float(np.mean(shares)) if shares else 0.0

    size = gram.shape[0]
    best = (error(np.ones(size)), 0.0, np.ones(size))
    before = best[0]
    for exponent in exponents:
        for candidate in scaling_candidates(sampled, magnitudes, exponent):
            scales = tie(candidate)
            current_error = error(scales)
            if current_error < best[0]:
                best = (current_error, exponent, scales)
    return Scaling(best[2], best[1], best[0], before)


def scaling_candidates(weights: Sequence[Array], magnitudes: Array, exponent: float) -> list[Array]:
    """The scales of both formulas for an exponent."""
    loud = _logarithm(magnitudes)
    shares = [np.abs(weight).mean(axis=0) / (np.abs(weight).max() or 1.0) for weight in weights]
    of_weights = _logarithm(np.mean(shares, axis=0))
    logarithms = (exponent * loud, exponent * loud - (1 - exponent) * of_weights)
    return [np.exp2(logarithm - logarithm.mean()) for logarithm in logarithms]


def clipped(
    weight: Array, gram: Array, quantize: Quantize, group_size: int | None = None, clips: Sequence[float] = CLIPS
) -> Array:
    """The weights with every group cut off at a share of its largest magnitude, which lets `quantize` choose a finer
    step. Each group has the share with the least error of the outputs: d' G d with the group's part of `gram`.

    Groups are `group_size` neighbouring inputs of an output, or all of them if it is None.

    >>> weight = np.array([[0.4, -0.4, 0.4, 10.0]])
    >>> def quantize(values):
    ...     step = np.abs(values).max() / 7
    ...     return np.rint(values / step) * step
    >>> clipped(weight, np.diag([1.0, 1.0, 1.0, 1e-6]), quantize)
    array([[ 0.4, -0.4,  0.4,  5. ]])
    """
    weight = np.asarray(weight, np.float64)
    outputs, inputs = weight.shape
    size = inputs if group_size is None else group_size
    blocks = gram_blocks(gram, size)
    limit = np.abs(_in_groups(weight, size)).max(axis=2, keepdims=True)
    best, least = weight, np.full((outputs, len(blocks)), np.inf)
    for clip in clips:
        tried = np.clip(_in_groups(weight, size), -clip * limit, clip * limit).reshape(outputs, -1)[:, :inputs]
        error = group_errors(np.asarray(quantize(tried), np.float64) - weight, blocks)
        is_better = error < least
        chosen = np.repeat(is_better, size, axis=1)[:, :inputs]
        best, least = np.where(chosen, tried, best), np.where(is_better, error, least)
    return best


def group_errors(difference: Array, blocks: Array) -> Array:
    """d' G d of each group of each output, [outputs, groups]."""
    parts = _in_groups(difference, blocks.shape[1])
    products = np.matmul(parts.swapaxes(0, 1), blocks)  # [groups, outputs, size]
    return np.asarray(np.einsum("gos,ogs->og", products, parts))


def _in_groups(weight: Array, size: int) -> Array:
    """[outputs, groups, size]; the last group is filled up with zeros."""
    outputs, inputs = weight.shape
    return np.pad(weight, [(0, 0), (0, -inputs % size)]).reshape(outputs, -1, size)


def _rounded(weight: Array, scales: Array, quantize: Quantize) -> Array:
    return np.asarray(np.asarray(quantize(weight * scales), np.float64) / scales)


def _power(weight: Array, gram: Array) -> float:
    """E |W x|^2, for a gram of E[x x']."""
    return float(np.einsum("oi,oi->", weight @ gram, weight))


def _logarithm(magnitudes: Array) -> Array:
    """log2 of magnitudes, none below 1/SPREAD of the largest; zeros if there are none above zero."""
    numbers = np.asarray(magnitudes, np.float64)
    largest = float(numbers.max(initial=0.0))
    return np.log2(np.maximum(numbers, largest / SPREAD)) if largest > 0 else np.zeros(numbers.shape)
