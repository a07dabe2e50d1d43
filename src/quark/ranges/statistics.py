"""The three things that calibration counts over every element, in compiled code or, with the same results, in numpy.

    extremes          least and greatest element, NaN and Inf refused
    add_to_histogram  counts of evenly spaced bins
    squared_errors    sums of (x_hat - x)^2 at several power-of-two positions

They dominate calibration: an image leaves millions of activations behind. The compiled ones run at the speed of memory
and let other Python threads run meanwhile. Counts are equal in both; sums of errors agree up to the order of addition.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from quark.errors import InvalidValueError
from quark.formats.arrays import CHUNK_ELEMENTS, array_kind
from quark.ranges.native_statistics import native_statistics

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def as_float32(x: Any) -> Floats:
    """x flat, as float32 in one piece: the array itself where it is that already. float64 is rounded, and what begins
    between two elements, as a view of a file's bytes may, is copied."""
    kind = array_kind(x)
    kind.precision(x)
    if kind.name == "torch":
        x = x.detach().cpu().float().numpy()
    flat = x.reshape(-1)
    return np.require(flat, np.float32, ["C_CONTIGUOUS", "ALIGNED"])


def extremes(x: Floats) -> tuple[float, float] | None:
    """(least, greatest); None where there are no elements. NaN and Inf are refused."""
    if not x.size:
        return None
    native = native_statistics()
    if native is not None:
        found = native.extremes(x)
    else:
        lowest, highest = float(x.min()), float(x.max())
        found = (lowest, highest) if math.isfinite(lowest) and math.isfinite(highest) else None
    if found is None:
        raise InvalidValueError(f"{count_nonfinite(x)} of {x.size} values are NaN or Inf, which have no range")
    return found


def count_nonfinite(x: Floats) -> int:
    return int(x.size - np.count_nonzero(np.isfinite(x)))


def add_to_histogram(x: Floats, lowest: float, highest: float, counts: Counts) -> None:
    """Count x into the even bins of lowest..highest; what lies beyond counts in the outermost bins."""
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
