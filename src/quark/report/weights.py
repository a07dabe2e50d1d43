"""The weights of a model as matrices whose rows are what one output sums over.

    Conv             [out, in, ...]      rows of in * kernel
    ConvTranspose    [in, out, ...]      rows of in, one for every output channel and kernel position
    Gemm, MatMul     the constant operand, turned so that the summed axis is the last

so that blocks along a row share a scale the way a dot product would like them to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quark.errors import InvalidValueError, ModelError

if TYPE_CHECKING:
    import onnx_ir

Matrix = NDArray[np.float32]

# What an attribute of the wrong type, or a shape that the operator could not have, leads to.
SHAPE_ERRORS = (ValueError, TypeError, IndexError, ZeroDivisionError)


def read_weights(path: Path, read: Callable[[Path], onnx_ir.Model]) -> dict[str, Matrix]:
    """Name to float32 matrix, from the Conv, Gemm and MatMul nodes of an .onnx file or the arrays of an .npz file.

    `read` reads the .onnx file. Tensors that are not floats, and the vectors of an .npz file (biases, mostly), are left
    out. A file that cannot be read, has no weights, or has one with NaN or Inf is an error.
    """
    suffix = path.suffix.lower()
    if suffix not in (".onnx", ".npz"):
        raise InvalidValueError(f"weights file '{path}': expected a name that ends in .onnx or .npz")
    if not path.is_file():
        what = "it is not a regular file" if path.exists() else "there is no such file"
        raise InvalidValueError(f"weights file '{path}': {what}")
    weights = dict(_from_npz(path) if suffix == ".npz" else _from_onnx(path, read(path)))
    if not any(matrix.any() for matrix in weights.values()):
        wanted = "a Conv, Gemm or MatMul node with constant" if suffix == ".onnx" else "an array of rank 2 or more with"
        raise ModelError(f"weights file '{path}': nothing to measure; expected {wanted} float weights, not all zero")
    for name, matrix in weights.items():
        if not np.isfinite(matrix).all():
            raise ModelError(f"weights file '{path}': tensor '{name}' holds NaN or Inf (as float32)")
    return weights


def _from_npz(path: Path) -> Iterator[tuple[str, Matrix]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = [(name, archive[name]) for name in archive.files]
    except Exception as error:  # numpy raises what its zip, its parser or the system does
        raise ModelError(f"weights file '{path}' cannot be read as an .npz archive of arrays: {error}") from error
    for name, array in arrays:
        if isinstance(array, np.ndarray) and array.ndim >= 2 and _is_float(array):
            yield name, _as_float32(array.reshape(array.shape[0], -1))


def _from_onnx(path: Path, model: onnx_ir.Model) -> Iterator[tuple[str, Matrix]]:
    import onnx_ir

    for node in onnx_ir.traversal.RecursiveGraphIterator(model.graph):
        for position, value in enumerate(node.inputs[:2]):
            tensor = None if value is None else onnx_ir.convenience.get_const_tensor(value)
            if value is None or tensor is None or node.domain != "":
                continue
            try:
                array = tensor.numpy()
            except (OSError, ValueError, TypeError, OverflowError, MemoryError) as error:
                raise ModelError(f"weights file '{path}': tensor '{value.name}' cannot be read: {error}") from error
            if not _is_float(array):
                continue
            try:
                matrix = _rows_of_sums(node, position, array)
            except SHAPE_ERRORS as error:
                raise ModelError(
                    f"weights file '{path}': tensor '{value.name}' of shape {array.shape} is no weight of a "
                    f"{node.op_type} with these attributes: {error}"
                ) from error
            if matrix is not None:
                yield str(value.name), _as_float32(matrix)


def _rows_of_sums(node: onnx_ir.Node, position: int, array: NDArray[np.generic]) -> NDArray[np.generic] | None:
    """The array of an operand with the axis summed over last; None where it is no weight."""
    if node.op_type == "Conv" and position == 1:
        return array.reshape(array.shape[0], -1)
    if node.op_type == "ConvTranspose" and position == 1:
        groups = node.attributes.get_int("group", 1)
        return np.moveaxis(array.reshape(groups, -1, *array.shape[1:]), 1, -1).reshape(-1, array.shape[0] // groups)
    if node.op_type == "Gemm":
        is_turned = node.attributes.get_int("transA" if position == 0 else "transB", 0) != 0
        return array if is_turned == (position == 1) else array.T
    if node.op_type == "MatMul":
        has_sum_last = position == 0 or array.ndim == 1
        return (array if has_sum_last else array.swapaxes(-1, -2)).reshape(-1, array.shape[-1 if has_sum_last else -2])
    return None


def _is_float(array: NDArray[np.generic]) -> bool:
    """float16, bfloat16, float32 or float64; the 8-bit floats are quantized already."""
    return array.dtype.name in {"float16", "bfloat16", "float32", "float64"} and array.size > 0


def _as_float32(array: NDArray[np.generic]) -> Matrix:
    with np.errstate(over="ignore"):  # Inf is reported by name
        return np.ascontiguousarray(array, np.float32)
