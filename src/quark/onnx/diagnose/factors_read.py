"""The factors of what a node reads: those of a tensor before it, through what passes channels on."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.diagnose.operands import is_quantizer
from quark.onnx.diagnose.rescaling import Factors
from quark.onnx.graph import constant, input_value

PASSING = frozenset(
    {"Add", "Sub", "Sum", "Max", "Min", "Relu", "Clip", "LeakyRelu", "PRelu", "MaxPool", "AveragePool"}
    | {"GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "Pad", "Resize", "Flatten", "Reshape", "Squeeze"}
    | {"Identity", "Dropout"}
)
_DEPTH = 16


def read_factors(value: ir.Value, known: Factors) -> NDArray[Any] | None:
    """None where there are none. A Mul by a constant for each channel counts: SmoothQuant puts some in."""
    gained: NDArray[Any] | None = None
    for _ in range(_DEPTH):
        node = value.producer()
        if node is None or value.name in known:
            break
        scale = _constant_factor(node)
        if scale is not None:
            gained = scale if gained is None else gained * scale
        elif not (is_quantizer(node) or node.op_type in PASSING):
            break
        before = next((each for each in node.inputs if each is not None and constant(each) is None), None)
        if before is None:
            break
        value = before
    found = known.get(str(value.name))
    if gained is None or found is None or found.size != gained.size:
        return found if gained is None else gained
    return np.asarray(found * gained)


def _constant_factor(node: ir.Node) -> NDArray[Any] | None:
    """What a Mul multiplies the channels with."""
    if node.op_type != "Mul":
        return None
    held = [each for each in (constant(input_value(node, 0)), constant(input_value(node, 1))) if each is not None]
    is_vector = len(held) == 1 and held[0].size > 1 and held[0].size == max(held[0].shape)
    return held[0].reshape(-1).astype(np.float64) if is_vector and (held[0] > 0).all() else None
