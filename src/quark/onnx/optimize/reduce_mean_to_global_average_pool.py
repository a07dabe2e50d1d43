"""Turn a mean over all spatial axes into GlobalAveragePool.

    ReduceMean(x, axes=[2, 3 ...], keepdims=1)   becomes   GlobalAveragePool(x)
    ReduceMean(x, axes=[2, 3 ...], keepdims=0)   becomes   Flatten(GlobalAveragePool(x))

which runtimes have as an integer kernel. Applies to float tensors of known rank, when the axes are all those from the
third on.
"""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from quark.onnx.graph import add_node, attribute, become, input_value, is_float, nodes, rank
from quark.onnx.optimize.rewrite import reduction_axes


class ReduceMeanToGlobalAveragePool:
    name: ClassVar[str] = "reduce_mean_to_global_average_pool"
    is_default: ClassVar[bool] = True

    def apply(self, model: ir.Model) -> int:
        return sum(_convert(model, node) for node in nodes(model) if node.op_type == "ReduceMean" and not node.domain)


def _convert(model: ir.Model, mean: ir.Node) -> bool:
    value = input_value(mean, 0)
    size = rank(value)
    if value is None or not is_float(value) or size is None or size < 3:
        return False
    if reduction_axes(model, mean) != list(range(2, size)):
        return False
    if attribute(mean, "keepdims", 1):
        become(mean, "GlobalAveragePool", [value])
        return True
    pool = add_node(model, "GlobalAveragePool", [value], before=mean, name=f"{mean.name}_pool")
    assert value.shape is not None
    pool.outputs[0].shape = ir.Shape([*value.shape[:2], *[1] * (size - 2)])
    become(mean, "Flatten", [pool.outputs[0]], {"axis": 1})
    return True
