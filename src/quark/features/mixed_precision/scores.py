"""Scores of networks: how far their outputs are from the float network's, the less the better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.compare.measures import pair_sums, psnr_of, share_divergence, square_sum
from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.features.mixed_precision.options import Score, ScoreKind

Array = NDArray[Any]
Outputs = Callable[[], Iterator[Array]]


def _psnr(expected: Array, actual: Array) -> float:
    mean = square_sum(actual.astype(np.float64) - expected) / max(expected.size, 1)
    return psnr_of(mean, float(np.abs(expected).max(initial=0.0)))


_OF_A_SAMPLE: Mapping[ScoreKind, Callable[[Array, Array], float]] = {
    ScoreKind.L2: lambda expected, actual: math.sqrt(square_sum(actual.astype(np.float64) - expected)),
    ScoreKind.KL: share_divergence,
    ScoreKind.COSINE: lambda expected, actual: 1.0 - pair_sums(expected, actual).cosine,
    ScoreKind.SQNR: lambda expected, actual: -pair_sums(expected, actual).sqnr_db,
    ScoreKind.PSNR: lambda expected, actual: -_psnr(expected, actual),
}


def score_of(score: Score, expected: Outputs, actual: Iterator[Array]) -> float:
    """The score of outputs, one for each sample, against the float network's."""
    if score.kind in _OF_A_SAMPLE:
        measure = _OF_A_SAMPLE[score.kind]
        distances = [measure(mine, theirs) for mine, theirs in zip(expected(), actual, strict=True)]
        return sum(distances) / max(len(distances), 1)
    mine, theirs = [[sample] for sample in expected()], [[sample] for sample in actual]
    if score.kind is ScoreKind.DISTANCE:
        return _called(score, "MetricDistanceFn", mine, theirs)
    return _called(score, "MetricEvaluateFn", mine) - _called(score, "MetricEvaluateFn", theirs)


def number_from(function: Callable[..., Any], name: str, arguments: Sequence[Any], given: str, expected: str) -> float:
    """Call a user's function and check that it returns a real number.

    Errors call the function `name`, and say what it was `given` and what was `expected` of it.
    """
    try:
        value = function(*arguments)
    except Exception as error:
        raise InvalidValueError(f"{name} failed on {given}: {type(error).__name__}: {error}") from error
    if not isinstance(value, Real) and math.prod(getattr(value, "shape", (0,))) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UnsupportedTypeError(f"{name} returned {value!r} of type {type(value).__name__}: expected {expected}")
    return float(value)


def _called(score: Score, option: str, *outputs: list[list[Array]]) -> float:
    assert score.function is not None
    name = f"{option} {getattr(score.function, '__name__', score.function)!r}"
    given = f"the outputs of {len(outputs[0])} samples, a list with a list of arrays for each"
    value = number_from(score.function, name, outputs, given, "a number")
    if math.isnan(value):
        raise InvalidValueError(f"{name} returned NaN: expected a number")
    return value
