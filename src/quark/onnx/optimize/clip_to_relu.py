"""Turn a Clip that only cuts off negative numbers into a Relu.

    Clip(x, 0, top) = max(x, 0)   where there is no `top`, or one that no number of the type exceeds

Applies to float tensors with constant bounds.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import become, input_value, is_float, nodes
from quark.onnx.optimize.rewrite import scalar


class ClipToRelu:
    name: ClassVar[str] = "clip_to_relu"
    is_default: ClassVar[bool] = True

    def apply(self, model: ir.Model) -> int:
        count = 0
        for node in nodes(model):
            if node.op_type == "Clip" and not node.domain and _is_relu(node):
                become(node, "Relu", [input_value(node, 0)])
                count += 1
        return count


def _is_relu(clip: ir.Node) -> bool:
    value = input_value(clip, 0)
    if not is_float(value) or scalar(input_value(clip, 1)) != 0:
        return False
    if input_value(clip, 2) is None:
        return True
    top = scalar(input_value(clip, 2))
    return top is not None and top >= _largest(value)


def _largest(value: ir.Value | None) -> float:
    assert value is not None
    if value.dtype == ir.DataType.BFLOAT16:
        return 3.3895313892515355e38
    return float(np.finfo(np.float32 if value.dtype is None else value.dtype.numpy()).max)
