"""The rounding of weights whose scales are known."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.formats.native import NativeColumnRounding, native_column_rounding
from quark.formats.quantize import quantize_dequantize
from quark.formats.spec import ElementFormat, IntFormat

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
        """Compiled code that rounds columns with the scales as they are now; None where there is none, and for many
        small groups, which numpy rounds side by side."""
        if self.zero_point is None or len(self.scale) != 1:
            return None
        assert isinstance(self.element, IntFormat)
        scale, zero_point = (np.ascontiguousarray(each[0].T, np.float64) for each in (self.scale, self.zero_point))
        return native_column_rounding(scale, zero_point, (self.element.qmin, self.element.qmax))
