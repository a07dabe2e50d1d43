"""Round the weights of a layer one input after the other, and let those that are left make up for the error.

A layer computes y = W x. With quantized inputs z and rounded weights V it computes V z, and what is lost is

    E |W x - V z|^2 = |(W* - V) R|^2 + what no V can avoid,    W* = W E[x z'] E[z z']^-1,    R R' = H = E[z z']

so W* is what should be rounded, and H weighs the errors. With H^-1 = U' U, U upper triangular, rounding column i of W*
to v_i is best made up for by

    W*[:, j] -= (w_i - v_i) / U[i, i] * U[i, j]     for all j > i

(optimal brain surgeon; Frantar et al., GPTQ, 2022). Columns that share a scale, the blocks of a block format, are
rounded together: their scale is that of the values they have when their turn comes. Any rounding can stand in for the
one tried on the way, since only the final values of a block are made up for outside of it.

Products of matrices are computed in the type of the Gram matrix, and what happens within a few columns in float64, for
all groups of a convolution at once: weights are [groups, outputs, columns], Gram matrices [groups, columns, columns].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.features.compensation.fixed_scales import FixedScales, SharedScales
from quark.formats.native import NativeBlockRounding, NativeColumnRounding

Array = NDArray[Any]
Round = Callable[[Array, Array], Array]  # takes values [groups, outputs, columns] and their columns


PIECE = 16  # columns, after which those some way behind are updated
COLUMNS = 64  # columns per unit if they round independently: the rest is updated once per unit
WHOLE = 2048  # columns, beyond which a matrix is factored by halves: LAPACK holds it three times
COLUMNS_AT_ONCE = 512  # of a product, whose result is not held as a whole
PIECE_OF_REVERSAL = 1 << 16  # elements


@dataclass(frozen=True, eq=False)
class Grid:
    """How weights round, and in which order.

    `units` are the columns that are rounded together. Where `is_joint`, they share a scale, which `quantize` computes
    from their values; otherwise `quantize` gets one column or several, which round independently. `at_turn` is called
    with the values of a unit and its columns before it is rounded.
    """

    quantize: Round
    units: Sequence[Array]
    is_joint: bool = False
    at_turn: Callable[[Array, Array], None] | None = None

    @property
    def order(self) -> Array:
        """The columns in the order in which they have their turn."""
        return np.concatenate(self.units)

    def in_order_of(self, power: Array, columns: int = COLUMNS) -> Grid:
        """The same with the columns of the largest `power` first; those that share a scale stay together."""
        if self.is_joint or self.at_turn is not None:
            return replace(self, units=sorted(self.units, key=lambda unit: -float(power[unit].mean())))
        return replace(self, units=runs(np.argsort(-power, kind="stable"), columns))


def runs(order: Array, size: int = COLUMNS) -> list[Array]:
    """Pieces of at most that size."""
    return [order[start : start + size] for start in range(0, len(order), size)]


@dataclass(frozen=True, eq=False)
class Root:
    """U of H^-1 = U' U, where `extra` was added to the diagonal of H and its columns were put in `order`."""

    order: Array
    upper: Array
    extra: Array

    @classmethod
    def of(cls, inner: Array, order: Array, damping: float) -> Root:
        """The root of damped Gram matrices."""
        extra = damping * _mean_diagonal(inner)
        is_in_order = np.array_equal(order, np.arange(len(order)))
        return cls(order, _upper_root(inner if is_in_order else inner[:, order[:, None], order], extra), extra)

    def best_weights(self, weights: Array, cross: Array) -> Array:
        """W*, which gives for quantized inputs what `weights` give for float ones. `cross` is E[x z'].

        Damping pulls towards the weights as they are.
        """
        wanted = (weights @ cross + self.extra * weights)[:, :, self.order]
        result: Array = np.empty_like(wanted)
        result[:, :, self.order] = wanted @ self.upper.swapaxes(1, 2) @ self.upper
        return result


def compensated(weights: Array, root: Root, grid: Grid) -> Array:
    """The weights, rounded. The root is that of the grid's order."""
    upper = root.upper
    left = np.ascontiguousarray(weights[:, :, root.order].swapaxes(1, 2), upper.dtype)  # columns are what is worked on
    result = np.empty_like(left)
    compiled = _compiled(grid.quantize, len(left)) if grid.at_turn is None else None
    start = 0
    for unit in grid.units:
        stop = start + len(unit)
        own = upper[:, start:stop, start:stop].astype(np.float64, copy=False)
        given = left[:, start:stop].astype(np.float64, copy=False)
        if grid.at_turn is not None:
            grid.at_turn(given.swapaxes(1, 2), unit)
        final = _rounded_unit(given.copy(), unit, own, grid, compiled)
        result[:, unit] = final
        if stop < left.shape[1]:
            errors = np.linalg.solve(np.swapaxes(own, 1, 2), given - final)
            left[:, stop:] -= np.swapaxes(upper[:, start:stop, stop:], 1, 2) @ errors.astype(upper.dtype, copy=False)
        start = stop
    return np.ascontiguousarray(result.swapaxes(1, 2))


