"""Round the bounds of Clip to the integers from -128 to 127 that the NPU has for them; a missing bound becomes the
outermost of these.

Applies to constant bounds. Off unless asked for: it turns Clip(0, 0.5) into Clip(0, 0).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from quark.npu import clip_bound
from quark.onnx.graph import constant, input_value, is_float, set_constant

_OUTERMOST = {1: -128.0, 2: 127.0}


class Clip:
    name: ClassVar[str] = "clip"
    is_default: ClassVar[bool] = False
    op_types: ClassVar[tuple[str, ...]] = ("Clip",)

    def apply(self, model: ir.Model, node: ir.Node) -> bool:
        value = input_value(node, 0)
        if value is None or not is_float(value) or not all(_is_known(node, index) for index in _OUTERMOST):
            return False
        dtype = np.float32 if value.dtype is None else value.dtype.numpy()
        return sum(_round(model, node, index, dtype) for index in _OUTERMOST) > 0


def _is_known(node: ir.Node, index: int) -> bool:
    bound = input_value(node, index)
    array = constant(bound)
    return bound is None or (array is not None and array.size == 1 and not np.isnan(array).any())


def _round(model: ir.Model, node: ir.Node, index: int, dtype: np.dtype[np.generic] | type) -> bool:
    array = constant(input_value(node, index))
    before = None if array is None else float(array.reshape(()))
    after = _OUTERMOST[index] if before is None else clip_bound(before)
    if before != after:
        set_constant(model, node, index, np.array(after).astype(dtype), f"{node.name}_bound")
    return before != after
