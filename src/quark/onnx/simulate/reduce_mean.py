"""Multiply the mean along axes by what the NPU's division is off; see `quark.npu.factors`.

Applies where the axes are given, and their sizes are known beforehand.
"""

from __future__ import annotations

import math
from typing import ClassVar

import onnx_ir as ir

from quark.npu import mean_factor
from quark.onnx.graph import attribute, constant, dimensions, input_value
from quark.onnx.simulate.substitution import scale_output


class ReduceMean:
    name: ClassVar[str] = "reduce_mean"
    is_default: ClassVar[bool] = True
    op_types: ClassVar[tuple[str, ...]] = ("ReduceMean",)

    def apply(self, model: ir.Model, node: ir.Node) -> bool:
        axes, sizes = _axes(node), dimensions(input_value(node, 0)) or ()
        if not axes or any(not -len(sizes) <= axis < len(sizes) for axis in axes):
            return False
        counts = [sizes[axis] for axis in axes]
        known = [count for count in counts if count is not None and count > 0]
        return len(known) == len(counts) and scale_output(model, node, mean_factor(math.prod(known)))


def _axes(node: ir.Node) -> list[int]:
    """An attribute before opset 18, an input since."""
    given = attribute(node, "axes")
    if given is None:
        array = constant(input_value(node, 1))
        given = () if array is None else array.reshape(-1)
    return [int(axis) for axis in given]