Compiled = NativeColumnRounding | NativeBlockRounding | None


def _compiled(quantize: Round, groups: int) -> Compiled:
    """Compiled code for the loops over columns, with the same result to the bit; None if there is none, and for many
    small groups, which numpy rounds side by side."""
    return quantize.compiled() if isinstance(quantize, FixedScales | SharedScales) and groups == 1 else None


def _rounded_unit(seen: Array, unit: Array, upper: Array, grid: Grid, compiled: Compiled = None) -> Array:
    """The columns of a unit [groups, columns, outputs], rounded one after the other. Columns that are some way behind
    are updated once for several."""
    count = len(unit)
    piece = count if grid.is_joint else PIECE
    errors = np.empty_like(seen)
    for start in range(0, count, piece):
        stop = min(start + piece, count)
        own = slice(start, stop)
        if compiled is not None:
            compiled.compensate(unit[own], seen[0, own], upper[0, own, own], errors[0, own])
        for column in () if compiled is not None else range(start, min(stop, count - 1)):
            if grid.is_joint:
                tried = grid.quantize(seen.swapaxes(1, 2), unit)[:, :, column]
            else:
                own_column = slice(column, column + 1)
                tried = grid.quantize(seen[:, own_column].swapaxes(1, 2), unit[own_column])[:, :, 0]
            errors[:, column] = (seen[:, column] - tried) / upper[:, column, column, None]
            seen[:, column + 1 : stop] -= upper[:, column, column + 1 : stop, None] * errors[:, column, None]
        if stop < count:
            seen[:, stop:] -= np.swapaxes(upper[:, start:stop, stop:], 1, 2) @ errors[:, start:stop]
    return np.asarray(grid.quantize(seen.swapaxes(1, 2), unit).swapaxes(1, 2))


def descended(weights: Array, rounded: Array, inner: Array, quantize: Round, sweeps: int) -> Array:
    """Rounded weights with a smaller error: each column in turn gets the best values that the others leave it.

    The error falls with every step, since column i alone is at its best where v_i = w_i + sum_(j != i) (w_j - v_j)
    H_ji / H_ii, and the nearest number of the grid is the best one there. Columns must round independently.
    """
    rounded_columns = np.ascontiguousarray(rounded.swapaxes(1, 2), inner.dtype)
    diagonal = np.einsum("gii->gi", inner).astype(np.float64)
    diagonal = np.where(diagonal > 0, diagonal, 1.0)
    compiled = _compiled(quantize, len(rounded_columns))
    assert not isinstance(compiled, NativeBlockRounding), quantize
    count = rounded_columns.shape[1]
    pull = inner @ (weights.swapaxes(1, 2) - rounded_columns) if sweeps else rounded_columns
    for sweep in range(sweeps):
        has_changed = False
        for start in range(0, count, PIECE):
            own = slice(start, min(start + PIECE, count))
            columns = np.arange(own.start, own.stop)
            near, before = pull[:, own].astype(np.float64), rounded_columns[:, own].astype(np.float64)
            part, now = inner[:, own, own].astype(np.float64, copy=False), before.copy()
            if compiled is not None:
                compiled.descend(columns, near[0], part[0], diagonal[0, own], before[0], now[0])
            for at in () if compiled is not None else range(len(columns)):
                aim = before[:, at] + near[:, at] / diagonal[:, start + at, None]
                now[:, at] = quantize(aim[:, :, None], columns[at : at + 1])[:, :, 0]
                near[:, at + 1 :] -= part[:, at + 1 :, at, None] * (now[:, at] - before[:, at])[:, None]
            step = now.astype(inner.dtype, copy=False) - rounded_columns[:, own]
            if step.any():
                has_changed = True
                rounded_columns[:, own] = now
                # columns whose last turn is over need no pull
                rest = slice(own.stop if sweep == sweeps - 1 else 0, count)
                pull[:, rest] -= inner[:, rest, own] @ step
        if not has_changed:
            break
    return np.ascontiguousarray(rounded_columns.swapaxes(1, 2))


