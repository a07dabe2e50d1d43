"""What shares one scale: a whole array, a channel, or a group of neighbours along an axis.

The arrays of parameters have the shapes that ONNX gives them: () or one element for the whole array, (channels,) for
channels of `axis`, and for groups the shape of the data with `axis` counting groups, the last of which may be shorter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from quark.errors import InvalidValueError
from quark.formats.arrays import ArrayKind
from quark.formats.quantize import as_index, normalize_axis


@dataclass(frozen=True)
class Granularity:
    """No axis: the whole array. An axis: each of its channels. With a group size: so many neighbours along it."""

    axis: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.group_size is None:
            return
        if self.axis is None:
            raise InvalidValueError(f"group_size {self.group_size} without axis: name the axis that groups run along")
        if as_index("group_size", self.group_size) < 1:
            raise InvalidValueError(f"group_size {self.group_size}: expected at least 1")

    def parameter_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the parameters of an array of `shape`."""
        if self.axis is None:
            return ()
        axis = normalize_axis(self.axis, len(shape))
        n = shape[axis] if len(shape) else 1
        if self.group_size is None:
            return (n,)
        return (*shape[:axis], -(-n // self.group_size), *shape[axis + 1 :])

    def spread(self, kind: ArrayKind, values: Any, shape: tuple[int, ...]) -> Any:
        """Parameters in a shape that goes with an array of `shape`."""
        if self.axis is None:
            return values.reshape(())
        expected = self.parameter_shape(shape)
        if tuple(values.shape) != expected:
            raise InvalidValueError(
                f"parameters of shape {tuple(values.shape)} do not fit an array of shape {tuple(shape)} along axis "
                f"{self.axis}: expected {expected}"
            )
        axis = normalize_axis(self.axis, len(shape))
        if self.group_size is None:
            return values.reshape(expected[: len(shape)] + (1,) * (len(shape) - axis - 1))
        outer, n, inner = self._rows_shape(shape)
        groups = expected[axis]
        size = self.group_size
        repeated = kind.xp.broadcast_to(values.reshape(outer, groups, 1, inner), (outer, groups, size, inner))
        return repeated.reshape(outer, groups * size, inner)[:, :n].reshape(shape)

    def extremes(self, kind: ArrayKind, x: Any) -> tuple[Any, Any]:
        """The least and greatest element of whatever shares a parameter; 0 and 0 where there is none."""
        if self.axis is None:
            flat = x.reshape(-1)
            return _extremes(kind, kind.pad_end(flat, 0, int(not flat.shape[0])), 0)
        outer, n, inner = self._rows_shape(x.shape)
        rows = x.reshape(outer, n, inner)
        if self.group_size is None:
            rows = kind.pad_end(kind.pad_end(rows, 0, int(not outer)), 2, int(not inner))
            return _extremes(kind, rows, (0, 2))
        size = self.group_size
        whole = n - n % size
        lowest, highest = _extremes(kind, rows[:, :whole].reshape(outer, whole // size, size, inner), 2)
        if whole < n:
            last_lowest, last_highest = _extremes(kind, rows[:, None, whole:], 2)
            lowest = kind.xp.concatenate([lowest, last_lowest], 1)
            highest = kind.xp.concatenate([highest, last_highest], 1)
        shape = self.parameter_shape(x.shape)
        return lowest.reshape(shape), highest.reshape(shape)

    def _rows_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """(outer, n, inner) with n along the axis; a scalar is one element."""
        assert self.axis is not None
        axis = normalize_axis(self.axis, len(shape))
        return math.prod(shape[:axis]), shape[axis] if len(shape) else 1, math.prod(shape[axis + 1 :])


def _extremes(kind: ArrayKind, x: Any, axes: int | tuple[int, ...]) -> tuple[Any, Any]:
    return kind.xp.amin(x, axes), kind.xp.amax(x, axes)
