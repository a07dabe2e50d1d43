"""The algebra of low-rank branches.

A linear layer W x becomes V z + B A x: V is W - B A rounded, z the quantized input, and B A, of a small rank, stays in
float. Without smoothing, B A are the largest singular directions of W. With scales s for the input channels, it is W s
whose directions are taken, so that channels with large inputs count for more (Li et al., SVDQuant, 2024):

    W s = U S V',    A = (S V')[:rank] / s,    B = U[:, :rank],    s_j = max|x_j|^alpha / max_k|w_kj|^(1 - alpha)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_LEAST, _MOST = 1e-5, 1e5  # bounds of a scale


def branch(weight: Array, scales: Array, rank: int) -> tuple[Array, Array]:
    """A [rank, inputs] and B [outputs, rank] for a weight [outputs, inputs].

    >>> down, up = branch(np.diag([3.0, 1.0]), np.ones(2), 1)
    >>> np.round(up @ down, 6) + 0.0
    array([[3., 0.],
           [0., 0.]])
    """
    wide = weight * scales
    rank = min(rank, *weight.shape)
    if wide.shape[0] <= wide.shape[1]:
        _, directions = np.linalg.eigh(wide @ wide.T)
        up = directions[:, ::-1][:, :rank]
        return (up.T @ wide) / scales, up
    _, directions = np.linalg.eigh(wide.T @ wide)
    down = directions[:, ::-1][:, :rank].T
    up = wide @ down.T
    lengths = np.sqrt(np.square(up).sum(axis=0))
    lengths = np.where(lengths > 0, lengths, 1.0)
    return down * lengths[:, None] / scales, up / lengths


def branch_scales(largest: Array, weight: Array, alpha: float) -> Array:
    """s of the formula above; `largest` is max|x_j|."""
    reach = np.maximum(np.abs(weight).max(axis=0), _LEAST)
    return np.asarray(np.clip(np.maximum(largest, 1e-8) ** alpha / reach ** (1 - alpha), _LEAST, _MOST))