def fitted_scales(weights: Array, codes: Array, inner: Array, group_size: int) -> Array:
    """The scales [outputs, groups] with the least error for given codes: W is approximated by codes times the scale of
    their group, and (W - C s) H (W - C s)' is a quadratic function of the scales of an output.

    Weights and codes are [outputs, columns] here. NaN stands for groups whose scale is not determined.
    """
    outputs, columns = codes.shape
    count = -(-columns // group_size)
    starts = np.arange(0, columns, group_size)
    normal = np.empty((outputs, count, count))
    for group, start in enumerate(starts):
        own = slice(start, start + group_size)
        normal[:, group] = np.add.reduceat((codes[:, own] @ inner[own]) * codes, starts, axis=1)
    wanted = np.add.reduceat((weights @ inner) * codes, starts, axis=1)
    diagonal = np.einsum("ogg->og", normal)
    is_dead = diagonal <= 0
    normal[:, np.arange(count), np.arange(count)] = np.where(is_dead, 1.0, diagonal * (1 + 1e-9))
    scales = np.linalg.solve(normal, wanted[:, :, None])[:, :, 0]
    return np.where(is_dead, np.nan, scales)


def compensated_power(inner: Array) -> Array:
    """The cost of the squared error of a single weight of each column [groups, columns] if all others compensate for
    it: 1 / (H^-1)_ii. Without them it is H_ii, which may be much more: large inputs are correlated."""
    return np.asarray(1 / np.square(_upper_root(inner, np.zeros(1))).sum(axis=1))


def squared_error(difference: Array, inner: Array) -> Array:
    """E |d z|^2 of each output, [groups, outputs], for weights that differ by `difference`."""
    return np.asarray(np.einsum("goc,goc->go", difference @ inner, difference))


def _mean_diagonal(matrices: Array) -> Array:
    mean = np.einsum("gii->gi", matrices).mean(axis=1)[:, None, None]
    return np.where(mean > 0, mean, 1.0)


def with_diagonal(matrices: Array, extra: Array) -> Array:
    """A copy with `extra` added to the diagonal."""
    raised: Array = matrices.copy()
    np.einsum("gii->gi", raised)[:] += extra.reshape(-1, 1)  # a view of the diagonal
    return raised


def _upper_root(inner: Array, extra: Array) -> Array:
    """U of H^-1 = U' U. A column whose input is always zero gets a weight of its own, so that it changes nothing."""
    # the Cholesky factor of the reversed matrix is U^-1, reversed: no inverse of H is needed
    lower = _reversed(with_diagonal(inner, extra))
    try:
        for matrices in [lower] if lower.shape[-1] <= WHOLE else [matrix[None] for matrix in lower]:
            _invert_factor(matrices)
    except np.linalg.LinAlgError:
        if inner.dtype == np.float64:
            raise
        return _upper_root(inner.astype(np.float64), extra).astype(inner.dtype)  # float32 was too coarse for it
    return _reversed(lower)


def _reversed(matrices: Array) -> Array:
    """Turn matrices round in place, the last row and column first; they must be contiguous."""
    for flat in matrices.reshape(len(matrices), -1):
        half = flat.size // 2
        for start in range(0, half, PIECE_OF_REVERSAL):
            stop = min(start + PIECE_OF_REVERSAL, half)
            first, last = flat[start:stop], flat[flat.size - stop : flat.size - start]
            kept = first.copy()
            first[:] = last[::-1]
            last[:] = kept[::-1]
    return matrices


def _invert_factor(matrices: Array) -> None:
    """Replace symmetric matrices by L^-1, where L is their Cholesky factor.

    Large ones take little memory besides their own: with L11 and L22 the factors of halves,
    L21 = A21 L11^-T, and L22 that of A22 - L21 L21'.
    """
    size = matrices.shape[-1]
    if size <= WHOLE:
        matrices[:] = np.linalg.cholesky(matrices)
        _invert_lower(matrices)
        return
    half = size // 2
    first, last, below = matrices[:, :half, :half], matrices[:, half:, half:], matrices[:, half:, :half]
    _invert_factor(first)
    below[:] = below @ first.swapaxes(1, 2)
    for start in range(0, last.shape[1], COLUMNS_AT_ONCE):
        part = slice(start, start + COLUMNS_AT_ONCE)
        last[:, part] -= below[:, part] @ below.swapaxes(1, 2)
    _invert_factor(last)
    below[:] = -(last @ below) @ first
    matrices[:, :half, half:] = 0


def _invert_lower(lower: Array) -> None:
    """Invert triangular matrices in place, by way of their halves: products of matrices are most of the work."""
    size = lower.shape[-1]
    if size <= COLUMNS:
        lower[:] = np.linalg.solve(lower, np.broadcast_to(np.eye(size, dtype=lower.dtype), lower.shape))
        return
    half = size // 2
    first, last, below = lower[:, :half, :half], lower[:, half:, half:], lower[:, half:, :half]
    _invert_lower(first)
    _invert_lower(last)
    below[:] = -(last @ below) @ first
