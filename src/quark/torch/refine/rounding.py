"""The numbers that a choice of the plan keeps of a tensor, on the tensor's own device."""

from __future__ import annotations

import torch

from quark.formats.affine import AffineParameters, code_dtype, integer_format, quantize_dequantize_affine
from quark.formats.arrays import array_kind
from quark.formats.granularity import Granularity
from quark.formats.quantize import quantize_dequantize
from quark.plan import AffineChoice, BlockChoice, Choice, DynamicChoice, FloatChoice


def kept(x: torch.Tensor, choice: Choice | None) -> torch.Tensor:
    """x as the quantized network sees it; as it is where its scale is only known at run time, or there is no choice."""
    if choice is None or isinstance(choice, DynamicChoice):
        return x
    values = x.detach()
    result: torch.Tensor
    if isinstance(choice, AffineChoice):
        result = quantize_dequantize_affine(values, _parameters(choice, values))
    elif isinstance(choice, FloatChoice):
        result = quantize_dequantize(values / choice.scale, choice.format) * choice.scale
    else:
        result = _blocks(values, choice)
    return result


def _parameters(choice: AffineChoice, like: torch.Tensor) -> AffineParameters:
    fmt = integer_format(choice.format)
    shape = Granularity(choice.axis, choice.group_size).parameter_shape(tuple(like.shape))
    scale = torch.tensor(choice.scale, dtype=torch.float32, device=like.device).reshape(shape)
    codes = code_dtype(array_kind(scale), fmt)
    zero_point = torch.tensor(choice.zero_point, dtype=codes, device=like.device).reshape(shape)
    return AffineParameters(scale, zero_point, fmt, choice.axis, choice.group_size)


def _blocks(x: torch.Tensor, choice: BlockChoice) -> torch.Tensor:
    quantizer = choice.quantizer
    wide = quantize_dequantize(x, "bfloat16") if choice.to_bfloat16_first else x
    result: torch.Tensor = quantize_dequantize(
        wide,
        quantizer.format,
        choice.axis if x.dim() > 1 else 0,
        scale_rule=quantizer.scale_rule,
        rounding=quantizer.rounding,
        nonfinite=quantizer.nonfinite,
    )
    return result
