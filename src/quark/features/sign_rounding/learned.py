"""Weights whose rounding is learned.

    integers    codes = round(w / scale + v) + zero point      |v| <= 1/2; the range that gives the scale is clipped
    blocks      round(w + v d), d being the spacing of numbers around w; the scale stays that of the block

Both start as rounding to nearest. Gradients pass the rounding unchanged (Cheng et al., SignRound, 2023).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from quark.decide.specs import AffineSpec, BlockSpec, TensorSpec
from quark.formats.affine import AffineParameters
from quark.formats.arrays import array_kind
from quark.formats.quantize import quantize_dequantize
from quark.plan import BlockChoice
from quark.rounded import block_values
from quark.torch.language.linear import RoundedWeight, choice_without_scales, grid_of

LEAST_CLIP = 0.5  # lower bound of a clip, as a share of the range


class LearnedWeight(nn.Module):
    """The rounded weight as a function of offsets, and of shares of the range."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("exact", weight.detach().float())
        self.offsets = nn.Parameter(torch.zeros_like(weight, dtype=torch.float32))

    exact: torch.Tensor

    @property
    def clips(self) -> list[nn.Parameter]:
        """The parameters that clip ranges."""
        return []

    def limit(self) -> None:
        """Keep the parameters within their bounds, in place."""
        with torch.no_grad():
            self.offsets.clamp_(-0.5, 0.5)
            for clip in self.clips:
                clip.clamp_(LEAST_CLIP, 1.0)

    def result(self) -> RoundedWeight:
        """The learned weight with its scales and zero points."""
        raise NotImplementedError


class LearnedIntegers(LearnedWeight):
    """Integers, with a scale for the tensor, each output or each group."""

    def __init__(self, weight: torch.Tensor, spec: AffineSpec, *, has_clipping: bool) -> None:
        super().__init__(weight)
        values = self.exact.cpu().numpy()
        self.parameters_at_start = grid_of(values, spec)
        self.is_symmetric = spec.is_symmetric
        parameters = self.parameters_at_start
        self.codes = (parameters.format.qmin, parameters.format.qmax)
        scale, zero_point = (
            torch.as_tensor(np.asarray(parameter, np.float32))
            for parameter in (parameters.scale, parameters.zero_point)
        )
        self.register_buffer("scale", scale.to(weight.device))
        self.register_buffer("zero_point", zero_point.to(weight.device))
        shares = () if not has_clipping or spec.is_power_of_two else (None,) if self.is_symmetric else (None, None)
        self.shares = nn.ParameterList(nn.Parameter(torch.ones_like(self.scale)) for _ in shares)

    scale: torch.Tensor
    zero_point: torch.Tensor

    @property
    def clips(self) -> list[nn.Parameter]:
        """The shares of the highest, and of the lowest end."""
        return list(self.shares)

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point."""
        if not len(self.shares):
            return self.scale, self.zero_point
        if self.is_symmetric:
            return self.scale * self.shares[0], self.zero_point
        lowest, highest = self.codes
        high = (highest - self.zero_point) * self.scale * self.shares[0]
        low = (lowest - self.zero_point) * self.scale * self.shares[1]
        scale = ((high - low) / (highest - lowest)).clamp_min(torch.finfo(torch.float32).tiny)
        return scale, passing(torch.round, lowest - low / scale).clamp(lowest, highest)

    def forward(self) -> torch.Tensor:
        scale, zero_point = self._spread(self.scales())
        codes = passing(torch.round, self.exact / scale + self.offsets) + zero_point
        return (codes.clamp(*self.codes) - zero_point) * scale

    def result(self) -> RoundedWeight:
        with torch.no_grad():
            scale, zero_point = self.scales()
            zero_point = zero_point.round()  # with gradients passed through, it is an integer but for the last bit
            wide, zero = self._spread((scale, zero_point))
            codes = ((self.exact / wide + self.offsets).round() + zero).clamp(*self.codes)
            like = self.parameters_at_start
            arrays = (scale.cpu().numpy(), zero_point.cpu().numpy().astype(np.asarray(like.zero_point).dtype))
            parameters = AffineParameters(*arrays, like.format, like.axis, like.group_size)
            return RoundedWeight((codes - zero) * wide, parameters)

    def _spread(self, parameters: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        start, shape = self.parameters_at_start, tuple(self.exact.shape)
        return [start.granularity.spread(array_kind(parameter), parameter, shape) for parameter in parameters]


class LearnedBlocks(LearnedWeight):
    """Blocks that share a power of two."""

    def __init__(self, weight: torch.Tensor, spec: BlockSpec) -> None:
        super().__init__(weight)
        choice = choice_without_scales(spec)
        assert isinstance(choice, BlockChoice)
        self.choice = choice
        step = torch.from_numpy(_spacings(self.exact.cpu().numpy(), choice))
        self.register_buffer("spacing", step.to(weight.device))

    spacing: torch.Tensor

    def forward(self) -> torch.Tensor:
        return passing(self._rounded, self.exact + self.offsets * self.spacing)

    def result(self) -> RoundedWeight:
        with torch.no_grad():
            return RoundedWeight(self())

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        quantizer = self.choice.quantizer
        wide = quantize_dequantize(values, "bfloat16") if self.choice.to_bfloat16_first else values
        rounded = quantize_dequantize(
            wide,
            quantizer.format,
            1,
            scale_rule=quantizer.scale_rule,
            rounding=quantizer.rounding,
            nonfinite=quantizer.nonfinite,
            tensor_scale=quantizer.tensor_scale,
        )
        assert isinstance(rounded, torch.Tensor)
        return rounded


def learned_weight(weight: torch.Tensor, spec: TensorSpec, *, has_clipping: bool) -> LearnedWeight | None:
    """The weight [outputs, inputs] with a rounding that can be learned; None if its type has none."""
    if isinstance(spec, AffineSpec):
        return LearnedIntegers(weight, spec, has_clipping=has_clipping)
    return LearnedBlocks(weight, spec) if isinstance(spec, BlockSpec) else None


def passing(function: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """A function whose gradient is taken to be 1."""
    return values + (function(values) - values).detach()


def _spacings(values: np.ndarray, choice: BlockChoice) -> np.ndarray:
    """The distance between the format's numbers around each value."""
    grid = choice.quantizer.format.element.grid
    size = choice.quantizer.format.block_size
    near = np.abs(block_values(values, choice))
    outputs, columns = values.shape
    blocks = np.pad(near, [(0, 0), (0, -columns % size)]).reshape(outputs, -1, size)
    largest = blocks.max(axis=2, keepdims=True)
    top = np.floor(np.log2(np.where(largest > 0, largest, 1.0)))
    own = np.floor(np.log2(np.where(blocks > 0, blocks, 2.0**-126)))
    depth = grid.max_exponent - grid.min_exponent  # binades with a spacing of their own
    spacing = np.exp2(np.maximum(own, top - depth) - grid.mantissa_bits)
    spacing = np.where(largest > 0, spacing, 0.0)
    return np.asarray(spacing.reshape(outputs, -1)[:, :columns], np.float32)
