"""How the choices of a plan round, as torch functions that training calls at every iteration, and their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.formats.arrays import array_kind
from quark.formats.catalog import get_format
from quark.formats.granularity import Granularity
from quark.formats.neighbours import affine_neighbours, block_neighbours, element_neighbours
from quark.formats.quantize import quantize_dequantize
from quark.plan import AffineChoice, BlockChoice, Choice, FloatChoice
from quark.rounded import parameters_of

Array = NDArray[Any]


class Quantizer(Protocol):
    """`values` are what the quantized network computes with; `passes` says where the gradient of them goes through, and
    is None where it does everywhere."""

    def values(self, x: torch.Tensor) -> torch.Tensor: ...

    def passes(self, x: torch.Tensor) -> torch.Tensor | None: ...


def quantizer_of(choice: Choice, shape: tuple[int, ...], device: torch.device) -> Quantizer:
    """The quantizer of tensors of that shape."""
    if isinstance(choice, AffineChoice):
        return _affine(choice, shape, device)
    if isinstance(choice, BlockChoice):
        return _Blocks(choice)
    if isinstance(choice, FloatChoice):
        return _Floats(choice)
    raise InvalidValueError(f"{choice}: its scale is not known before run time")


class _Affine:
    """Integer codes with fixed scales."""

    def __init__(self, scale: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor) -> None:
        self._scale, self._lowest, self._highest = scale, lowest, highest

    def values(self, x: torch.Tensor) -> torch.Tensor:
        levels = (x / self._scale).round_()
        return levels.clamp_(self._lowest, self._highest).mul_(self._scale)

    def passes(self, x: torch.Tensor) -> torch.Tensor | None:
        levels = (x / self._scale).round_()
        return (levels >= self._lowest) & (levels <= self._highest)


def _affine(choice: AffineChoice, shape: tuple[int, ...], device: torch.device) -> _Affine:
    parameters = parameters_of(choice, shape)
    kind = array_kind(parameters.scale)
    spread = Granularity(choice.axis, choice.group_size).spread
    scale = np.asarray(spread(kind, parameters.scale, shape), np.float32)
    zero_point = np.asarray(spread(kind, parameters.zero_point, shape), np.float32)
    fmt = parameters.format
    limits = np.float32(fmt.qmin) - zero_point, np.float32(fmt.qmax) - zero_point
    return _Affine(*(torch.from_numpy(np.array(each)).to(device) for each in (scale, *limits)))


@dataclass(frozen=True)
class _Blocks:
    """Blocks whose scales follow the values."""

    choice: BlockChoice

    def values(self, x: torch.Tensor) -> torch.Tensor:
        quantizer = self.choice.quantizer
        wide = quantize_dequantize(x, "bfloat16") if self.choice.to_bfloat16_first else x
        rounded: torch.Tensor = quantize_dequantize(
            wide.contiguous(),
            quantizer.format,
            self.choice.axis if x.dim() > 1 else 0,
            scale_rule=quantizer.scale_rule,
            rounding=quantizer.rounding,
            nonfinite=quantizer.nonfinite,
        )
        return rounded

    def passes(self, x: torch.Tensor) -> torch.Tensor | None:
        return None


@dataclass(frozen=True)
class _Floats:
    choice: FloatChoice

    def values(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x / self.choice.scale
        if self.choice.format == "float16":
            highest = float(get_format("float16").max)
            return scaled.clamp_(-highest, highest).to(torch.float16).to(x.dtype) * self.choice.scale
        rounded: torch.Tensor = quantize_dequantize(scaled, self.choice.format)
        return rounded * self.choice.scale

    def passes(self, x: torch.Tensor) -> torch.Tensor | None:
        return None


def neighbours(array: Array, choice: Choice) -> tuple[Array, Array]:
    """The two numbers that each weight can be rounded to, in float32."""
    wide = np.ascontiguousarray(array, np.float32)
    if isinstance(choice, AffineChoice):
        return affine_neighbours(wide, parameters_of(choice, wide.shape))
    if isinstance(choice, BlockChoice):
        if choice.to_bfloat16_first:
            wide = np.asarray(quantize_dequantize(wide, "bfloat16"))
        return block_neighbours(wide, choice.axis if wide.ndim > 1 else 0, choice.quantizer)
    if isinstance(choice, FloatChoice):
        fmt: Any = get_format(choice.format)
        lower, upper = element_neighbours(wide / np.float32(choice.scale), fmt)
        return lower * np.float32(choice.scale), upper * np.float32(choice.scale)
    raise InvalidValueError(f"{choice}: its scale is not known before run time")
