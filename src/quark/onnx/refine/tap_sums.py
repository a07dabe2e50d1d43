"""The sums of a tensor under taps, and of what rounding adds to it: the work of bias correction's pass over samples.

In compiled code both come from one pass over the tensor, with no array of errors. Rows of a plane that are under the
same taps, nearly all of them, are one group, and so are columns; then

    sums[i, j] = sum over groups p, q of  [p is under tap i] * [q is under tap j] * (sum of the elements in both)

That serves convolutions of one and two dimensions, in either direction. All others, and every one where the library is
missing, are summed by numpy, which the results agree with up to its rounding to float32 on the way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quark.formats.affine import integer_format
from quark.onnx.refine.taps import Taps, Window
from quark.plan import AffineChoice, Choice, DynamicChoice
from quark.ranges.native_statistics import AffineRounding, Lines, native_statistics
from quark.rounded import rounding_error

Array = NDArray[Any]
Wanted = tuple[Taps, Choice | None]


class TapSums(NamedTuple):
    """Of the tensor and of its error, [rows, channels, *kernel]; the error's are zero where it is not known before run
    time, or there is none."""

    values: Array
    errors: Array
    positions: int


def tap_sums(x: Array, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, TapSums]]:
    """What is wanted of a float32 tensor, one after the other. Errors that need an array are made once for all."""
    error_of = functools.cache(lambda choice: rounding_error(x, choice))
    for taps, choice in wanted:
        is_known = choice is not None and not isinstance(choice, DynamicChoice)
        rounding = _rounding(choice) if is_known and _is_compiled(x, taps) else None
        values, errors, positions = _sums(x, taps, rounding)
        if errors is None:
            errors = _sums(error_of(choice), taps)[0] if is_known else np.zeros_like(values)
        yield (taps, choice), TapSums(values, errors, positions)


def _rounding(choice: Choice | None) -> AffineRounding | None:
    """What the compiled code needs to know of a choice; None where it is not one scale for all."""
    if not isinstance(choice, AffineChoice) or choice.axis is not None:
        return None
    fmt, zero_point = integer_format(choice.format), choice.zero_point[0]
    return AffineRounding(choice.scale[0], fmt.qmin - zero_point, fmt.qmax - zero_point)


def _is_compiled(x: Array, taps: Taps) -> bool:
    return x.size > 0 and len(taps.windows) in (1, 2) and native_statistics() is not None


def _sums(x: Array, taps: Taps, rounding: AffineRounding | None = None) -> tuple[Array, Array | None, int]:
    native = native_statistics()
    if native is None or not _is_compiled(x, taps):
        values, positions = taps.sums(x)
        return values, None, positions
    tiling = _tiling(taps.windows, x.shape[2:])
    planes = np.require(x, np.float32, ["C_CONTIGUOUS", "ALIGNED"]).reshape(-1, *tiling.plane)
    sums, errors = native.plane_sums(planes, tiling.rows, tiling.columns, rounding)
    shape = (*x.shape[:2], *(window.kernel for window in taps.windows))
    return (
        tiling.under_taps(sums, shape),
        None if errors is None else tiling.under_taps(errors, shape),
        tiling.positions,
    )


@dataclass(frozen=True, eq=False)
class _Tiling:
    """How the taps cut a plane. `spread` has a row for each pair of taps and a column for each cell."""

    rows: Lines
    columns: Lines
    spread: NDArray[np.float64]
    positions: int

    @property
    def plane(self) -> tuple[int, int]:
        return len(self.rows.group_of), len(self.columns.group_of)

    def under_taps(self, cells: NDArray[np.float64], shape: tuple[int, ...]) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            sums = cells.reshape(len(cells), -1) @ self.spread.T
            return np.asarray(sums.reshape(shape).astype(np.float32))


@functools.lru_cache(maxsize=1024)  # the layers of a network; every sample asks again
def _tiling(windows: tuple[Window, ...], sizes: tuple[int, ...]) -> _Tiling:
    """A line of one dimension is a plane of one row."""
    places = [window.places(size) for window, size in zip(windows, sizes, strict=True)]
    matrices = [np.ones((1, 1), np.float32)] * (2 - len(places)) + [matrix for matrix, _ in places]
    (row_taps, rows), (column_taps, columns) = (_groups(matrix) for matrix in matrices)
    spread = np.asarray(np.kron(row_taps, column_taps), np.float64)
    return _Tiling(rows, columns, spread, math.prod(count for _, count in places))


def _groups(matrix: Array) -> tuple[NDArray[np.float64], Lines]:
    """The columns of the matrix that differ, and which of them each column is."""
    different, group_of = np.unique(matrix, axis=1, return_inverse=True)
    return different.astype(np.float64), Lines(group_of.reshape(-1).astype(np.int32), different.shape[1])
