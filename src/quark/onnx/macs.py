"""The number of weights and multiply-accumulates (MACs) of a layer.

Conv            every weight takes part once for each position of the output
ConvTranspose   every weight takes part once for each position of the input
Gemm            every weight once
MatMul          every weight once for each row; of two activations, the width of the first for each output
LSTM, GRU, RNN  every weight, also those of the state, once for each step of each sequence
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from quark.decide.operators import RECURRENT_TYPES
from quark.onnx.graph import infer_shapes, is_constant

PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})

Shapes = Mapping[str, tuple[int, ...]]


def weight_count(node: ir.Node) -> int:
    """The number of elements of the constant weight, and of that of the state; 0 if both operands are activations."""
    weights = node.inputs[1 : 3 if node.op_type in RECURRENT_TYPES else 2]
    known = (weight for weight in weights if weight is not None and is_constant(weight) and weight.shape is not None)
    return sum(math.prod(_sizes(weight.shape, 0) or [0]) for weight in known)


def multiplications(node: ir.Node) -> int | None:
    """The MACs of one sample, by the shapes in the file: the first dimension of an activation counts as 1.

    Returns None if shapes are not known, 0 for operators that sum no products.
    """
    weights, op_type = weight_count(node), node.op_type
    if op_type == "Gemm":
        return weights or None
    left, output = node.inputs[0] if node.inputs else None, node.outputs[0]
    if op_type in ("Conv", "ConvTranspose"):
        value = output if op_type == "Conv" else left
        places = _sizes(value.shape, 2) if value is not None else None
        return None if places is None or not weights else weights * math.prod(places)
    if op_type != "MatMul":
        return 0
    if weights and left is not None and left.shape is not None:
        rows = _sizes(left.shape, 1)
        return None if rows is None else weights * math.prod(rows[:-1])
    width = None if left is None or left.shape is None else left.shape[-1]
    results = _sizes(output.shape, 1)
    return None if results is None or not isinstance(width, int) else width * math.prod(results)


def estimated_macs(model: ir.Model, shapes: Shapes) -> int:
    """The MACs of a sample with inputs of these shapes, as far as shapes can be inferred without running the model; of
    other layers, each weight counts once."""
    nodes = [node for node in model.graph if node.op_type in PRODUCTS]
    if any(multiplications(node) is None for node in nodes):
        sized = model.clone()
        for value in sized.graph.inputs:
            if str(value.name) in shapes:
                value.shape = ir.Shape(shapes[str(value.name)])
        for value in (output for node in sized.graph for output in node.outputs):
            value.shape = None
        infer_shapes(sized)
        nodes = [node for node in sized.graph if node.op_type in PRODUCTS]
    known = ((multiplications(node), weight_count(node)) for node in nodes)
    return sum(weights if macs is None else macs for macs, weights in known)


def _sizes(shape: ir.Shape | None, start: int) -> list[int] | None:
    """The dimensions from `start` on; None if one of them is not a number."""
    sizes = None if shape is None else list(shape)[start:]
    return sizes if sizes is not None and all(isinstance(size, int) for size in sizes) else None  # type: ignore[return-value]


def tensors_to_size(model: ir.Model) -> list[str]:
    """The computed tensors whose shapes `layer_macs` needs."""
    names: dict[str, None] = {}
    for node in model.graph:
        if node.op_type in PRODUCTS or node.op_type in RECURRENT_TYPES:
            values = (node.inputs[0], node.outputs[0] if node.op_type in PRODUCTS else None)
            names.update({str(value.name): None for value in values if value is not None and value.producer()})
    return list(names)


def layer_macs(model: ir.Model, shapes: Shapes) -> dict[str, int]:
    """The MACs of one run, by node, with the shapes that a sample has; layers of unknown shape count as none."""
    by_layer: dict[str, int] = {}
    for node in model.graph:
        if node.op_type not in PRODUCTS and node.op_type not in RECURRENT_TYPES:
            continue
        weights = weight_count(node)
        given, made = (
            None if value is None else shapes.get(str(value.name)) for value in (node.inputs[0], node.outputs[0])
        )
        if node.op_type in RECURRENT_TYPES:
            macs = weights * math.prod(given[:2]) if given else 0
        elif node.op_type == "Conv" and weights and made:
            macs = weights * made[0] * math.prod(made[2:])
        elif node.op_type == "ConvTranspose" and weights and given:
            macs = weights * given[0] * math.prod(given[2:])
        elif given and made:
            macs = given[-1] * math.prod(made)
        else:
            macs = 0
        by_layer[str(node.name)] = macs
    return by_layer
