"""Size, limits and fidelity of number formats, measured on weights.

    SQNR = 10 log10( sum w^2 / sum (w - quantized w)^2 )     over all values of all weight tensors

Block formats have their own scales. For plain integers, and floats of 8 bits or fewer, the scale of a tensor maps its
largest magnitude to the format's largest number; the zero point of an unsigned integer is the middle of its codes.
float16 and bfloat16 are casts.

Weights are measured as matrices whose rows one output sums over, so that blocks run along the summed axis:

    Conv             [out, in, ...]      rows of in * kernel
    ConvTranspose    [in, out, ...]      rows of in, one for every output channel and kernel position
    Gemm, MatMul     the constant operand, transposed if needed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx_ir
from numpy.typing import NDArray

from quark.compare.measures import PairSums, pair_sums
from quark.errors import InvalidValueError, ModelError
from quark.formats import (
    FORMATS,
    AffineParameters,
    BlockFormat,
    FloatFormat,
    Format,
    IntFormat,
    choose_affine,
    find_ranges,
    quantize_dequantize,
    quantize_dequantize_affine,
)
from quark.report.console import Table, cell

Matrix = NDArray[np.float32]

# widths that hardware has; --all shows the others
COMMON_INTEGERS = ("int4", "int8", "int16", "uint4", "uint8")

CAPTION = (
    "SQNR: signal to quantization noise over {values:,} weights in {tensors} tensors of {source}. "
    "Blocks run along the axis that a dot product sums over. "
    "2^e: a power of two for each block; 2^(e-d): and a finer one for each sub-block; "
    "e4m3 * max-abs: an 8-bit float for each block, times one number for the tensor. "
    "max-abs: each tensor is scaled so that its largest magnitude meets the format's largest number; "
    "offset: zero point at mid-range; cast: no scale."
)


@dataclass(frozen=True)
class FormatRow:
    """One format. `sqnr_db` is inf if no weight changed, and -inf if a value left the range of float32."""

    name: str
    bits_per_element: float
    block_size: int | None
    max: float
    smallest_step: float
    scale: str
    sqnr_db: float

    def to_json(self) -> dict[str, object]:
        """Return the row as JSON: an infinite SQNR is null, and `note` says which."""
        row = asdict(self)
        if math.isinf(self.sqnr_db):
            row |= {"sqnr_db": None, "note": self.sqnr_text}
        return row

    @property
    def sqnr_text(self) -> str:
        if math.isinf(self.sqnr_db):
            return "exact" if self.sqnr_db > 0 else "overflow"
        return f"{self.sqnr_db:.2f}"


def chosen_formats(all_widths: bool) -> list[Format]:
    """Return every format of the catalog; of the plain integers, only common widths unless `all_widths`."""
    return [
        fmt for name, fmt in FORMATS.items() if all_widths or not isinstance(fmt, IntFormat) or name in COMMON_INTEGERS
    ]


def format_rows(formats: Iterable[Format], weights: Mapping[str, Matrix]) -> list[FormatRow]:
    """Return a row for each format."""
    return [
        FormatRow(
            name=str(fmt),
            bits_per_element=fmt.bits_per_element,
            block_size=fmt.block_size if isinstance(fmt, BlockFormat) else None,
            max=fmt.max,
            smallest_step=fmt.min_subnormal,
            scale=_scale_text(fmt),
            sqnr_db=sqnr_db(fmt, weights.values()),
        )
        for fmt in formats
    ]


def sqnr_db(fmt: Format, weights: Iterable[Matrix]) -> float:
    """Return the SQNR over all weights, which must not all be zero."""
    return sum((pair_sums(matrix, _quantized(fmt, matrix)) for matrix in weights), PairSums()).sqnr_db


def _quantized(fmt: Format, matrix: Matrix) -> NDArray[np.floating]:
    """Round a matrix to a format, by the rules in the module's docstring."""
    result: NDArray[np.floating]
    if not _needs_scale(fmt):
        result = quantize_dequantize(matrix, fmt, axis=-1)
        return result
    exact = matrix.astype(np.float64)
    if isinstance(fmt, IntFormat):
        scale, zero_point = choose_affine(*find_ranges(exact), fmt, symmetric=True)
        result = quantize_dequantize_affine(exact, AffineParameters(scale, zero_point, fmt))
    else:
        scale = float(np.abs(exact).max()) / fmt.max or 1.0
        result = quantize_dequantize(exact / scale, fmt) * scale
    return result


