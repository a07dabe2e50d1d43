"""Compensation of one layer, for the roads of whole graphs: how far its inputs' correlations are trusted, and which
output channels gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.features.compensation.input_products import Sums
from quark.features.compensation.layer_rounding import rounded_matrices
from quark.features.compensation.options import CompensationOptions
from quark.features.compensation.rounding import squared_error, with_diagonal
from quark.features.finetuning.layers import TrainedLayer
from quark.plan import AffineChoice
from quark.rounded import rounded

Array = NDArray[Any]
STRENGTHS = (0.2, 1.0, 4.0)  # shares of the mean of the diagonal that are tried
# The first share that is tried is this, over the number of samples. Rows of one sample are alike (one voice, and the
# silence after it), so few samples say little about directions in which their inputs hardly vary, however many rows.
SHARE_OF_ONE_SAMPLE = 4.0
ROWS_FOR_COLUMNS = 4  # with quantized inputs, a layer is left alone if it has more columns than this for every row
SIMILAR = 1.2  # factor by which the gain on held-back samples may be lower
# The error of a Cholesky factor in float32, per column, as a share of the mean of the diagonal; it must be small
# compared with the damping. Eight roundings are more than was observed.
FLOAT32_ERROR = 8 * float(np.finfo(np.float32).eps)
_TINY = 1e-300
SWEEPS = 2  # over columns that were rounded: each gets the best values that the others leave it


@dataclass(frozen=True, eq=False)
class CompensatedLayer:
    """New weights, what was gained in words, and how they are rounded if their scales changed."""

    weight: Array
    gain: str
    choice: AffineChoice | None


def compensated_layer(
    layer: TrainedLayer, weight: Array, sums: Sums, options: CompensationOptions
) -> CompensatedLayer | str:
    """The weights and what was gained; or why they stay."""
    columns = layer.layout.matrices[2]
    if sums.data is not None and ROWS_FOR_COLUMNS * sums.seen < columns:
        return f"{sums.seen} rows of inputs do not show how {columns} columns vary together"
    if columns * FLOAT32_ERROR > options.damping:
        sums = sums.in_float64()
    strength = _strength(layer, weight, sums, options)
    if isinstance(strength, str):
        return strength
    inner = _with_share(sums.inner, strength) if strength else sums.inner
    attempt = rounded_matrices(layer, weight, inner, sums.cross, options, SWEEPS)
    if isinstance(attempt, str):
        return attempt
    plain = layer.layout.to_matrices(rounded(weight, layer.weight).astype(inner.dtype))
    before, after = (squared_error(attempt.best - values, inner) for values in (plain, attempt.values))
    is_better = after < before
    kept = np.where(is_better[:, :, None], attempt.values, layer.layout.to_matrices(weight))
    total = float(before.sum())
    ratio = float(np.where(is_better, after, before).sum()) / total if total > 0 else 1.0
    if not is_better.any():
        return "no output would be closer to the float network"
    choice = None if attempt.groups is None else attempt.groups.choice(is_better)
    kept_weight = layer.layout.from_matrices(kept).astype(weight.dtype)
    return CompensatedLayer(kept_weight, f"squared error {ratio:.3g} of what it was", choice)


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
    matrices = layer.layout.to_matrices(weight.astype(train.dtype))
    plain = matrices - layer.layout.to_matrices(rounded(weight, layer.weight).astype(train.dtype))
    before = float(squared_error(plain, sums.aside).sum())
    least, chosen = before, None
    for strength in (first, *(strength for strength in STRENGTHS if strength > first)):
        attempt = rounded_matrices(layer, weight, _with_share(train, strength), None, options, 0)
        if isinstance(attempt, str):
            return attempt
        error = matrices - attempt.values
        after = float(squared_error(error, sums.aside).sum())
        if after >= least and chosen is not None:
            break
        if after < least:
            least, chosen = after, strength
        own = float(squared_error(error, train).sum()) / max(float(squared_error(plain, train).sum()), _TINY)
        if strength == first and after <= SIMILAR * own * before:
            break
    return "it would not be closer on samples that were held back" if chosen is None else chosen


def _with_share(inner: Array, share: float) -> Array:
    """Matrices with that share of the mean of their diagonal added to it."""
    return with_diagonal(inner, share * np.einsum("gii->g", inner) / inner.shape[-1])
