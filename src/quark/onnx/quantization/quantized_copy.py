"""A network that computes what the quantized one does, with constants that can still change: activations have their
quantizers, weights and biases are plain numbers, rounded."""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.graph import constant, input_value, set_constant
from quark.onnx.insert import InsertOptions, insert
from quark.plan import DynamicChoice, QuantizationPlan, Role
from quark.rounded import rounded


def quantized_copy(model: ir.Model, plan: QuantizationPlan) -> ir.Model:
    """The model is not touched. What is quantized at run time stays float."""
    copy = model.clone()
    known = tuple(each for each in plan if not isinstance(each.choice, DynamicChoice))
    insert(copy, QuantizationPlan(tuple(each for each in known if each.role is Role.ACTIVATION)), InsertOptions())
    nodes = {str(node.name): node for node in copy.graph}
    for each in known:
        for reader in each.readers:
            node = nodes.get(reader.node)
            values = None if node is None else constant(input_value(node, reader.index))
            if node is not None and values is not None:
                set_constant(copy, node, reader.index, rounded(values, each.choice).astype(values.dtype))
    return copy
