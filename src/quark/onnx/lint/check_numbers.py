"""That codes are those of the NPU: 8 bits around zero, one power-of-two scale for a tensor.

activations      uint8 with zero point 128, or int8 with 0: the same numbers
weights, biases  int8 with zero point 0
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from quark.onnx.choose.operators import Kind, facts
from quark.onnx.graph import readers
from quark.onnx.lint.file_quantizers import FileQuantizers, Quantizer, is_dequantize, is_quantize
from quark.onnx.lint.finding import Finding, Level
from quark.plan import Role

_XINT8 = "quantize with XINT8"
_MIDDLE = {ir.DataType.UINT8: 128, ir.DataType.INT8: 0}
_SOME_CHANNELS = 1


def check_numbers(_: ir.Model, quantizers: FileQuantizers) -> Iterator[Finding]:
    for each in quantizers.all:
        is_second = is_dequantize(each.node) and not each.is_constant
        if not is_second:  # the pair is checked at its first node, the second for being the same
            yield from _scale(each)
            yield from _codes(each)
    yield from _different_pairs(quantizers)


def _scale(each: Quantizer) -> Iterator[Finding]:
    if each.scale is None:
        message = "the scale is computed at run time, expected a constant"
        yield _finding("PowerOfTwoScale", each, message, f"{_XINT8}: the NPU takes no dynamic quantization")
    elif each.scale.size > _SOME_CHANNELS:
        message = f"{each.scale.size} scales, expected one for the tensor"
        yield _finding("PerTensor", each, message, "quantize with per_channel=False, as XINT8 does")
    elif each.position is None:
        message = f"scale {float(each.scale.reshape(())):.9g} is no power of two"
        fix = "quantize with PowerOfTwoMethod.MinMSE, as XINT8 does"
        yield _finding("PowerOfTwoScale", each, message, fix)


def _codes(each: Quantizer) -> Iterator[Finding]:
    role = role_of(each)
    name = each.codes.name.lower()
    is_weight = role is not Role.ACTIVATION and not _is_operand(each)
    wanted = "int8" if is_weight else "uint8 or int8"
    if name not in wanted.split(" or "):
        fix = "leave Int32Bias and Int16Bias out, as XINT8 does" if role is Role.BIAS else _XINT8
        yield _finding("Int8", each, f"{role.value} of {name}, expected {wanted}", fix)
        return
    zero_points = [0] if each.zero_point is None else sorted({int(each_one) for each_one in each.zero_point.ravel()})
    middle = _MIDDLE[each.codes]
    if zero_points != [middle]:
        option = "WeightSymmetric" if is_weight else "ActivationSymmetric"
        fix = f"quantize with {option}, as XINT8 does"
        if zero_points == [0]:
            fix += " and without UseUnsignedReLU"
        shown = ", ".join(map(str, zero_points[:3]))
        yield _finding("Symmetric", each, f"zero point {shown} of {name}, expected {middle}", fix)


def role_of(each: Quantizer) -> Role:
    """What the tensor is to those who read it."""
    if not each.is_constant:
        return Role.ACTIVATION
    uses = _uses(each)
    known = [(facts(node), index) for node, index in uses]
    return Role.BIAS if uses and all(fact is not None and fact.bias == i for fact, i in known) else Role.WEIGHT


def _is_operand(each: Quantizer) -> bool:
    """That a constant is an operand of Add, Mul and their like, which may have the codes of an activation."""
    known = [facts(node) for node, _ in _uses(each)]
    return bool(known) and all(fact is not None and fact.kind is not Kind.COMPUTE for fact in known)


def _uses(each: Quantizer) -> list[tuple[ir.Node, int]]:
    outputs = [each.node.outputs[0]]
    if is_quantize(each.node):
        outputs = [node.outputs[0] for node, _ in readers(outputs[0]) if is_dequantize(node)]
    return [use for value in outputs for use in readers(value)]


def _different_pairs(quantizers: FileQuantizers) -> Iterator[Finding]:
    """Quantizers of one tensor that do not agree."""
    first: dict[object, Quantizer] = {}
    for each in quantizers.all:
        other = first.setdefault(each.key, each)
        if _parameters(each) != _parameters(other):
            message = f"quantized differently by '{other.node.name}' and '{each.node.name}', expected one scale"
            fix = f"{_XINT8}; where layers have configs of their own, give neighbours the same"
            yield _finding("OneScale", each, message, fix)


def _parameters(each: Quantizer) -> tuple[object, ...]:
    scale = None if each.scale is None else tuple(each.scale.ravel().tolist())
    zero_point = (0,) if each.zero_point is None else tuple(each.zero_point.ravel().tolist())
    return scale, zero_point, each.codes


def _finding(rule: str, each: Quantizer, message: str, fix: str) -> Finding:
    return Finding(rule, _operator(each), each.key.tensor, Level.ERROR, message, fix)


def _operator(each: Quantizer) -> str:
    """The node that computes the tensor, or that reads the constant: people know those, and not the quantizer's."""
    source = each.node.inputs[0]
    writer = None if source is None else source.producer()
    uses = _uses(each) if each.is_constant else []
    node = uses[0][0] if uses else writer
    return str(each.node.name if node is None else node.name)
