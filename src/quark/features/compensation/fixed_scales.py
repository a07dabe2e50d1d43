"""The rounding of weights whose scales are known, and of those that share a scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.formats.native import (
    NativeBlockRounding,
    NativeColumnRounding,
    native_block_rounding,
    native_column_rounding,
)
from quark.formats.quantize import quantize_dequantize
from quark.formats.spec import ElementFormat, IntFormat
from quark.plan import BlockChoice
from quark.rounded import block_values

Array = NDArray[Any]


class FixedScales:
    """A rounding for which the scale and the zero point of every weight are known.

    `scale` and `zero_point` are [groups, outputs, columns], and can be written to. Without zero points, weights over
    their scale are numbers of the `element` type.
    """

    def __init__(self, scale: Array, zero_point: Array | None, element: ElementFormat) -> None:
        self.scale, self.zero_point, self.element = scale, zero_point, element

    def __call__(self, values: Array, columns: Array) -> Array:
        """See `rounding.Round`."""
        step = self.scale[:, :, columns]
        if self.zero_point is None:
            units = quantize_dequantize((values / step).astype(np.float32), self.element)
            return np.asarray(units.astype(np.float64) * step)
        assert isinstance(self.element, IntFormat)
        zero = self.zero_point[:, :, columns]
        codes = np.clip(np.rint(values / step) + zero, self.element.qmin, self.element.qmax)
        return np.asarray((codes - zero) * step)

    def compiled(self) -> NativeColumnRounding | None:
        """Compiled code that rounds the columns of one group with the scales as they are now; None where there is
        none."""
        if self.zero_point is None:
            return None
        assert isinstance(self.element, IntFormat)
        scale, zero_point = (
            np.ascontiguousarray(parameter[0].T, np.float64) for parameter in (self.scale, self.zero_point)
        )
        return native_column_rounding(scale, zero_point, (self.element.qmin, self.element.qmax))


class SharedScales:
    """The rounding of columns that are one block of a block format, whose scale is that of their values."""

    def __init__(self, choice: BlockChoice) -> None:
        self._choice = replace(choice, axis=-2)

    def __call__(self, values: Array, columns: Array) -> Array:
        """See `rounding.Round`."""
        # blocks across memory, as columns lie there while they are compensated
        lying = np.ascontiguousarray(values.swapaxes(1, 2), np.float32)
        return np.asarray(block_values(lying, self._choice).astype(np.float64).swapaxes(1, 2))

    def compiled(self) -> NativeBlockRounding | None:
        """Compiled code that rounds the columns of a block one after the other; None where there is none, and for
        formats with a scale that depends on the whole tensor."""
        if self._choice.to_bfloat16_first or not self._choice.quantizer.is_fixed:
            return None
        return native_block_rounding(self._choice.quantizer)
