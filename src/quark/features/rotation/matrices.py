"""Orthogonal matrices that spread every channel evenly over all, and weights that are multiplied by them.

A Hadamard matrix has entries of +1 and -1 and orthogonal rows; divided by the root of its order it is a rotation.
Orders are built from

    powers of two                                                       Sylvester: [[H, H], [H, -H]] doubles the order
    q + 1 for a prime q with q % 4 = 3 (12, 20, 24, 44, 48, ...)        Paley: squares modulo q
    2 (q + 1) for a prime q with q % 4 = 1 (12, 28, 36, 60, 76, ...)    Paley, symmetric
    a b for two of these orders                                         Kronecker product

Where there is none, the Hartley matrix (cos + sin)(2 pi i j / n) is orthogonal for every order n, and its largest entry
is only a root of two larger.

LayerNorm subtracts the mean over channels, and only commutes with rotations that keep the vector of ones. With H
normalized, its first column constant, and D a diagonal matrix of signs whose first is +1,

    R = H D H'     has     R 1 = 1

and is as spread out as a random rotation.

A matrix may be smaller than the axis it is applied to: then every block of its size along the axis is rotated by it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.errors import InvalidValueError

Array = NDArray[Any]
SEED = 1705472343
# the largest matrix that is applied as a whole at inference; larger ones are applied as two factors
_LARGEST_FACTOR = 64
_HARTLEY_COST = 4  # the factor by which two Hadamard factors may be larger than two others and still be preferred


def rotation(size: int, *, is_random: bool = False, keeps_mean: bool = False, seed: int = SEED) -> Array:
    """An orthogonal matrix of that order in float64, the same on every machine: Hadamard if there is one, else Hartley.

    A random one has random signs. With `keeps_mean`, the sum over channels stays as it is.
    """
    matrix = _normalized(size)
    signs = np.random.default_rng(seed).integers(0, 2, size) * 2.0 - 1.0
    if keeps_mean:
        signs[0] = 1.0
        constant_first = matrix * np.sign(matrix[:, :1])  # its first column is constant then, its rows stay orthogonal
        return np.asarray(constant_first * signs @ constant_first.T)
    return np.asarray(signs[:, None] * matrix) if is_random else matrix


def _normalized(size: int) -> Array:
    return hadamard(size) / math.sqrt(size) if has_hadamard(size) else hartley(size)


def hartley(size: int) -> Array:
    """The orthogonal, symmetric matrix of the discrete Hartley transform."""
    turns = np.outer(np.arange(size), np.arange(size)) % size
    angles = 2 * np.pi / size * turns
    return np.asarray((np.cos(angles) + np.sin(angles)) / math.sqrt(size))


def has_hadamard(size: int) -> bool:
    """True if `hadamard` has a matrix of that order."""
    return _factors(size) is not None


def hadamard(size: int) -> Array:
    """A matrix of +1 and -1 with orthogonal rows. Raises InvalidValueError if none of that order is known here."""
    factors = _factors(size)
    if factors is None:
        raise InvalidValueError(
            f"RMatrixDim = {size}: no Hadamard matrix of this order is known here; powers of two, and 12, 20, 28, 36, "
            "44 times powers of two are"
        )
    matrix: Array = np.ones((1, 1))
    for order in factors:
        matrix = np.kron(_paley(order) if order > 2 else np.array([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


def _factors(size: int) -> list[int] | None:
    """Orders of 2, or of a Paley matrix, whose product is `size`; the one that is not a power of two comes first."""
    if size > 0 and size & (size - 1) == 0:
        return [2] * (size.bit_length() - 1)
    doublings, core = 0, size
    while core % 2 == 0 and not _is_paley(core) and core > 2:
        core //= 2
        doublings += 1
    if _is_paley(core):
        return [core] + [2] * doublings
    for order in range(12, math.isqrt(max(size, 0)) + 1, 4):  # two cores, such as 144 = 12 * 12
        rest = _factors(size // order) if size % order == 0 and _is_paley(order) else None
        if rest is not None:
            return [order, *rest]
    return None


def _is_paley(order: int) -> bool:
    return order % 4 == 0 and (_is_prime(order - 1) or (order % 8 == 4 and _is_prime(order // 2 - 1)))


def _is_prime(number: int) -> bool:
    return number > 2 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _paley(order: int) -> Array:
    if _is_prime(order - 1):
        return _bordered_characters(order - 1, -1.0) + np.eye(order)
    conference = _bordered_characters(order // 2 - 1, 1.0)
    unit = np.eye(order // 2)
    return np.kron(conference, [[1, 1], [1, -1]]) + np.kron(unit, [[1, -1], [-1, -1]])


def _bordered_characters(q: int, corner: float) -> Array:
    """The matrix of 1 where j - i is a square modulo q and of -1 elsewhere, with a border of ones."""
    squares = {number * number % q for number in range(1, q)}
    character = np.array([0.0] + [1.0 if number in squares else -1.0 for number in range(1, q)])
    matrix = np.zeros((q + 1, q + 1))
    matrix[0, 1:], matrix[1:, 0] = 1.0, corner
    index = np.arange(q)
    matrix[1:, 1:] = character[(index[None, :] - index[:, None]) % q]
    return matrix


# ---- what is multiplied by them ----


def rotate(values: Array, matrix: Array, axis: int = -1) -> Array:
    """`values`, in float64, with every block of the matrix's size along `axis` multiplied by it from the right.

    >>> rotate(np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([[0.0, 1.0], [1.0, 0.0]])).tolist()
    [[2.0, 1.0, 4.0, 3.0]]
    """
    moved = np.moveaxis(values.astype(np.float64), axis, -1)
    size = len(matrix)
    if moved.shape[-1] % size:
        raise InvalidValueError(f"a rotation of size {size} does not divide an axis of {moved.shape[-1]} channels")
    blocks = moved.reshape(*moved.shape[:-1], -1, size) @ matrix
    return np.moveaxis(blocks.reshape(moved.shape), -1, axis)


def rotate_inputs(weight: Array, matrix: Array) -> Array:
    """The weight [outputs, inputs] of a layer whose input is multiplied by the matrix, so that it computes the same."""
    return rotate(weight, matrix, -1)


def rotate_outputs(weight: Array, bias: Array | None, matrix: Array) -> tuple[Array, Array | None]:
    """The weight [outputs, inputs] and the bias of a layer whose output is to be multiplied by the matrix."""
    return rotate(weight, matrix, 0), None if bias is None else rotate(bias, matrix)


def fold_norm(weight: Array, bias: Array | None, gain: Array, shift: Array | None = None) -> tuple[Array, Array | None]:
    """The weight [outputs, inputs] and the bias, in float64, of a layer that reads a normalization without its gain and
    its shift. The bias is None if there is neither a bias nor a shift."""
    wide = weight.astype(np.float64)
    folded = None if bias is None else bias.astype(np.float64)
    if shift is not None and shift.any():
        folded = wide @ shift.astype(np.float64) + (0.0 if folded is None else folded)
    return wide * gain.astype(np.float64), folded


def factors(matrix_size: int) -> tuple[Array | None, Array]:
    """(A, B) in float64 with kron(A, B) orthogonal and spread out, for x.reshape(a, b) -> A' x B at inference.

    Small ones are B alone. Two factors of about the root of the size take far fewer multiplications than their product.
    """
    if matrix_size <= _LARGEST_FACTOR:
        return None, _normalized(matrix_size)
    pairs = [(order, matrix_size // order) for order in range(2, matrix_size) if matrix_size % order == 0]

    def cost(pair: tuple[int, int]) -> tuple[int, int]:
        weight = 1 if all(map(has_hadamard, pair)) else _HARTLEY_COST
        return weight * sum(pair), pair[1]

    if not pairs:
        return None, _normalized(matrix_size)
    first, second = min(pairs, key=cost)
    return _normalized(first), _normalized(second)


def product(first: Array | None, second: Array) -> Array:
    """The matrix that two factors of `factors` stand for."""
    return second if first is None else np.kron(first, second)
