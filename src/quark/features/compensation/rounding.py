"""Round the weights of a layer one input after the other, and let those that are left make up for the error.

A layer computes y = W x. With quantized inputs z and rounded weights V it computes V z, and what is lost is

    E |W x - V z|^2 = |(W* - V) R|^2 + what no V can avoid,    W* = W E[x z'] E[z z']^-1,    R R' = H = E[z z']

so W* is what should be rounded, and H weighs the errors. With H^-1 = U' U, U upper triangular, rounding column i of W*
to v_i is best made up for by

    W*[:, j] -= (w_i - v_i) / U[i, i] * U[i, j]     for all j > i

(optimal brain surgeon; Frantar et al., GPTQ, 2022). Columns that share a scale, the blocks of a block format, are
rounded together: their scale is that of the values they have when their turn comes. Any rounding can stand in for the
one tried on the way, since only the final values of a block are made up for outside of it.

Everything is in float64, for all groups of a convolution at once: weights are [groups, outputs, columns], Gram matrices
[groups, columns, columns].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Round = Callable[[Array, Array], Array]  # from values [groups, outputs, columns] and the columns that they belong to


def best_weights(weights: Array, inner: Array, cross: Array, damping: float) -> Array:
    """W*, which gives for quantized inputs what `weights` give for float ones. `inner` is H, `cross` is E[x z'].

    Damping pulls towards the weights as they are.
    """
    extra = damping * _mean_diagonal(inner)
    eye = np.eye(inner.shape[-1])
    wanted = weights @ (cross + extra * eye)
    return np.asarray(np.linalg.solve(inner + extra * eye, wanted.swapaxes(1, 2)).swapaxes(1, 2))


def compensated(
    weights: Array, inner: Array, units: Sequence[Array], quantize: Round, damping: float, *, is_joint: bool
) -> Array:
    """The weights, rounded. `units` are columns in the order of their turns. Where `is_joint`, those of a unit share a
    scale, and `quantize` gets all of them; otherwise it gets one column or several, which round independently."""
    order = np.concatenate(units)
    left = weights[:, :, order].astype(np.float64)
    upper = _upper_root(inner[:, order[:, None], order], damping)
    result = np.empty_like(weights)
    start = 0
    for unit in units:
        stop = start + len(unit)
        own = upper[:, start:stop, start:stop]
        given = left[:, :, start:stop]
        seen = given.copy()
        for column in range(len(unit) - 1):
            if is_joint:
                tried = quantize(seen, unit)[:, :, column]
            else:
                tried = quantize(seen[:, :, column : column + 1], unit[column : column + 1])[:, :, 0]
            error = (seen[:, :, column] - tried) / own[:, column, column, None]
            seen[:, :, column + 1 :] -= error[:, :, None] * own[:, column, None, column + 1 :]
        final = quantize(seen, unit)
        result[:, :, unit] = final
        if stop < left.shape[-1]:
            errors = np.linalg.solve(np.swapaxes(own, 1, 2), np.swapaxes(given - final, 1, 2)).swapaxes(1, 2)
            left[:, :, stop:] -= errors @ upper[:, start:stop, stop:]
        start = stop
    return result


def squared_error(difference: Array, inner: Array) -> Array:
    """E |d z|^2 of each output, [groups, outputs], for weights that differ by `difference`."""
    return np.asarray(np.einsum("goc,goc->go", difference @ inner, difference))


def _mean_diagonal(matrices: Array) -> Array:
    mean = np.einsum("gii->gi", matrices).mean(axis=1)[:, None, None]
    return np.where(mean > 0, mean, 1.0)


def _upper_root(inner: Array, damping: float) -> Array:
    """U of H^-1 = U' U. A column whose input is always zero gets a weight of its own, so that it changes nothing."""
    damped = inner + damping * _mean_diagonal(inner) * np.eye(inner.shape[-1])
    # the Cholesky factor of the reversed matrix is U^-1, reversed: no inverse of H is needed
    lower = np.linalg.cholesky(damped[:, ::-1, ::-1])
    inverse = np.linalg.solve(lower, np.broadcast_to(np.eye(inner.shape[-1]), inner.shape))
    return np.ascontiguousarray(inverse[:, ::-1, ::-1])
