"""Turn a BatchNormalization that stands alone into a depthwise convolution with a kernel of one.

    y[c] = a[c] * x[c] + b[c]   with   a = g / sqrt(v + e),   b = t - m*a

so that hardware which knows convolutions needs nothing else. Applies when the parameters are constants and x is known
to have a channel axis and one to three spatial ones. Only when asked for: elsewhere a Conv is no better.
"""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from quark.onnx.graph import add_initializer, become, constant, input_value, nodes, rank
from quark.onnx.narrowing import in_dtype
from quark.onnx.optimize.fold_batch_norm import affine_of, is_inference_batch_norm


class BatchNormToConv:
    name: ClassVar[str] = "batch_norm_to_conv"
    is_default: ClassVar[bool] = False

    def apply(self, model: ir.Model) -> int:
        return sum(_convert(model, node) for node in nodes(model) if is_inference_batch_norm(node))


def _convert(model: ir.Model, norm: ir.Node) -> bool:
    value, gamma = input_value(norm, 0), constant(input_value(norm, 1))
    spatial = (rank(value) or 0) - 2
    affine = affine_of(norm)
    if affine is None or gamma is None or value is None or spatial not in (1, 2, 3):
        return False
    weight, bias = (in_dtype(each, gamma) for each in affine)
    if weight is None or bias is None or (value.dtype is not None and value.dtype.numpy() != gamma.dtype):
        return False
    channels = int(weight.size)
    kernel = add_initializer(model, f"{norm.name}_weight", weight.reshape(channels, 1, *(1,) * spatial))
    become(
        norm,
        "Conv",
        [value, kernel, add_initializer(model, f"{norm.name}_bias", bias)],
        {"group": channels, "kernel_shape": [1] * spatial},
    )
    return True
