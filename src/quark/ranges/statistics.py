"""The statistics that calibration computes over every element, in compiled code or in numpy.

    extremes          smallest and largest element; NaN and Inf are refused
    add_to_histogram  counts in evenly spaced bins
    squared_errors    sums of (x_hat - x)^2 at several power-of-two positions

They dominate calibration: an image produces millions of activations. The compiled code (csrc/formats/statistics.h) is
limited by memory bandwidth only and releases the GIL. Counts are the same either way; sums of errors differ at most by
the order of addition.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quark.errors import InvalidValueError
from quark.formats.arrays import CHUNK_ELEMENTS, array_kind
from quark.formats.native import load_library

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def as_float32(x: Any) -> Floats:
    """x flattened, as contiguous float32: the array itself if it is that already. float64 is rounded; unaligned arrays,
    such as views of a file's bytes, are copied."""
    kind = array_kind(x)
    kind.precision(x)
    if kind.name == "torch":
        x = x.detach().cpu().float().numpy()
    return np.require(x.reshape(-1), np.float32, ["C_CONTIGUOUS", "ALIGNED"])


def extremes(x: Floats) -> tuple[float, float] | None:
    """(smallest, largest); None if there are no elements. NaN and Inf are refused."""
    if not x.size:
        return None
    native = native_statistics()
    if native is not None:
        bounds = native.extremes(x)
    else:
        lowest, highest = float(x.min()), float(x.max())
        bounds = (lowest, highest) if math.isfinite(lowest) and math.isfinite(highest) else None
    if bounds is None:
        count = x.size - np.count_nonzero(np.isfinite(x))
        raise InvalidValueError(f"{count} of {x.size} values are NaN or Inf, which have no range")
    return bounds


def add_to_histogram(x: Floats, lowest: float, highest: float, counts: Counts) -> None:
    """Count x in evenly spaced bins over lowest..highest; values beyond count in the outermost bins."""
    per_unit = len(counts) / (highest - lowest) if highest > lowest else 0.0
    native = native_statistics()
    if native is not None:
        native.add_to_histogram(x, lowest, per_unit, counts)
        return
    for start in range(0, x.size, CHUNK_ELEMENTS):
        scaled = (x[start : start + CHUNK_ELEMENTS].astype(np.float64) - lowest) * per_unit
        bins = np.clip(scaled, 0, len(counts) - 1).astype(np.int64)
        counts += np.bincount(bins, minlength=len(counts))


def squared_errors(x: Floats, bits: int, positions: tuple[int, ...]) -> Doubles:
    """The sum of (x_hat - x)^2 at each position, for codes of all of -2^(bits-1)..2^(bits-1)-1."""
    native = native_statistics()
    if native is not None:
        return native.squared_errors(x, bits, positions)
    half = 1 << (bits - 1)
    sums = np.zeros(len(positions))
    for start in range(0, x.size, CHUNK_ELEMENTS):
        wide = x[start : start + CHUNK_ELEMENTS].astype(np.float64)
        for i, position in enumerate(positions):
            steps = wide * math.ldexp(1.0, position)
            error = np.rint(np.clip(steps, -half, half - 1)) - steps
            sums[i] += float(error @ error)
    return np.asarray(np.ldexp(sums, -2 * np.array(positions)))


_OUT_OF_MEMORY = 2

_POINTER, _SIZE, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "quark_extremes": (_POINTER, _SIZE, _POINTER),
    "quark_add_to_histogram": (_POINTER, _SIZE, _DOUBLE, _DOUBLE, _POINTER, _SIZE),
    "quark_add_squared_errors": (_POINTER, _SIZE, _INT, _POINTER, _INT, _POINTER),
    "quark_plane_sums": (_POINTER, _SIZE, _POINTER, _POINTER, _POINTER, _POINTER),
}


class _PlaneCells(ctypes.Structure):
    """quark::PlaneCells of csrc/formats/statistics.h, field by field."""

    _fields_ = (
        ("rows", _SIZE),
        ("columns", _SIZE),
        ("row_group", _POINTER),
        ("column_group", _POINTER),
        ("row_groups", _INT),
        ("column_groups", _INT),
    )


@dataclass(frozen=True, eq=False)
class Lines:
    """The rows of a plane, or its columns, in groups 0..count-1: `group_of` has one int32 for each."""

    group_of: npt.NDArray[np.int32]
    count: int


@dataclass(frozen=True)
class AffineRounding:
    """clip(round(x / scale), lowest, highest) * scale in float32, halves to even. The bounds are whole numbers."""

    scale: float
    lowest: float
    highest: float


class NativeStatistics:
    """The functions of the library. Arrays are flat, contiguous float32."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int
        self._library = library

    def extremes(self, x: Floats) -> tuple[float, float] | None:
        """None if x holds NaN or Inf."""
        bounds = (ctypes.c_float * 2)()
        status = self._library.quark_extremes(x.ctypes.data, x.size, ctypes.addressof(bounds))
        return (bounds[0], bounds[1]) if status == 0 else None

    def add_to_histogram(self, x: Floats, lowest: float, per_unit: float, counts: Counts) -> None:
        status = self._library.quark_add_to_histogram(
            x.ctypes.data, x.size, lowest, per_unit, counts.ctypes.data, len(counts)
        )
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"counting into {len(counts)} bins")
        if status != 0:
            raise RuntimeError(f"the compiled code refused to count into {len(counts)} bins")  # our mistake

    def squared_errors(self, x: Floats, bits: int, positions: tuple[int, ...]) -> Doubles:
        where = np.array(positions, np.int32)
        sums = np.zeros(len(positions))
        status = self._library.quark_add_squared_errors(
            x.ctypes.data, x.size, bits, where.ctypes.data, len(where), sums.ctypes.data
        )
        if status != 0:
            raise RuntimeError(f"the compiled code refused positions {positions} of {bits} bits")  # our mistake
        return sums

    def plane_sums(
        self, planes: Floats, rows: Lines, columns: Lines, rounding: AffineRounding | None = None
    ) -> tuple[Doubles, Doubles | None]:
        """Sums over every pair of a row group and a column group, shape [count, row groups, column groups], and the
        sums of the error that the rounding adds. The planes, [count, rows, columns], are contiguous and not empty."""
        count, height, width = planes.shape
        cells = _PlaneCells(
            height, width, rows.group_of.ctypes.data, columns.group_of.ctypes.data, rows.count, columns.count
        )
        sums = np.empty((count, rows.count, columns.count))
        errors = None if rounding is None else np.empty_like(sums)
        how = None if rounding is None else (ctypes.c_float * 3)(rounding.scale, rounding.lowest, rounding.highest)
        status = self._library.quark_plane_sums(
            *(planes.ctypes.data, count, ctypes.addressof(cells), None if how is None else ctypes.addressof(how)),
            *(sums.ctypes.data, None if errors is None else errors.ctypes.data),
        )
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"adding up planes of {height} x {width}")
        if status != 0:
            raise RuntimeError(f"the compiled code refused planes of {height} x {width}")  # our mistake
        return sums, errors


@functools.cache
def native_statistics() -> NativeStatistics | None:
    """The compiled statistics; None if the library is missing, older than these functions, or switched off."""
    library = load_library()
    if library is None or not all(hasattr(library, name) for name in _SIGNATURES):
        return None
    return NativeStatistics(library)
