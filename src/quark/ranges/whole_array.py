"""Ranges of arrays in memory, such as weights: of the whole array, or of each channel."""

from __future__ import annotations

from typing import Any

import numpy as np

from quark.errors import InvalidValueError
from quark.formats.affine import choose_affine, find_ranges
from quark.formats.spec import IntFormat
from quark.ranges.histogram_methods import COARSE, MinMSE, Percentile
from quark.ranges.method import MinMax, RangeMethod, TensorRange
from quark.ranges.statistics import Doubles, Floats, as_float32


def range_of(array: Any, method: RangeMethod, integer: IntFormat, is_symmetric: bool) -> TensorRange:
    """The range of a whole array, which counts as one sample."""
    observer = method.observer(integer, is_symmetric)
    observer.observe(array)
    observer.end_of_sample()
    if observer.needs_second_pass:
        observer.observe_again(array)
    return observer.result()


def ranges_of_channels(
    array: Any, axis: int, method: RangeMethod, integer: IntFormat, is_symmetric: bool
) -> tuple[Floats, Floats]:
    """(lowest, highest) of each channel of that axis. A channel has few values, which are searched directly, without a
    histogram. Methods without a vectorised form here look at one channel after the other."""
    shape = tuple(array.shape)
    if not -len(shape) <= axis < len(shape):
        raise InvalidValueError(f"axis {axis} of an array of shape {shape}: expected {-len(shape)}..{len(shape) - 1}")
    rows = np.moveaxis(as_float32(array).reshape(shape), axis, 0).reshape(shape[axis], -1)
    if not np.isfinite(rows).all():
        channel = int(np.argmin(np.isfinite(rows).all(axis=1)))
        raise InvalidValueError(f"x: channel {channel} of axis {axis} holds NaN or Inf, which has no range")
    if isinstance(method, MinMax) or not rows.size:
        lowest, highest = find_ranges(rows, axis=0)
        return np.asarray(lowest), np.asarray(highest)
    if isinstance(method, Percentile) and is_symmetric:
        reach = np.percentile(np.abs(rows), method.percentile, axis=1).astype(np.float32)
        return np.maximum(rows.min(axis=1), -reach), np.minimum(rows.max(axis=1), reach)
    if isinstance(method, Percentile):
        cut = (100 - method.percentile) / 2
        lowest, highest = np.percentile(rows, [cut, 100 - cut], axis=1).astype(np.float32)
        return lowest, highest
    if isinstance(method, MinMSE):
        return _least_errors(rows, integer, is_symmetric)
    ranges = [range_of(row, method, integer, is_symmetric) for row in rows]
    lowest, highest = ([getattr(each, end) for each in ranges] for end in ("lowest", "highest"))
    return np.array(lowest, np.float32), np.array(highest, np.float32)


def _least_errors(rows: Floats, integer: IntFormat, is_symmetric: bool) -> tuple[Floats, Floats]:
    """The extremes of each channel, reduced by the factor with the smallest squared error."""
    lowest, highest = (each.astype(np.float64) for each in find_ranges(rows, axis=0))
    best = np.ones(len(rows))
    least = _channel_errors(rows, lowest, highest, integer, is_symmetric)
    for factor in np.unique(np.concatenate((np.linspace(0.98, 0.3, 35), COARSE[8:21])))[::-1]:
        errors = _channel_errors(rows, lowest * factor, highest * factor, integer, is_symmetric)
        is_better = errors < least
        best[is_better], least[is_better] = factor, errors[is_better]
    return (lowest * best).astype(np.float32), (highest * best).astype(np.float32)


def _channel_errors(rows: Floats, lowest: Doubles, highest: Doubles, integer: IntFormat, is_symmetric: bool) -> Doubles:
    scale, zero_point = choose_affine(lowest, highest, integer, symmetric=is_symmetric)
    zero = zero_point.astype(np.float32)[:, None]
    step = scale.astype(np.float32)[:, None]
    error = np.clip(np.rint(rows / step), integer.qmin - zero, integer.qmax - zero) * step - rows
    return np.asarray(np.einsum("ij,ij->i", error, error, dtype=np.float64))
