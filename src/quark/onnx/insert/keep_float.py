"""Let layers that were left in float stay so where ONNX Runtime runs them.

Where a convolution or a Gemm reads codes of one scale, ONNX Runtime quantizes its float weight by itself, to int8 with
one scale for all of it: what was left in float for the sake of accuracy is lost again, in silence. It does so only
behind a DequantizeLinear with a single scale. Such a layer therefore gets one of its own that names the same scale for
every channel: the same numbers, and its weight is left alone.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import (
    add_initializer,
    add_node,
    attribute,
    constant,
    input_value,
    is_constant,
    nodes,
    replace_input,
)

LAYERS = ("Conv", "ConvTranspose", "Gemm")
_DOMAINS = ("", "com.microsoft")


def keep_float(model: ir.Model) -> int:
    """How many layers were told apart. A layer with one input channel cannot be."""
    return sum(_keep(model, node) for node in nodes(model) if node.op_type in LAYERS and node.domain == "")


def _keep(model: ir.Model, node: ir.Node) -> bool:
    before, weight = _producer(node), input_value(node, 1)
    if before is None or weight is None or not is_constant(weight) or weight.dtype is not ir.DataType.FLOAT:
        return False
    scale, zero_point = (constant(input_value(before, index)) for index in (1, 2))
    axis, channels = _channels(node, weight.shape.numpy() if weight.shape else ())
    if scale is None or scale.size != 1 or channels < 2:
        return False
    inputs = [before.inputs[0]]
    for name, number in (("scale", scale), ("zero_point", zero_point)):
        if number is not None:
            inputs.append(add_initializer(model, f"{node.name}_input_{name}", np.repeat(number.reshape(1), channels)))
    apart = add_node(
        model,
        before.op_type,
        inputs,
        after=before,
        name=f"{node.name}_input_{before.op_type}",
        domain=before.domain,
        attributes={"axis": axis},
    ).outputs[0]
    apart.type, apart.shape = before.outputs[0].type, before.outputs[0].shape
    replace_input(node, 0, apart)
    return True


def _producer(node: ir.Node) -> ir.Node | None:
    """The DequantizeLinear that the node reads."""
    value = input_value(node, 0)
    found = None if value is None else value.producer()
    return found if found is not None and found.op_type == "DequantizeLinear" and found.domain in _DOMAINS else None


def _channels(node: ir.Node, shape: tuple[int, ...]) -> tuple[int, int]:
    """The axis of the input that its weight is summed along, and its length."""
    if node.op_type == "Gemm":
        summed = shape[1 if attribute(node, "transB", 0) else 0]
        return (0 if attribute(node, "transA", 0) else 1), summed
    return 1, shape[0] if node.op_type == "ConvTranspose" else shape[1] * attribute(node, "group", 1)
