"""The quantized form of a linear layer, and its weight rounded to nearest.

A `QuantizedLinear` computes with float numbers that lie on the grid of the quantized type, as the runtime that reads
the saved file will. Its weight stays a tensor of the model's type; with the scale and the zero point beside it, codes
follow from it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.decide.scales import ChannelAxis, choice_of_weight
from quark.decide.searched_scales import has_searchable_blocks, searched, searched_powers
from quark.decide.specs import AffineSpec, BlockSpec, DynamicSpec, FloatSpec, TensorSpec
from quark.decide.view import ArrayConstant
from quark.errors import UnsupportedOptionError
from quark.formats.affine import AffineParameters, dequantize_affine, quantize_affine
from quark.formats.quantize import quantize_dequantize
from quark.plan import AffineChoice, BlockChoice, Choice, FloatChoice
from quark.ranges import MinMax
from quark.rounded import parameters_of, rounded
from quark.torch.language.float8 import codes_of, scale_of, values_of

_ENOUGH_BITS = 8  # at which a scale other than that of the range gains next to nothing


@dataclass(frozen=True, eq=False)
class RoundedWeight:
    """Weights [outputs, inputs] on their grid; `parameters` are the scales and zero points of integers, as arrays.
    `scale` is that of 8-bit floats: one, or one for each output."""

    values: torch.Tensor
    parameters: AffineParameters | None = None
    scale: torch.Tensor | None = None


class QuantizedLinear(nn.Module):
    """A linear layer with a rounded weight, and quantizers for what it reads and what it returns, where asked for.

    `rotation` turns inputs before they are quantized (features/rotation); `low_rank` is a pair of float matrices
    [rank, inputs] and [outputs, rank] that adds what rounding lost (features/low_rank).
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    weight_scale: torch.Tensor | None
    weight_zero_point: torch.Tensor | None

    def __init__(self, linear: nn.Linear, spec: TensorSpec | None, weight: RoundedWeight) -> None:
        """`spec` is that of the weight; None for one that stays as it is."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.spec = spec
        like = linear.weight
        self.weight = nn.Parameter(weight.values.to(like.device, like.dtype), requires_grad=False)
        self.register_parameter("bias", None if linear.bias is None else nn.Parameter(linear.bias.detach(), False))
        parameters = weight.parameters
        arrays = (None, None) if parameters is None else (parameters.scale, parameters.zero_point)
        for name, array in zip(("weight_scale", "weight_zero_point"), arrays, strict=True):
            buffer = None if array is None else torch.as_tensor(np.asarray(array)).to(like.device)
            self.register_buffer(name, buffer, persistent=False)
        if weight.scale is not None:
            self.weight_scale = weight.scale.to(like.device)
        self.input_quantizer: nn.Module | None = None
        self.output_quantizer: nn.Module | None = None
        self.rotation: nn.Module | None = None
        self.low_rank: nn.ParameterList | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rotation is not None:
            x = self.rotation(x)
        seen = x if self.input_quantizer is None else self.input_quantizer(x)
        result = nn.functional.linear(seen, self.weight, self.bias)
        if self.low_rank is not None:
            down, up = self.low_rank
            result = result + nn.functional.linear(nn.functional.linear(x, down), up)
        return result if self.output_quantizer is None else self.output_quantizer(result)

    def parameters_of_weight(self) -> AffineParameters | None:
        """Scale and zero point of integers as numpy arrays; None for other types."""
        if not isinstance(self.spec, AffineSpec):
            return None
        assert self.weight_scale is not None
        assert self.weight_zero_point is not None
        scale, zero_point = (parameter.cpu().numpy() for parameter in (self.weight_scale, self.weight_zero_point))
        axis, group_size = granularity(self.spec)
        return AffineParameters(scale, zero_point, self.spec.integer, axis, group_size)

    def codes(self) -> Any:
        """The integer codes of the weight [outputs, inputs]; only for weights of integers."""
        parameters = self.parameters_of_weight()
        if parameters is None:
            raise UnsupportedOptionError(f"weights of {self.spec}: only integers have codes")
        return quantize_affine(self.weight.detach().float().cpu().numpy(), parameters)

    def weight_choice(self) -> Choice | None:
        """The choice for the weight, as an entry of a plan; None if it stays as it is."""
        if self.spec is None:
            return None
        if isinstance(self.spec, FloatSpec) and self.spec.is_eight_bits:
            raise UnsupportedOptionError(f"weights of {self.spec.format}: plans have no such scales; save safetensors")
        parameters = self.parameters_of_weight()
        if parameters is None:
            return choice_without_scales(self.spec)
        scales = tuple(map(float, np.asarray(parameters.scale).ravel()))
        zero_points = tuple(map(int, np.asarray(parameters.zero_point).ravel()))
        assert isinstance(self.spec, AffineSpec)
        return AffineChoice(self.spec.format, scales, zero_points, parameters.axis, parameters.group_size)

    def extra_repr(self) -> str:
        kind = "float" if self.spec is None else self.spec.format
        return f"in_features={self.in_features}, out_features={self.out_features}, weight={kind}"


def has_open_scales(spec: TensorSpec) -> bool:
    """True for blocks of few bits whose scales `round_to_nearest` may choose by the importance of inputs."""
    if not isinstance(spec, BlockSpec) or not spec.is_rule_open:
        return False
    fmt = spec.quantizer.format
    return has_searchable_blocks(fmt) and fmt.element.bits < _ENOUGH_BITS


def round_to_nearest(weight: torch.Tensor, spec: TensorSpec, importance: Any = None) -> RoundedWeight:
    """The weight [outputs, inputs] rounded to the nearest numbers of the type. `importance` says what a squared error
    in the weights of each input costs, for specs with open scales."""
    values = weight.detach().float().cpu().contiguous().numpy()
    if isinstance(spec, AffineSpec):
        return on_grid(values, grid_of(values, spec))
    if isinstance(spec, FloatSpec) and spec.is_eight_bits:
        wide = weight.detach().float()
        magnitude = wide.abs().amax(1, keepdim=True) if spec.is_per_channel else wide.abs().amax()
        scale = scale_of(magnitude, spec.format)
        return RoundedWeight(values_of(codes_of(wide, scale, spec.format), scale), scale=scale)
    choice = choice_without_scales(spec)
    if importance is not None:
        assert isinstance(choice, BlockChoice), spec
        powers = searched_powers(values.astype(np.float64), importance, choice.quantizer)
        steps = quantize_dequantize((values / powers).astype(np.float32), choice.quantizer.format.element)
        values = (steps * powers).astype(np.float32)  # which the rule's own scale leaves as they are
    return RoundedWeight(torch.from_numpy(np.asarray(rounded(values, choice))))


def on_grid(values: Any, parameters: AffineParameters) -> RoundedWeight:
    """The values [outputs, inputs], rounded to the nearest codes of these scales."""
    codes = quantize_affine(np.asarray(values, np.float32), parameters)
    return RoundedWeight(torch.from_numpy(np.asarray(dequantize_affine(codes, parameters))), parameters)


def grid_of(values: Any, spec: AffineSpec) -> AffineParameters:
    """Scales and zero points for weights [outputs, inputs], by the spec's method. Where that looks at extremes only,
    and codes are few, other scales are tried, and those with the least squared error are taken."""
    choice = affine_choice(values, spec)
    if can_search(spec) and spec.integer.bits < _ENOUGH_BITS:
        choice = searched(choice, np.asarray(values, np.float32))
    return parameters_of(choice, values.shape)


def affine_choice(values: Any, spec: AffineSpec) -> AffineChoice:
    """The scales and zero points of ranges, by the spec's method, as an entry of a plan."""
    axis, group_size = granularity(spec)
    channels = None if axis is None else ChannelAxis(axis, group_size)
    return choice_of_weight(spec, ArrayConstant(np.asarray(values, np.float32)), channels)


def can_search(spec: AffineSpec) -> bool:
    """True if any scale will do, and only the middle code of signed integers is fixed."""
    is_free = spec.integer.signed or not spec.is_symmetric
    return (
        is_free and not spec.has_one_scale and not spec.is_power_of_two and spec.method == MinMax() and spec.axis != 1
    )


def granularity(spec: AffineSpec) -> tuple[int | None, int | None]:
    """The axis and the group size of scales: groups lie along the inputs, channels are outputs."""
    if spec.group_size is not None:
        return 1, spec.group_size
    return (0 if spec.axis is None else spec.axis % 2, None) if spec.is_per_channel else (None, None)


def choice_without_scales(spec: TensorSpec) -> Choice:
    """The rounding of weights [outputs, inputs] of a type without scales to choose."""
    if isinstance(spec, BlockSpec):
        return BlockChoice(spec.quantizer, 1, spec.to_bfloat16_first)
    if isinstance(spec, FloatSpec):
        return FloatChoice(spec.format, spec.is_saturating)
    assert isinstance(spec, DynamicSpec)
    raise UnsupportedOptionError("a weight with is_dynamic: it is known beforehand; use is_dynamic=False")