def _needs_scale(fmt: Format) -> bool:
    return isinstance(fmt, IntFormat) or (isinstance(fmt, FloatFormat) and fmt.bits <= 8)


def _scale_text(fmt: Format) -> str:
    if isinstance(fmt, BlockFormat):
        if fmt.scale is not None:
            name = fmt.scale.name.removeprefix(f"fp{fmt.scale.bits}_")
            return f"{name} * max-abs" if fmt.has_tensor_scale else name
        return "2^e" if fmt.sub_blocks is None else "2^(e-d)"
    if isinstance(fmt, IntFormat) and not fmt.signed:
        return "max-abs offset"
    return "max-abs" if _needs_scale(fmt) else "cast"


def rich_table(rows: Iterable[FormatRow], weights: Mapping[str, Matrix], source: str) -> Table:
    """Return the table that `quark formats` prints, in ASCII for any terminal."""
    values = sum(matrix.size for matrix in weights.values())
    caption = CAPTION.format(values=values, tensors=len(weights), source=source)
    table = Table(title="Number formats", caption=cell(caption), caption_justify="left")
    table.add_column("format", no_wrap=True)
    for heading in ("bits", "block", "max", "min step"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("scale", overflow="fold")
    table.add_column("SQNR dB", justify="right", overflow="fold")
    for row in rows:
        block = "" if row.block_size is None else str(row.block_size)
        # 32767 and 65504 in full, 9.757e+42 in scientific notation
        limits = (f"{row.max:.{6 if row.max < 1e6 else 4}g}", f"{row.smallest_step:.4g}")
        table.add_row(row.name, f"{row.bits_per_element:g}", block, *limits, row.scale, row.sqnr_text)
    return table


def read_weights(path: Path, read: Callable[[Path], onnx_ir.Model]) -> dict[str, Matrix]:
    """Return float32 matrices by name, from the Conv, Gemm and MatMul nodes of an .onnx file or from an .npz file.

    `read` reads the .onnx file. Tensors that are not floats, and vectors in an .npz file (mostly biases), are left out.
    A file that cannot be read or has no weights, and a weight with NaN or Inf, are errors.
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
    except Exception as error:  # numpy passes on the errors of its zip reader, its parser and the system
        raise ModelError(f"weights file '{path}' cannot be read as an .npz archive of arrays: {error}") from error
    for name, array in arrays:
        if isinstance(array, np.ndarray) and array.ndim >= 2 and _is_float(array):
            yield name, _as_float32(array.reshape(array.shape[0], -1))


def _from_onnx(path: Path, model: onnx_ir.Model) -> Iterator[tuple[str, Matrix]]:
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
            except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:  # wrong attributes or shapes
                raise ModelError(
                    f"weights file '{path}': tensor '{value.name}' of shape {array.shape} is not a weight of a "
                    f"{node.op_type} with these attributes: {error}"
                ) from error
            if matrix is not None:
                yield str(value.name), _as_float32(matrix)


def _rows_of_sums(node: onnx_ir.Node, position: int, array: NDArray[np.generic]) -> NDArray[np.generic] | None:
    """Return a weight with the summed axis last; None if the operand is not a weight."""
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
    """True for float16, bfloat16, float32 and float64; 8-bit floats are already quantized."""
    return array.dtype.name in {"float16", "bfloat16", "float32", "float64"} and array.size > 0


def _as_float32(array: NDArray[np.generic]) -> Matrix:
    with np.errstate(over="ignore"):  # an Inf is reported later, with the tensor's name
        return np.ascontiguousarray(array, np.float32)
