"""Scales that follow a weight while it is trained: found anew from its extremes at every step, on its own device.

    symmetric       scale = 2 max|w| / (qmax - qmin)          codes are even about zero: int8 uses -127..127
    asymmetric      scale = (high - low) / (qmax - qmin)      of the range with zero in it
    power of two    the smallest at which no element is clipped by more than rounding

In float32 and without waiting for the device. Which elements are extreme changes rarely, so that the scale does too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quark.formats.affine import find_ranges
from quark.formats.spec import IntFormat


@dataclass(frozen=True)
class FollowedRange:
    """How to find the scale of codes of that format."""

    format: IntFormat
    is_symmetric: bool
    is_power_of_two: bool = False

    def parameters(
        self, x: torch.Tensor, axis: int | None, group_size: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, zero_point) of the whole, of each channel of the axis, or of each group along it."""
        lowest, highest = find_ranges(x, axis, group_size)
        low, high = lowest.clamp(max=0.0), highest.clamp(min=0.0)
        if self.is_power_of_two:
            return self._power_of_two(low, high)
        tiny = torch.finfo(low.dtype).tiny
        qmin, qmax = self.format.qmin, self.format.qmax
        if self.is_symmetric:
            even = -qmax if self.format.signed else qmin
            scale = 2 * torch.maximum(-low, high) / (qmax - even)
            middle = round((even + qmax) / 2)
            return torch.where(scale < tiny, 1.0, scale), torch.full_like(scale, middle)
        scale = (high - low) / (qmax - qmin)
        scale = torch.where(scale < tiny, 1.0, scale)
        return scale, torch.round(qmin - low / scale).clamp(qmin, qmax)

    def _power_of_two(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = 1 << (self.format.bits - 1)
        wanted = torch.maximum(-low / (half + 0.5), high / (half - 0.5))
        fraction, exponent = torch.frexp(wanted)
        whole = torch.where(fraction == 0.5, exponent - 1, exponent)
        scale = torch.where(wanted > 0, torch.ldexp(torch.ones_like(wanted), whole), 1.0)
        return scale, torch.full_like(scale, 0 if self.format.signed else half)
