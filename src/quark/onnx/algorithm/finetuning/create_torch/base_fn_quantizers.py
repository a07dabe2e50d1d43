"""The block operators of com.amd.quark as torch modules, by their attributes; gradients pass straight through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quark.ops.fake_quantize import block_fake_quantize
from quark.ops.schema import BFP_QUANTIZE_DEQUANTIZE, MX_QUANTIZE_DEQUANTIZE, quantizer_of

# AMD Quark has its kernels twice, in two binary interfaces, and test suites compare them. There is one here.
custom_torch_ops = custom_torch_ops_gpu = None


def _load_legacy_ops(gpu: bool = False) -> None:
    return None


class BFPQuantizer(torch.nn.Module):
    """BFPQuantizeDequantize with these attributes.

    >>> BFPQuantizer({"bit_width": 13, "axis": -1})(torch.tensor([[1.03, 0.2]]))
    tensor([[1.0000, 0.2500]])
    """

    operator = BFP_QUANTIZE_DEQUANTIZE.name

    def __init__(self, attrs: Mapping[str, Any]) -> None:
        super().__init__()
        self.attributes = dict(attrs)
        self.quantizer, self.axis, self.is_rounded_first = quantizer_of(self.operator, attrs)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the operator rounds it. One number is returned as it is, as AMD Quark does."""
        if tensor.numel() <= 1:
            return tensor
        values = tensor + (tensor.bfloat16().to(tensor.dtype) - tensor).detach() if self.is_rounded_first else tensor
        chosen = self.quantizer
        return block_fake_quantize(
            values,
            chosen.format,
            self.axis if tensor.dim() > 1 else 0,
            scale_rule=chosen.scale_rule,
            rounding=chosen.rounding,
            nonfinite=chosen.nonfinite,
            tensor_scale=chosen.tensor_scale,
        )


class MXQuantizer(BFPQuantizer):
    """MXQuantizeDequantize with these attributes.

    >>> MXQuantizer({"element_dtype": "fp4_e2m1", "axis": -1})(torch.tensor([[0.1, -0.7, 3.3, 6.1]]))
    tensor([[ 0.0000, -0.5000,  3.0000,  6.0000]])
    """

    operator = MX_QUANTIZE_DEQUANTIZE.name
