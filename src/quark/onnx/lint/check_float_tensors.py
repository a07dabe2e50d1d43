"""Tensors between the NPU's operators that are not quantized. The work on them goes to the CPU.

Nothing is quantized between an operator and the activation that it is computed with, and before the Mul that stands for
an NPU's constant: that is as it should be.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from quark.onnx.choose.npu_operations import FOLLOWERS, is_constant_factor
from quark.onnx.choose.operators import Kind, OperatorFacts, facts
from quark.onnx.graph import FLOAT_TYPES, is_read_once
from quark.onnx.lint.file_quantizers import FileQuantizers, is_dequantize
from quark.onnx.lint.finding import Finding, Level

RULE = "FloatTensor"
_FIX = "quantize the node too: nodes_to_exclude and its like without it, enable_npu_cnn on"


def check_float_tensors(model: ir.Model, quantizers: FileQuantizers) -> Iterator[Finding]:
    for node in model.graph:
        known = facts(node)
        if known is None:
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and _is_float_operand(node, known, index, quantizers):
                level = Level.ERROR if known.kind is Kind.COMPUTE else Level.WARNING
                message = f"{node.op_type} reads '{value.name}' in float, expected 8 bits"
                yield Finding(RULE, str(node.name), str(value.name), level, message, _FIX)
    for value in model.graph.outputs:
        writer = value.producer()
        if writer is not None and facts(writer) is not None and not is_dequantize(writer) and _is_float(value):
            message = f"output '{value.name}' of the graph is not quantized"
            fix = "quantize with enable_npu_cnn, as XINT8 does"
            yield Finding(RULE, str(writer.name), str(value.name), Level.WARNING, message, fix)


def _is_float_operand(node: ir.Node, known: OperatorFacts, index: int, quantizers: FileQuantizers) -> bool:
    value = node.inputs[index]
    is_operand = known.data is None or index in (*known.data, known.weight, known.bias)
    if value is None or not is_operand or not _is_float(value) or quantizers.of(value) is not None:
        return False
    return not (_is_computed_with(node, index) or is_constant_factor(node, quantizers))


def _is_computed_with(node: ir.Node, index: int) -> bool:
    """That the operand comes from the operator that this one is computed with."""
    value = node.inputs[index]
    writer = None if value is None else value.producer()
    if value is None or writer is None or index != 0 or not is_read_once(value) or facts(writer) is None:
        return False
    is_padded = writer.op_type == "Pad" and node.op_type == "AveragePool"
    return node.op_type in FOLLOWERS or is_padded


def _is_float(value: ir.Value) -> bool:
    return value.dtype in FLOAT_TYPES or value.dtype is None
