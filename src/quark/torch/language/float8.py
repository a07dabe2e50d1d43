"""8-bit floats with a scale: values are divided by it, rounded half to even to E4M3 or E5M2, and saturate.

scale = largest magnitude / largest number of the type       448 for E4M3, 57344 for E5M2
"""

from __future__ import annotations

import torch

from quark.decide.specs import FloatSpec
from quark.formats.catalog import get_format
from quark.plan import Choice, FloatChoice, Role
from quark.torch.train.quantizers import Quantizer

TORCH_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def largest(format: str) -> float:
    """The largest number of the type."""
    return float(get_format(format).max)


def scale_of(magnitude: torch.Tensor, format: str) -> torch.Tensor:
    """Scales in float32 at which these magnitudes become the largest number; 1 where there is nothing but zeros."""
    scale = magnitude.float() / largest(format)
    return torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)


def codes_of(values: torch.Tensor, scale: torch.Tensor, format: str) -> torch.Tensor:
    """The values as numbers of torch's 8-bit type."""
    limit = largest(format)
    return (values.float() / scale).clamp(-limit, limit).to(TORCH_TYPES[format])


def values_of(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The numbers that codes stand for, in float32."""
    return codes.float() * scale


class Float8Quantizer(Quantizer):
    """8-bit floats. `scale` is fixed; None: that of the tensor, or of each row (`spec.is_per_channel`), at run time."""

    scale: torch.Tensor | None

    def __init__(self, tensor: str, spec: FloatSpec, scale: float | None) -> None:
        super().__init__(tensor, Role.ACTIVATION)
        self.spec = spec
        self.register_buffer("scale", None if scale is None else torch.tensor(scale, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale
        if scale is None:
            magnitude = x.detach().abs()
            peak = magnitude.amax(-1, keepdim=True) if self.spec.is_per_channel else magnitude.amax()
            scale = scale_of(peak, self.spec.format)
        return values_of(codes_of(x, scale, self.spec.format), scale).to(x.dtype)

    def choice(self) -> Choice:
        """Without a fixed scale, 1 stands for it."""
        return FloatChoice(self.spec.format, True, (1.0 if self.scale is None else float(self.scale),))
