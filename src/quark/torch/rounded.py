"""The quantized values of a tensor, computed on its own device; `quark.rounded` is the same for arrays."""

from __future__ import annotations

import torch

from quark.formats.affine import AffineParameters, Granularity, code_dtype, integer_format, quantize_dequantize_affine
from quark.formats.arrays import array_kind
from quark.formats.catalog import get_format
from quark.formats.quantize import quantize_dequantize
from quark.plan import AffineChoice, Choice, DynamicChoice, FloatChoice
from quark.rounded import float_scale


def rounded(x: torch.Tensor, choice: Choice | None) -> torch.Tensor:
    """Round x as the plan says; it stays as it is without a choice, or if its scale is only known at run time."""
    if choice is None or isinstance(choice, DynamicChoice):
        return x
    values = x.detach()
    result: torch.Tensor
    if isinstance(choice, AffineChoice):
        fmt = integer_format(choice.format)
        shape = Granularity(choice.axis, choice.group_size).parameter_shape(tuple(values.shape))
        scale = torch.tensor(choice.scale, dtype=torch.float32, device=values.device).reshape(shape)
        codes = code_dtype(array_kind(scale), fmt)
        zero_point = torch.tensor(choice.zero_point, dtype=codes, device=values.device).reshape(shape)
        parameters = AffineParameters(scale, zero_point, fmt, choice.axis, choice.group_size)
        result = quantize_dequantize_affine(values, parameters)
    elif isinstance(choice, FloatChoice):
        scale = torch.from_numpy(float_scale(choice, values.dim())).to(values.device)
        scaled = values / scale
        if choice.is_eight_bits:  # Inf saturates
            highest = float(get_format(choice.format).max)
            scaled = scaled.clamp(-highest, highest)
        result = (quantize_dequantize(scaled, choice.format) * scale).to(values.dtype)
    else:
        quantizer = choice.quantizer
        result = quantize_dequantize(
            quantize_dequantize(values, "bfloat16") if choice.to_bfloat16_first else values,
            quantizer.format,
            choice.axis if values.dim() > 1 else 0,
            scale_rule=quantizer.scale_rule,
            rounding=quantizer.rounding,
            nonfinite=quantizer.nonfinite,
            tensor_scale=quantizer.tensor_scale,
        )
    return result
