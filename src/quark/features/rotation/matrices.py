"""Orthogonal matrices with entries of equal size.

A Hadamard matrix has entries of +1 and -1 and orthogonal rows; divided by the root of its order it is a rotation that
spreads every channel evenly over all. Orders are built from

    order 1, 2                                                      Sylvester: [[H, H], [H, -H]] doubles the order
    q + 1 for a prime q with q % 4 = 3 (4, 8, 12, 20, 24, 32, ...) Paley: squares modulo q

LayerNorm subtracts the mean over channels, and only commutes with rotations that keep the vector of ones. With H
normalized, its first column constant, and D a diagonal matrix of signs whose first is +1,

    R = H D H'     has     R 1 = 1

and is as spread out as a random rotation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.errors import InvalidValueError

Array = NDArray[Any]
SEED = 1705472343


def rotation(size: int, *, is_random: bool = False, keeps_mean: bool = False) -> Array:
    """An orthogonal matrix of that order in float64, the same on every machine. Raises InvalidValueError if there is no
    Hadamard matrix of that order, or none that is known how to build."""
    matrix = hadamard(size) / math.sqrt(size)
    signs = np.random.default_rng(SEED).integers(0, 2, size) * 2.0 - 1.0
    if keeps_mean:
        signs[0] = 1.0
        constant_first = matrix * np.sign(matrix[:, :1])  # its first column is constant then, its rows stay orthogonal
        return np.asarray(constant_first * signs @ constant_first.T)
    return np.asarray(signs[:, None] * matrix) if is_random else matrix


def hadamard(size: int) -> Array:
    """A matrix of +1 and -1 with orthogonal rows."""
    doublings, core = 0, size
    while core % 2 == 0 and not _is_paley(core) and core > 2:
        core //= 2
        doublings += 1
    if core == 2:
        doublings, core = doublings + 1, 1
    if core != 1 and not _is_paley(core):
        raise InvalidValueError(
            f"RMatrixDim = {size}: no Hadamard matrix of this order is known here; powers of two, and 12, 20, 24, 44 "
            "times powers of two are"
        )
    matrix = np.ones((1, 1)) if core == 1 else _paley(core)
    for _ in range(doublings):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _is_paley(order: int) -> bool:
    q = order - 1
    return order % 4 == 0 and q > 2 and all(q % divisor for divisor in range(2, math.isqrt(q) + 1))


def _paley(order: int) -> Array:
    q = order - 1
    squares = {number * number % q for number in range(1, q)}
    character = np.array([0.0] + [1.0 if number in squares else -1.0 for number in range(1, q)])
    skew = np.zeros((order, order))
    skew[0, 1:], skew[1:, 0] = 1.0, -1.0
    index = np.arange(q)
    skew[1:, 1:] = character[(index[None, :] - index[:, None]) % q]
    return skew + np.eye(order)
