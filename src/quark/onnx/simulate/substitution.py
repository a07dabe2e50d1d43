"""What a substitution is, and the Mul by which most of them are carried out."""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import add_initializer, add_node, fresh_name


class Substitution(Protocol):
    """A change of operators from what the standard computes to what the NPU does. Small classes, one in a file.

    The names of nodes stay, and so do those of the tensors that others read: what was decided before still fits."""

    name: ClassVar[str]  # the file's
    is_default: ClassVar[bool]
    op_types: ClassVar[tuple[str, ...]]

    def apply(self, model: ir.Model, node: ir.Node) -> bool:
        """Change one node of these types, in place; whether there was something to change."""
        ...


def scale_output(model: ir.Model, node: ir.Node, factor: float) -> bool:
    """Multiply what a node gives by a constant; False where that is 1.

    The Mul writes the name that readers and outputs of the graph know, and the node a new one.
    """
    if factor == 1.0:
        return False
    raw = node.outputs[0]
    dtype = np.float32 if raw.dtype is None else raw.dtype.numpy()
    constant = add_initializer(model, f"{node.name}_npu_factor", np.array(factor).astype(dtype))
    mul = add_node(model, "Mul", [raw, constant], after=node, name=f"{node.name}_npu_mul")
    scaled = mul.outputs[0]
    scaled.type, scaled.shape = raw.type, raw.shape
    raw.replace_all_uses_with(scaled, replace_graph_outputs=True)
    mul.replace_input_with(0, raw)
    name, raw.name = raw.name, fresh_name(model, f"{node.name}_npu_raw")
    scaled.name = name
    return True
