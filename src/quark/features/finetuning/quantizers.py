"""The rounding of a plan's choices, as torch functions that training calls at every iteration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.features.finetuning.problem import Part, WeightLayout
from quark.features.finetuning.training import affine_numbers
from quark.formats.catalog import get_format
from quark.formats.quantize import quantize_dequantize
from quark.ops.fake_quantize import block_fake_quantize
from quark.plan import AffineChoice, BlockChoice, Choice, FloatChoice
from quark.rounded import float_scale

Array = NDArray[Any]


def tensor_of(array: Any, device: torch.device | str) -> torch.Tensor:
    """A copy of the array in float32, on the device."""
    return torch.from_numpy(np.array(array, np.float32)).to(device)


class Quantizer(ABC):
    """Rounds tensors of one shape."""

    @abstractmethod
    def values(self, x: torch.Tensor) -> torch.Tensor:
        """The numbers that the quantized network computes with."""

    def passes(self, x: torch.Tensor) -> torch.Tensor | None:
        """True for numbers whose gradient goes through; None if all do."""
        return None

    def part(self, layout: WeightLayout, part: Part) -> Quantizer:
        """The quantizer of a part of the weights, as matrices [groups, outputs, k]. No block may reach beyond it."""
        return self

    def affine_numbers(self, x: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """Scale, lowest and highest level of each number of x, if they are fixed."""
        return None


def quantizer_of(choice: Choice, shape: tuple[int, ...], device: torch.device) -> Quantizer:
    """The quantizer of tensors of that shape."""
    if isinstance(choice, AffineChoice):
        return _Affine(*(tensor_of(number, device) for number in affine_numbers(choice, shape)))
    if isinstance(choice, BlockChoice):
        return _Blocks(choice)
    if isinstance(choice, FloatChoice):
        return _Floats(choice, tensor_of(float_scale(choice, len(shape)), device))
    raise InvalidValueError(f"{choice}: its scale is not known before run time")


@dataclass(frozen=True, eq=False)
class _Affine(Quantizer):
    """Integer codes with fixed scales."""

    scale: torch.Tensor
    lowest: torch.Tensor
    highest: torch.Tensor

    def values(self, x: torch.Tensor) -> torch.Tensor:
        levels = (x / self.scale).round_()
        return levels.clamp_(self.lowest, self.highest).mul_(self.scale)

    def passes(self, x: torch.Tensor) -> torch.Tensor | None:
        levels = (x / self.scale).round_()
        return (levels >= self.lowest) & (levels <= self.highest)

    def part(self, layout: WeightLayout, part: Part) -> Quantizer:
        numbers = (self.scale, self.lowest, self.highest)
        return _Affine(*(part.of(layout.to_matrices(number.expand(layout.shape))) for number in numbers))

    def affine_numbers(self, x: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        return tuple(number.expand(x.shape).contiguous() for number in (self.scale, self.lowest, self.highest))


@dataclass(frozen=True)
class _Blocks(Quantizer):
    """Blocks whose scales follow the values."""

    choice: BlockChoice

    def values(self, x: torch.Tensor) -> torch.Tensor:
        quantizer = self.choice.quantizer
        wide = quantize_dequantize(x, "bfloat16") if self.choice.to_bfloat16_first else x
        # on a GPU, one kernel, in the memory order of x
        compute = block_fake_quantize if x.device.type == "cuda" else quantize_dequantize
        rounded: torch.Tensor = compute(
            wide if x.device.type == "cuda" else wide.contiguous(),
            quantizer.format,
            self.choice.axis if x.dim() > 1 else 0,
            scale_rule=quantizer.scale_rule,
            rounding=quantizer.rounding,
            nonfinite=quantizer.nonfinite,
            tensor_scale=quantizer.tensor_scale,
        )
        return rounded

    def part(self, layout: WeightLayout, part: Part) -> Quantizer:
        return _BlocksOfMatrices(self, layout.narrowed(part))


@dataclass(frozen=True)
class _BlocksOfMatrices(Quantizer):
    """Blocks lie along an axis of the model's tensor, not of the matrices."""

    blocks: _Blocks
    layout: WeightLayout

    def values(self, x: torch.Tensor) -> torch.Tensor:
        rounded: torch.Tensor = self.layout.to_matrices(self.blocks.values(self.layout.from_matrices(x)))
        return rounded.contiguous()


@dataclass(frozen=True, eq=False)
class _Floats(Quantizer):
    choice: FloatChoice
    scale: torch.Tensor

    def values(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x / self.scale
        if self.choice.format == "float16":
            highest = float(get_format("float16").max)
            return scaled.clamp_(-highest, highest).to(torch.float16).to(x.dtype) * self.scale
        rounded: torch.Tensor = quantize_dequantize(scaled, self.choice.format)
        return rounded * self.scale

    def passes(self, x: torch.Tensor) -> torch.Tensor | None:
        if not self.choice.is_eight_bits:
            return None
        return (x / self.scale).abs() <= float(get_format(self.choice.format).max)

    def part(self, layout: WeightLayout, part: Part) -> Quantizer:
        if self.choice.axis is None:
            return self
        return _Floats(self.choice, part.of(layout.to_matrices(self.scale.expand(layout.shape))))


def rounding_change(weight: torch.Tensor, quantizer: Quantizer) -> float:
    """The RMS of what rounding to the nearest does to a weight."""
    return float((quantizer.values(weight) - weight).square().mean().sqrt())


def straight_through(x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """Round x with the gradient of the identity, except for numbers beyond the range, which get none."""
    rounded: torch.Tensor = _Rounding.apply(x, quantizer)  # type: ignore[no-untyped-call]
    return rounded


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
        ctx.passes = quantizer.passes(x) if ctx.needs_input_grad[0] else None
        return quantizer.values(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return gradient if ctx.passes is None else gradient * ctx.passes, None
