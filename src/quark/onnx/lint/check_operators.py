"""That the NPU has every operator: those with a quantized form (`choose.operators`), between standard quantizers."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from quark.onnx.choose.operators import OPERATORS
from quark.onnx.graph import FLOAT_TYPES, is_constant
from quark.onnx.lint.file_quantizers import FileQuantizers
from quark.onnx.lint.finding import Finding, Level

QUANTIZER_TYPES = frozenset({"QuantizeLinear", "DequantizeLinear"})
NPU_OPERATORS = frozenset(OPERATORS) | QUANTIZER_TYPES | {"Constant", "Identity"}
_CLIPPING = ("Min", "Max")
_ON_CODES = ("ConvInteger", "MatMulInteger", "DynamicQuantizeLinear")


def is_quantizing(node: ir.Node) -> bool:
    """That only quantized models have such a node."""
    return bool(node.domain) or node.op_type in QUANTIZER_TYPES or is_on_codes(node)


def is_on_codes(node: ir.Node) -> bool:
    """That the operator computes with the codes themselves, or finds them at run time."""
    return not node.domain and (node.op_type.startswith("QLinear") or node.op_type in _ON_CODES)


def check_operators(model: ir.Model, quantizers: FileQuantizers) -> Iterator[Finding]:
    for node in model.graph:
        if node.domain:
            yield _foreign(node)
        elif is_on_codes(node):
            message = f"operator {node.op_type}, which computes on codes; expected pairs of quantizers around floats"
            fix = "quantize with quant_format=QuantFormat.QDQ and without use_dynamic_quant"
            yield Finding("Operator", str(node.name), "", Level.ERROR, message, fix)
        elif node.op_type not in NPU_OPERATORS:
            yield _unknown(node)
        elif node.op_type in _CLIPPING:
            yield from _per_channel(node, quantizers)


def _foreign(node: ir.Node) -> Finding:
    message = f"operator {node.op_type} of domain {node.domain}, expected standard operators only"
    fix = "quantize the float model with XINT8, whose quantizers are standard"
    if node.op_type in QUANTIZER_TYPES:
        fix = "use 8 bits, and convert_fp16_to_fp32 for a model of float16: quantizers are standard then"
    return Finding("CustomDomain", str(node.name), "", Level.ERROR, message, fix)


def _unknown(node: ir.Node) -> Finding:
    """An operator on integers computes shapes; fixed shapes make it vanish."""
    has_floats = any(value.dtype in FLOAT_TYPES or value.dtype is None for value in node.outputs)
    if has_floats:
        message = f"the NPU has no {node.op_type}: it runs on the CPU, and cuts the network in two"
        fix = "replace it by operators that the NPU has; docs/npu.md lists them"
        return Finding("Operator", str(node.name), "", Level.ERROR, message, fix)
    message = f"{node.op_type} on integers runs on the CPU"
    fix = "with fixed shapes (FixShapes) it can be computed beforehand"
    return Finding("Operator", str(node.name), "", Level.WARNING, message, fix)


def _per_channel(node: ir.Node, quantizers: FileQuantizers) -> Iterator[Finding]:
    """A bound for each channel, as equalization makes of a Clip: the NPU has one for a tensor."""
    for value in node.inputs:
        found = quantizers.of(value)
        bound = found.node.inputs[0] if found is not None and found.is_constant else value
        if bound is None or bound.const_value is None or not is_constant(bound):
            continue
        size = bound.const_value.size
        if size > 1:
            message = f"{node.op_type} with a bound for each of {size} channels, expected a Clip with one bound"
            fix = "equalize with CLEClip 'calibrated' or 'skip'"
            yield Finding("Operator", str(node.name), "", Level.ERROR, message, fix)
