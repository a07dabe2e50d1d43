"""The bytes of a packed array, and how they lie.

The packed axis is moved last. Its elements are packed without gaps, as `element_codes` says; every row of them starts
at a byte, and a short last block is not filled up. A block has one scale byte, its exponent + 127; 255 makes all of
the block NaN. In a carrying format (bfp16c) 255 is 2^128, and nothing stands for NaN. With sub-blocks the
microexponents follow that byte, packed as elements are and filled up to whole bytes. So the arrays are

    codes     (other axes..., bytes of a row)
    scales    (other axes..., blocks), or (other axes..., blocks, bytes) with sub-blocks; (0,) for a plain format
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.formats.lanes import LanePlace
from quark.formats.spec import BlockFormat, Format


@dataclass(frozen=True, eq=False)
class PackedArray:
    """What `pack` made: the bytes, and what is needed to read them. `dtype` is that of the array that was packed."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    format: Format
    shape: tuple[int, ...]
    axis: int
    dtype: Any

    def __post_init__(self) -> None:
        layout = Layout(self.format, self.shape or (1,), self.axis)
        for name, expected in (("codes", layout.codes_shape), ("scales", layout.scales_shape)):
            array = getattr(self, name)
            if array.dtype != np.uint8 or array.shape != expected:
                raise InvalidValueError(
                    f"{name}: expected uint8 of shape {expected} for '{self.format}' of shape {self.shape} along axis "
                    f"{self.axis}, got {array.dtype} of shape {array.shape}"
                )

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.scales.nbytes)

    @property
    def bits_per_element(self) -> float:
        """The bits that are really there; the format's own figure for an array without elements."""
        count = math.prod(self.shape)
        return 8 * self.nbytes / count if count else self.format.bits_per_element


@dataclass(frozen=True)
class Layout:
    """How many bytes there are and in which shapes, for an array of rank 1 or more packed along an axis."""

    format: Format
    shape: tuple[int, ...]
    axis: int

    @property
    def codes_shape(self) -> tuple[int, ...]:
        element = self.format.element if isinstance(self.format, BlockFormat) else self.format
        return (*self._others, -(-self.shape[self.axis] * element.bits // 8))

    @property
    def scales_shape(self) -> tuple[int, ...]:
        if not isinstance(self.format, BlockFormat):
            return (0,)
        return (*self._others, self.blocks, *((self.scale_bytes,) if self.format.sub_blocks else ()))

    @property
    def _others(self) -> tuple[int, ...]:
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]

    @property
    def blocks(self) -> int:
        return -(-self.shape[self.axis] // self.format.block_size) if isinstance(self.format, BlockFormat) else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes per block: the exponent's, and those of the microexponents."""
        if not isinstance(self.format, BlockFormat) or self.format.sub_blocks is None:
            return 1
        count = -(-self.format.block_size // self.format.sub_blocks.size)
        return 1 - (-count * self.format.sub_blocks.shift_bits // 8)

    def empty_planes(self) -> NDArray[np.uint8]:
        """One plane per byte of a scale, each shaped as x is with blocks for elements."""
        return np.zeros(
            (self.scale_bytes, *self.shape[: self.axis], self.blocks, *self.shape[self.axis + 1 :]), np.uint8
        )

    def scales_of(self, planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        moved = np.moveaxis(np.moveaxis(planes, self.axis + 1, -1), 0, -1)
        return np.ascontiguousarray(moved).reshape(self.scales_shape)

    def planes_of(self, scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
        moved = scales.reshape(*self._others, self.blocks, self.scale_bytes)
        return np.ascontiguousarray(np.moveaxis(np.moveaxis(moved, -1, 0), -1, self.axis + 1))

    def scale_place(self, place: LanePlace) -> LanePlace:
        """Where in a plane the scales of a piece of blocks belong."""
        assert isinstance(self.format, BlockFormat)
        outer, _, inner = place.rows_shape
        size = self.format.block_size
        along = slice(place.axis.start // size, -(-place.axis.stop // size))
        return LanePlace(place.outer, along, place.inner, (outer, self.blocks, inner))
