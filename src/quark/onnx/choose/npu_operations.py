"""The operators of a graph as the NPU's rules see them.

Positions sit on tensors, and the rules are about operators. What lies between is the same for a plan and for a file
that has quantizers in it, but for the question which position an operand has: `Quantizers` answers that.

An operator whose output has no quantizer is computed with the activation behind it, or with the Mul that stands for the
NPU's constant; its output position is the one behind those.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Protocol

import onnx_ir as ir

from quark.npu import Operation, is_npu_hard_sigmoid
from quark.onnx.graph import attribute, input_value, is_constant, readers

# Operators that are computed with the one before them where nothing is quantized in between.
FOLLOWERS = frozenset({"Relu", "Clip", "LeakyRelu", "PRelu", "Gelu"})
# Operators whose result the NPU gets with another constant, which a Mul behind them stands for.
SCALED = frozenset({"AveragePool", "GlobalAveragePool", "HardSigmoid", "ReduceMean"})
_WEIGHTED = ("Conv", "Gemm")
_MANY_INPUTS = ("Concat", "Add", "Sub", "Mul")
_ONE_INPUT = ("MaxPool", "AveragePool", "GlobalAveragePool", "Pad", "Slice", "HardSigmoid")
_HARD_SIGMOID_DEFAULTS = 0.2, 0.5  # of the standard


class Quantizers(Protocol):
    """Where positions are."""

    def read(self, node: ir.Node, index: int) -> Hashable | None:
        """The key of what that input reads, where it is quantized."""
        ...

    def written(self, value: ir.Value) -> Hashable | None:
        """The key of the quantizer behind a value, where there is one."""
        ...

    def source(self, value: ir.Value) -> ir.Value:
        """The float value that this one is the quantized form of, or itself."""
        ...


def npu_operations(model: ir.Model, quantizers: Quantizers) -> list[Operation]:
    """The operators of the main graph that rules are about, in its order."""
    return [operation for node in model.graph for operation in _operation(node, quantizers)]


def output_key(node: ir.Node, quantizers: Quantizers) -> Hashable | None:
    """The key of the node's first output, or of what it is computed with."""
    value = node.outputs[0]
    writer = node
    while True:
        key = quantizers.written(value)
        if key is not None:
            return key
        follower = _follower(writer, value, quantizers)
        if follower is None:
            return None
        writer, value = follower, follower.outputs[0]


def is_constant_factor(node: ir.Node, quantizers: Quantizers) -> bool:
    """That a Mul is by a single number, and neither operand is quantized: it belongs to the operator before it."""
    if node.op_type != "Mul" or node.domain or len(node.inputs) != 2:
        return False
    scaled = input_value(node, 0)
    writer = None if scaled is None else scaled.producer()
    if writer is None or writer.op_type not in SCALED:
        return False
    factor = input_value(node, 1)
    is_number = factor is not None and factor.const_value is not None and factor.const_value.size == 1
    is_float = not any(quantizers.read(node, index) is not None for index in (0, 1))
    return is_number and is_constant(factor) and is_float


def _operation(node: ir.Node, quantizers: Quantizers) -> Iterator[Operation]:
    if node.domain not in ("", "ai.onnx") or not node.outputs:
        return
    op_type, name = node.op_type, str(node.name)
    if op_type in _WEIGHTED:
        source, weight, bias = (quantizers.read(node, index) for index in range(3))
        has_leaky_relu = any(reader.op_type == "LeakyRelu" for reader, _ in readers(node.outputs[0]))
        yield Operation(
            name,
            op_type,
            (source,),
            output_key(node, quantizers),
            weight,
            bias,
            is_before_leaky_relu=has_leaky_relu,
        )
    elif op_type in _MANY_INPUTS:
        inputs = tuple(quantizers.read(node, index) for index in range(len(node.inputs)))
        yield Operation(name, op_type, inputs, output_key(node, quantizers), is_swish=_is_swish(node, quantizers))
    elif op_type in _ONE_INPUT:
        alpha, beta = _slope(node)
        inputs = (quantizers.read(node, 0),)
        yield Operation(name, op_type, inputs, output_key(node, quantizers), alpha=alpha, beta=beta)


def _follower(node: ir.Node, value: ir.Value, quantizers: Quantizers) -> ir.Node | None:
    """The one reader of a value that is computed with the node that writes it."""
    following = readers(value)
    if len(following) != 1 or value.is_graph_output():
        return None
    reader, index = following[0]
    if index != 0 or reader.graph is not node.graph or reader.domain not in ("", "ai.onnx"):
        return None
    return reader if reader.op_type in FOLLOWERS or is_constant_factor(reader, quantizers) else None


def _slope(node: ir.Node) -> tuple[float, float]:
    if node.op_type != "HardSigmoid":
        return 0.0, 0.0
    alpha, beta = _HARD_SIGMOID_DEFAULTS
    return float(attribute(node, "alpha", alpha)), float(attribute(node, "beta", beta))


def _is_swish(node: ir.Node, quantizers: Quantizers) -> bool:
    """That a Mul has x and HardSigmoid(x) for operands."""
    if node.op_type != "Mul" or len(node.inputs) != 2:
        return False
    values = [quantizers.source(value) for value in node.inputs if value is not None]
    pairs = (values, reversed(values)) if len(values) == 2 else ()
    return any(_is_gate_of(gate, x, quantizers) for gate, x in pairs)


def _is_gate_of(gate: ir.Value, x: ir.Value, quantizers: Quantizers) -> bool:
    writer = gate.producer()
    if writer is not None and is_constant_factor(writer, quantizers):
        before = input_value(writer, 0)
        writer = before.producer() if before is not None else None
    if writer is None or writer.op_type != "HardSigmoid" or not is_npu_hard_sigmoid(*_slope(writer)):
        return False
    source = input_value(writer, 0)
    return source is not None and quantizers.source(source) is x
