"""What a layer multiplies its weights with, on average over everything that it computes.

The mean of a convolution's output over all positions is linear in its input, and needs of that only a few sums: for
each channel and each tap of the kernel, the sum of the inputs that the tap ever falls on.

    mean y[o] = b[o] + sum over c, k of w[o, c, k] * taps[c, k],      taps[c, k] = (sum of x[c] under tap k) / positions

Along one axis of space the inputs under tap k are those of a 0/1 matrix; along all axes, of a product of such matrices.
A tap in the padding falls on nothing. For Gemm and MatMul there is one tap: the sums over all rows.

A pass over samples needs these sums of a tensor, and of what rounding adds to it. In compiled code both come from one
pass over the tensor, with no array of errors. Rows of a plane that are under the same taps, nearly all of them, are one
group, and so are columns; then

    sums[i, j] = sum over groups p, q of  [p is under tap i] * [q is under tap j] * (sum of the elements in both)

That works for convolutions of one and two dimensions, in either direction. All others, and all of them if the library
is missing, are summed by numpy, with which the results agree up to its rounding to float32 on the way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.formats.affine import integer_format
from quark.onnx.graph import attribute
from quark.plan import AffineChoice, Choice, DynamicChoice
from quark.ranges.statistics import AffineRounding, Lines, native_statistics
from quark.rounded import rounding_error

Array = NDArray[Any]
MAX_ROWS = 64


@dataclass(frozen=True)
class Window:
    """The positions of a kernel's taps along one spatial axis of the input."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    pad_begin: int = 0
    pad_end: int = 0
    same: str = ""  # SAME_UPPER or SAME_LOWER: padded to ceil(size / stride) positions
    is_transposed: bool = False
    output_padding: int = 0

    def places(self, size: int) -> tuple[Array, int]:
        """A matrix of taps by inputs, 1 where the tap falls on the input, and the number of positions computed."""
        sources = self.sources(size)
        is_inside = sources >= 0
        matrix = np.zeros((self.kernel, size), np.float32)
        matrix[np.broadcast_to(np.arange(self.kernel), sources.shape)[is_inside], sources[is_inside]] = 1
        return matrix, len(sources)

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - windows are small values, and every sample asks again
    def sources(self, size: int) -> Array:
        """For every position, the input that each tap falls on, [positions, kernel]; -1 where it falls on none. The
        array is read-only."""
        begin, end = self._padding(size)
        reach = self.dilation * (self.kernel - 1) + 1
        taps = np.arange(self.kernel) * self.dilation
        if self.is_transposed:
            count = self.stride * (size - 1) + self.output_padding + reach - begin - end
            ahead = np.arange(max(count, 0))[:, None] + begin - taps
            sources = np.where(ahead % self.stride == 0, ahead // self.stride, -1)
        else:
            count = (size + begin + end - reach) // self.stride + 1
            sources = np.arange(max(count, 0))[:, None] * self.stride + taps - begin
        sources = np.where((sources >= 0) & (sources < size), sources, -1)
        sources.flags.writeable = False
        return sources

    def _padding(self, size: int) -> tuple[int, int]:
        if not self.same:
            return self.pad_begin, self.pad_end
        reach = self.dilation * (self.kernel - 1) + 1
        if self.is_transposed:
            total = max(0, self.stride * (size - 1) + self.output_padding + reach - size * self.stride)
        else:
            total = max(0, (math.ceil(size / self.stride) - 1) * self.stride + reach - size)
        small, large = total // 2, total - total // 2
        return (small, large) if self.same == "SAME_UPPER" else (large, small)


@dataclass(frozen=True)
class Taps:
    """The sums to take of an input: channels of axis 1 under windows along the axes behind it, or, without windows, the
    elements of `axis` over all others."""

    windows: tuple[Window, ...] = ()
    axis: int = -1

    def sums(self, x: Array) -> tuple[Array, int]:
        """The sums for each row of the batch, [rows, channels, *kernel], and how many outputs a row has."""
        if not self.windows:
            x = np.moveaxis(x, self.axis, -1)
            # many rows of a matrix are tokens rather than samples, and are cut into MAX_ROWS pieces
            if x.ndim == 2 and len(x) > MAX_ROWS:
                whole = x[: len(x) // MAX_ROWS * MAX_ROWS]
                x = whole.reshape(MAX_ROWS, -1, x.shape[-1])
            rows = x.reshape(x.shape[0] if x.ndim > 1 else 1, -1, x.shape[-1])
            return rows.sum(axis=1), rows.shape[1]
        places = [window.places(size) for window, size in zip(self.windows, x.shape[2:], strict=True)]
        positions = math.prod(count for _, count in places)
        if all((matrix == 1).all() for matrix, _ in places):
            kernel = tuple(window.kernel for window in self.windows)
            flat = x.reshape(*x.shape[:2], -1).sum(axis=2).reshape(*x.shape[:2], *[1] * len(places))
            return np.broadcast_to(flat, (*x.shape[:2], *kernel)), positions
        # every axis of space times its matrix, the last one first: [batch, channels, *kernel]
        for behind, (matrix, _) in enumerate(reversed(places)):
            axis = x.ndim - 1 - behind
            is_last = behind == 0
            x = x @ matrix.T if is_last else np.moveaxis(np.tensordot(x, matrix, axes=([axis], [1])), -1, axis)
        return x, positions


def taps_of(node: ir.Node, weight: Array) -> Taps | None:
    """The taps of a layer; None if they are not known."""
    if node.op_type == "Gemm":
        return Taps(axis=0 if attribute(node, "transA", 0) else 1)
    if node.op_type == "MatMul":
        return Taps(axis=-1) if weight.ndim == 2 else None
    rank = weight.ndim - 2
    kernel = tuple(weight.shape[2:])
    pads = list(attribute(node, "pads") or [0] * 2 * rank)
    strides, dilations = (list(attribute(node, name) or [1] * rank) for name in ("strides", "dilations"))
    extra = list(attribute(node, "output_padding") or [0] * rank)
    auto_pad = str(attribute(node, "auto_pad", "NOTSET"))
    is_transposed = node.op_type == "ConvTranspose"
    if is_transposed and attribute(node, "output_shape"):
        return None
    if auto_pad not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        return None
    if auto_pad != "NOTSET":
        pads = [0] * 2 * rank
    same = auto_pad if auto_pad.startswith("SAME") else ""
    return Taps(
        tuple(
            Window(kernel[i], strides[i], dilations[i], pads[i], pads[i + rank], same, is_transposed, extra[i])
            for i in range(rank)
        ),
        axis=1,
    )


def mean_products(node: ir.Node, weight: Array, taps: Array) -> Array:
    """The mean output of each sample and channel, without the bias: weights times taps, [samples, channels]."""
    if node.op_type == "MatMul":
        return np.asarray(taps @ weight)
    if node.op_type == "Gemm":
        matrix = weight.T if attribute(node, "transB", 0) else weight
        return np.asarray(taps @ matrix * float(attribute(node, "alpha", 1.0)))
    groups = int(attribute(node, "group", 1))
    inputs = np.moveaxis(taps.reshape(len(taps), groups, -1), 0, -1)  # [groups, channels and taps, samples]
    if node.op_type == "ConvTranspose":  # its weights are [inputs, outputs of a group, *kernel]
        weight = np.moveaxis(weight.reshape(groups, -1, *weight.shape[1:]), 2, 1)
        kernels = weight.reshape(groups, weight.shape[1], -1)
    else:
        kernels = weight.reshape(groups, weight.shape[0] // groups, -1)
    return np.asarray((kernels @ inputs).reshape(-1, len(taps)).T)


Wanted = tuple[Taps, Choice | None]


class TapSums(NamedTuple):
    """The sums of a tensor and of its rounding error, [rows, channels, *kernel]; those of the error are zero if there
    is none, or it is not known before run time."""

    values: Array
    errors: Array
    positions: int


def tap_sums(x: Array, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, TapSums]]:
    """Yield what is wanted of a float32 tensor. Errors that need an array are computed once for all."""
    error_of = functools.cache(lambda choice: rounding_error(x, choice))
    for taps, choice in wanted:
        is_known = choice is not None and not isinstance(choice, DynamicChoice)
        rounding = None
        if isinstance(choice, AffineChoice) and choice.axis is None:  # one scale, which compiled code can round with
            fmt, zero_point = integer_format(choice.format), choice.zero_point[0]
            rounding = AffineRounding(choice.scale[0], fmt.qmin - zero_point, fmt.qmax - zero_point)
        values, errors, positions = _sums(x, taps, rounding)
        if errors is None:
            errors = _sums(error_of(choice), taps)[0] if is_known else np.zeros_like(values)
        yield (taps, choice), TapSums(values, errors, positions)


def _sums(x: Array, taps: Taps, rounding: AffineRounding | None = None) -> tuple[Array, Array | None, int]:
    """The sums of x, of its rounding error if that was computed on the way, and the number of positions."""
    native = native_statistics()
    if native is None or not x.size or len(taps.windows) not in (1, 2):
        values, positions = taps.sums(x)
        return values, None, positions
    tiling = _tiling(taps.windows, x.shape[2:])
    plane = len(tiling.rows.group_of), len(tiling.columns.group_of)
    planes = np.require(x, np.float32, ["C_CONTIGUOUS", "ALIGNED"]).reshape(-1, *plane)
    sums, errors = native.plane_sums(planes, tiling.rows, tiling.columns, rounding)
    shape = (*x.shape[:2], *(window.kernel for window in taps.windows))
    under_taps = None if errors is None else tiling.under_taps(errors, shape)
    return tiling.under_taps(sums, shape), under_taps, tiling.positions


@dataclass(frozen=True, eq=False)
class _Tiling:
    """The cells into which taps cut a plane. `spread` has a row for each pair of taps and a column for each cell."""

    rows: Lines
    columns: Lines
    spread: NDArray[np.float64]
    positions: int

    def under_taps(self, cells: NDArray[np.float64], shape: tuple[int, ...]) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            sums = cells.reshape(len(cells), -1) @ self.spread.T
            return np.asarray(sums.reshape(shape).astype(np.float32))


@functools.lru_cache(maxsize=1024)  # the layers of a network; every sample asks again
def _tiling(windows: tuple[Window, ...], sizes: tuple[int, ...]) -> _Tiling:
    """Cut planes of these sizes into cells by the taps; a line of one dimension is a plane of one row."""
    places = [window.places(size) for window, size in zip(windows, sizes, strict=True)]
    matrices = [np.ones((1, 1), np.float32)] * (2 - len(places)) + [matrix for matrix, _ in places]
    groups = []
    for matrix in matrices:  # the columns that differ, and which of them each column is
        different, group_of = np.unique(matrix, axis=1, return_inverse=True)
        lines = Lines(group_of.reshape(-1).astype(np.int32), different.shape[1])
        groups.append((different.astype(np.float64), lines))
    (row_taps, rows), (column_taps, columns) = groups
    spread = np.asarray(np.kron(row_taps, column_taps), np.float64)
    return _Tiling(rows, columns, spread, math.prod(count for _, count in places))
