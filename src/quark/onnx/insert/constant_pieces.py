"""A constant in the numbers that a plan chose for it, computed piece by piece.

What shares a scale lies in one piece, and everything else is done element by element, so that the pieces are those of
the whole. Of a large model only the recipe is kept, until the model is written; see `quark.onnx.large_tensors`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.formats.affine import AffineParameters, quantize_affine
from quark.formats.catalog import get_format
from quark.onnx.insert.pairs import needs_float32, storage_type
from quark.onnx.large_tensors import ComputedTensor, Piece, is_large_model, is_large_tensor, pieces
from quark.plan import AffineChoice, BlockChoice, FloatChoice
from quark.rounded import block_values, parameters_of

Array = NDArray[Any]
Tensor = ir.TensorProtocol


def stored(model: ir.Model, tensor: ComputedTensor) -> Tensor:
    """The tensor as the model holds it: the recipe where both are large, else what it gives."""
    if is_large_tensor(tensor) and is_large_model(model):
        return tensor
    return ir.Tensor(tensor.numpy(), tensor.dtype)


def codes(source: Tensor, choice: AffineChoice, *, has_float32_scale: bool = False) -> ComputedTensor:
    """The integer codes, in the type that they are stored in. Their scale is stored in the type of the constant, unless
    it `has_float32_scale`, and codes are those for the scale as it is stored."""
    is_half = source.dtype is ir.DataType.FLOAT16 and not has_float32_scale
    if is_half and not needs_float32(ir.DataType.FLOAT16, choice):
        choice = replace(choice, scale=tuple(np.array(choice.scale, np.float16).tolist()))
    kind = np.dtype(storage_type(choice.format))

    def compute() -> Iterator[Array]:
        for _, array in code_pieces(source, choice):
            yield array.astype(kind)

    return ComputedTensor(compute, ir.DataType.from_numpy(kind), _shape(source))


def code_pieces(source: Tensor, choice: AffineChoice) -> Iterator[tuple[Piece, Array]]:
    """The pieces of a constant with their codes, in numpy's narrowest type; groups are whole."""
    dims = tuple(source.shape.numpy())
    parameters = parameters_of(choice, dims)
    axis = None if choice.axis is None else choice.axis % len(dims)
    for piece in pieces(source, axis, choice.group_size or 1):
        wide = piece.array.astype(np.float32, copy=False)
        yield piece, np.asarray(quantize_affine(wide, _of_piece(parameters, dims, axis, piece)))


def block_numbers(source: Tensor, choice: BlockChoice) -> ComputedTensor:
    """The numbers that the block format keeps, in the constant's own type."""
    inner = replace(choice, axis=1)  # of a piece

    def compute() -> Iterator[Array]:
        axis = choice.axis if len(source.shape) > 1 else 0
        for piece in pieces(source, axis, choice.quantizer.format.block_size):
            yield block_values(piece.array, inner)

    return ComputedTensor(compute, source.dtype, _shape(source))


def small_floats(source: Tensor, choice: FloatChoice) -> ComputedTensor:
    """The numbers in float16 or bfloat16; beyond its range they saturate, as a weight of Inf helps nobody."""
    highest, kind = float(get_format(choice.format).max), np.dtype(storage_type(choice.format))

    def compute() -> Iterator[Array]:
        for piece in pieces(source):
            yield np.clip(piece.array.astype(np.float32), -highest, highest).astype(kind)

    return ComputedTensor(compute, ir.DataType.from_numpy(kind), _shape(source))


def turned(matrix: ComputedTensor) -> ComputedTensor:
    """A matrix with rows for columns. It is computed as a whole: its codes are a quarter of what they stand for."""
    rows, columns = matrix.shape.numpy()
    return ComputedTensor(lambda: iter([matrix.numpy().T]), matrix.dtype, ir.Shape([columns, rows]))


def _of_piece(parameters: AffineParameters, dims: tuple[int, ...], axis: int | None, piece: Piece) -> AffineParameters:
    """The parameters that go with a piece, whose axis is the middle one."""
    if axis is None:
        return parameters
    scale, zero_point = np.asarray(parameters.scale), np.asarray(parameters.zero_point)
    size = parameters.group_size
    if size is None:
        return replace(parameters, scale=scale[piece.along], zero_point=zero_point[piece.along], axis=1)
    groups = slice(piece.along.start // size, -(-piece.along.stop // size))
    shape = (int(np.prod(dims[:axis])), -1, int(np.prod(dims[axis + 1 :])))
    scale, zero_point = (each.reshape(shape)[piece.outer, groups] for each in (scale, zero_point))
    return replace(parameters, scale=scale, zero_point=zero_point, axis=1)


def _shape(source: Tensor) -> ir.Shape:
    return ir.Shape(source.shape.numpy())
