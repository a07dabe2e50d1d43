"""What a quantized linear layer has beside its weight, as tensors of a file: turned inputs and a low-rank branch.

input_rotation          the matrix [size, size] that blocks of inputs are multiplied with; int8 if it is a Hadamard
                        matrix without its factor 1 / sqrt(size), as AMD Quark stores it
input_rotation_left     the second, left factor of a large rotation
low_rank_down, _up      float matrices [rank, inputs] and [outputs, rank]
"""

from __future__ import annotations

import math

import torch
from torch import nn

from quark.errors import ModelError, UnsupportedOptionError
from quark.torch.language.linear import QuantizedLinear
from quark.torch.language.weight_layouts import Kinds, Tensors

ROTATION, LEFT, DOWN, UP = "input_rotation", "input_rotation_left", "low_rank_down", "low_rank_up"
NAMES = (ROTATION, LEFT, DOWN, UP)


class MatrixRotation(nn.Module):
    """x R for every block of channels. With a left factor, R is the Kronecker product of both."""

    left: torch.Tensor | None
    matrix: torch.Tensor

    def __init__(self, matrix: torch.Tensor, left: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix, persistent=False)
        self.register_buffer("left", left, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        if self.left is None:
            turned = wide.reshape(*x.shape[:-1], -1, len(self.matrix)) @ self.matrix
        else:
            turned = wide.reshape(*x.shape[:-1], -1, len(self.left), len(self.matrix)) @ self.matrix
            turned = self.left.T @ turned
        return turned.reshape(x.shape).to(x.dtype)


def branch_tensors(path: str, linear: QuantizedLinear) -> Tensors:
    """The tensors of a layer's rotation and branch; none if it has neither."""
    made: Tensors = {}
    if linear.rotation is not None:
        matrix, left = getattr(linear.rotation, "matrix", None), getattr(linear.rotation, "left", None)
        if not isinstance(matrix, torch.Tensor):
            raise UnsupportedOptionError(
                f"'{path}' has inputs that are turned by {type(linear.rotation).__name__}: only matrices are stored"
            )
        made |= {ROTATION: _signs(matrix.cpu())} | ({} if left is None else {LEFT: _signs(left.cpu())})
    if linear.low_rank is not None:
        down, up = linear.low_rank
        made |= {DOWN: down.detach().cpu(), UP: up.detach().cpu()}
    return made


def branch_kinds(stored: Kinds, inputs: int, outputs: int) -> Kinds:
    """The types and shapes that tensors of these names have to have, by those that they have."""
    kinds: Kinds = {}
    length = 1
    for name in (ROTATION, LEFT):
        if name in stored:
            dtype, shape = stored[name]
            size = shape[0] if shape else 0
            length *= size
            kinds[name] = (torch.int8 if dtype is torch.int8 else None), (size, size)
    if not length or inputs % length or (LEFT in stored and ROTATION not in stored):
        raise ModelError(f"its rotation of {length} channels does not fit {inputs} inputs")
    if DOWN in stored or UP in stored:
        rank = stored[DOWN][1][0] if DOWN in stored and stored[DOWN][1] else 0
        kinds |= {DOWN: (None, (rank, inputs)), UP: (None, (outputs, rank))}
    return kinds


def add_branches(linear: QuantizedLinear, tensors: Tensors) -> None:
    """Give a layer what the tensors of `branch_tensors` stand for."""
    device = linear.weight.device
    if ROTATION in tensors:
        left = tensors.get(LEFT)
        linear.rotation = MatrixRotation(
            _matrix(tensors[ROTATION]).to(device), None if left is None else _matrix(left).to(device)
        )
    if DOWN in tensors:
        linear.low_rank = nn.ParameterList(nn.Parameter(tensors[name].to(device), False) for name in (DOWN, UP))


def _signs(matrix: torch.Tensor) -> torch.Tensor:
    signs = matrix.sign().to(torch.int8)
    return signs if torch.equal(_matrix(signs), matrix) else matrix


def _matrix(stored: torch.Tensor) -> torch.Tensor:
    if stored.dtype is not torch.int8:
        return stored.float()
    return (stored.double() / math.sqrt(len(stored))).float()
