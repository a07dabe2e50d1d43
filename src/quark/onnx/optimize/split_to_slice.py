"""Turn a Split into one Slice for each of its outputs.

    Split(x) into sizes s0, s1 ...   becomes   x[0 : s0], x[s0 : s0 + s1] ...   along its axis

for hardware that has no Split. Applies when the sizes are known: given as a constant, or equal parts of a known size.
Only when asked for.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import (
    add_initializer,
    add_node,
    attribute,
    dimensions,
    input_value,
    nodes,
    remove_node,
    replace_value,
)
from quark.onnx.optimize.rewrite import integers


class SplitToSlice:
    name: ClassVar[str] = "split_to_slice"
    is_default: ClassVar[bool] = False

    def apply(self, model: ir.Model) -> int:
        return sum(_convert(model, node) for node in nodes(model) if node.op_type == "Split" and not node.domain)


def _convert(model: ir.Model, split: ir.Node) -> bool:
    sizes = _sizes(split)
    if sizes is None or len(sizes) != len(split.outputs):
        return False
    axis = add_initializer(model, f"{split.name}_axis", np.array([attribute(split, "axis", 0)], np.int64))
    bounds = np.cumsum([0, *sizes])
    for index, output in enumerate(split.outputs):
        start, end = (
            add_initializer(model, f"{split.name}_{what}", np.array([bounds[index + more]], np.int64))
            for what, more in (("start", 0), ("end", 1))
        )
        inputs = [input_value(split, 0), start, end, axis]
        part = add_node(model, "Slice", inputs, before=split, name=f"{split.name}_slice")
        replace_value(output, part.outputs[0])
    remove_node(split)
    return True


def _sizes(split: ir.Node) -> list[int] | None:
    if input_value(split, 1) is not None:
        return integers(input_value(split, 1))
    dims, axis, count = dimensions(input_value(split, 0)), attribute(split, "axis", 0), len(split.outputs)
    size = dims[axis] if dims is not None else None
    if size is None:
        return None
    part = -(-size // count)  # since opset 18 the last part may be smaller
    return [part] * (count - 1) + [size - part * (count - 1)]
