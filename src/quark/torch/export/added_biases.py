"""Biases of layers with few bits are added by a node of their own.

ONNX Runtime rounds the float bias of a quantized layer to steps of activation scale times weight scale. With 8 bits
that is far below what the layer itself rounds; with 4 it is not. Behind an Add, the bias stays what it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from quark.formats.affine import integer_format
from quark.onnx.graph import add_initializer, constant, fresh_name, readers, replace_input
from quark.plan import AffineChoice, QuantizationPlan, Reader

_LAYERS = ("Conv", "ConvTranspose", "Gemm")
_ENOUGH_BITS = 8


def add_biases_apart(model: ir.Model, plan: QuantizationPlan) -> dict[ir.Value, ir.Value]:
    """Split the biases off, in place; the tensor behind keeps its name, so that the plan still fits. The values that
    were the results of layers, with those that are now."""
    moved: dict[ir.Value, ir.Value] = {}
    read = {reader: each.choice for each in plan for reader in each.readers}
    for node in list(model.graph):
        choices = [read.get(Reader(str(node.name), index)) for index in range(3)]
        if node.op_type in _LAYERS and _has_few_bits(choices[:2]) and choices[2] is None:
            result = node.outputs[0]
            moved[result] = _split(model, node)
    return moved


def _has_few_bits(operands: Sequence[object]) -> bool:
    integers = [each for each in operands if isinstance(each, AffineChoice)]
    return len(integers) == 2 and any(integer_format(each.format).bits < _ENOUGH_BITS for each in integers)


def _split(model: ir.Model, node: ir.Node) -> ir.Value:
    """What the layer gave with its bias; the same value where it has none that is a constant."""
    bias = constant(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
    result = node.outputs[0]
    if bias is None or bias.ndim != 1:
        return result
    rank = 2 if node.op_type == "Gemm" else len(result.shape or ()) or 4
    shape = (1, -1) if rank == 2 else (1, -1, *[1] * (rank - 2))
    spread = add_initializer(model, fresh_name(model, f"{node.name}_bias"), np.ascontiguousarray(bias.reshape(shape)))
    name = str(result.name)
    following = readers(result)
    added = ir.node("Add", [result, spread], name=fresh_name(model, f"{node.name}/Add"))
    total = added.outputs[0]
    result.name = fresh_name(model, f"{name}_sum")
    total.name, total.shape, total.type = name, result.shape, result.type
    for reader, index in following:
        replace_input(reader, index, total)
    for index, output in enumerate(model.graph.outputs):
        if output is result:
            model.graph.outputs[index] = total
    node.resize_inputs(2)
    model.graph.insert_after(node, added)
    return total
