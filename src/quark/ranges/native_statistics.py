"""The compiled statistics of csrc/formats/statistics.h, through ctypes, which lets other threads run meanwhile."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quark.formats.native import load_library

_OUT_OF_MEMORY = 2

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "quark_extremes": (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
    "quark_add_to_histogram": (
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_double),
        *(ctypes.c_void_p, ctypes.c_int64),
    ),
    "quark_add_squared_errors": (
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32),
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p),
    ),
    "quark_plane_sums": (
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    ),
}


class _PlaneCells(ctypes.Structure):
    """quark::PlaneCells of csrc/formats/statistics.h, field by field."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("row_group", ctypes.c_void_p),
        ("column_group", ctypes.c_void_p),
        ("row_groups", ctypes.c_int32),
        ("column_groups", ctypes.c_int32),
    )


@dataclass(frozen=True, eq=False)
class Lines:
    """The rows of a plane, or its columns, in groups 0..count-1: `group_of` has one int32 for each."""

    group_of: npt.NDArray[np.int32]
    count: int


@dataclass(frozen=True)
class AffineRounding:
    """clip(round(x / scale), lowest, highest) * scale, in float32, halves to even. The bounds are whole numbers."""

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

    def extremes(self, x: npt.NDArray[np.float32]) -> tuple[float, float] | None:
        """None where x holds NaN or Inf."""
        found = (ctypes.c_float * 2)()
        status = self._library.quark_extremes(x.ctypes.data, x.size, ctypes.addressof(found))
        return (found[0], found[1]) if status == 0 else None

    def add_to_histogram(
        self, x: npt.NDArray[np.float32], lowest: float, per_unit: float, counts: npt.NDArray[np.int64]
    ) -> None:
        status = self._library.quark_add_to_histogram(
            x.ctypes.data, x.size, lowest, per_unit, counts.ctypes.data, len(counts)
        )
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"counting into {len(counts)} bins")
        if status != 0:
            raise RuntimeError(f"the compiled code refused to count into {len(counts)} bins")  # our mistake

    def squared_errors(
        self, x: npt.NDArray[np.float32], bits: int, positions: tuple[int, ...]
    ) -> npt.NDArray[np.float64]:
        where = np.array(positions, np.int32)
        sums = np.zeros(len(positions))
        status = self._library.quark_add_squared_errors(
            x.ctypes.data, x.size, bits, where.ctypes.data, len(where), sums.ctypes.data
        )
        if status != 0:
            raise RuntimeError(f"the compiled code refused positions {positions} of {bits} bits")  # our mistake
        return sums

    def plane_sums(
        self, planes: npt.NDArray[np.float32], rows: Lines, columns: Lines, rounding: AffineRounding | None = None
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64] | None]:
        """Of planes [count, rows, columns], contiguous, each with an element at least: the sums over every pair of a
        group of rows and one of columns, [count, row groups, column groups], and those of what the rounding adds."""
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
    """The compiled statistics; None where the library is missing, older than these functions, or switched off."""
    library = load_library()
    if library is None or not all(hasattr(library, name) for name in _SIGNATURES):
        return None
    return NativeStatistics(library)
