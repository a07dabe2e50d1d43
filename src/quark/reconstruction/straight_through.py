"""Rounding whose gradient is that of doing nothing, but for numbers beyond the range, which get none."""

from __future__ import annotations

from typing import Any

import torch

from quark.reconstruction.quantizers import Quantizer


def straight_through(x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """What the quantizer makes of `x`."""
    rounded: torch.Tensor = _Rounding.apply(x, quantizer)  # type: ignore[no-untyped-call]
    return rounded


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
        passes = quantizer.passes(x) if ctx.needs_input_grad[0] else None
        ctx.passes = passes
        return quantizer.values(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return gradient if ctx.passes is None else gradient * ctx.passes, None
