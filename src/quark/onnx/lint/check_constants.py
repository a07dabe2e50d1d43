"""Operators whose result the NPU gets with another constant than the file says: the file predicts it a little off."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from quark.npu import HARD_SIGMOID_FACTOR, average_pool_factor, is_npu_hard_sigmoid, leaky_relu_alpha
from quark.onnx.choose.npu_operations import is_constant_factor
from quark.onnx.graph import attribute, constant, input_value, readers
from quark.onnx.lint.file_quantizers import FileQuantizers
from quark.onnx.lint.finding import Finding, Level
from quark.onnx.simulate.average_pool import square_side

RULE = "NpuConstant"
_TOLERANCE = 1e-5


def check_constants(model: ir.Model, quantizers: FileQuantizers) -> Iterator[Finding]:
    for node in model.graph:
        if node.domain:
            continue
        if node.op_type == "LeakyRelu":
            yield from _leaky_relu(node)
        elif node.op_type == "Sigmoid":
            message = "the NPU computes HardSigmoid in the place of Sigmoid, off by up to 0.07"
            yield _finding(node, message, "ConvertSigmoidToHardSigmoid")
        elif node.op_type == "HardSigmoid":
            yield from _hard_sigmoid(node, quantizers)
        elif node.op_type in ("AveragePool", "GlobalAveragePool"):
            yield from _average_pool(node, quantizers)


def _leaky_relu(node: ir.Node) -> Iterator[Finding]:
    alpha = float(attribute(node, "alpha", 0.01))
    wanted = leaky_relu_alpha(alpha)
    if not math.isclose(alpha, wanted, rel_tol=_TOLERANCE, abs_tol=1e-9):
        message = f"slope {alpha:.6g}, expected a multiple of 1/256: the NPU has {wanted:.6g}"
        yield _finding(node, message, "ConvertLeakyReluToDPUVersion")


def _hard_sigmoid(node: ir.Node, quantizers: FileQuantizers) -> Iterator[Finding]:
    alpha, beta = float(attribute(node, "alpha", 0.2)), float(attribute(node, "beta", 0.5))
    if not is_npu_hard_sigmoid(alpha, beta):
        message = f"HardSigmoid of alpha {alpha:.6g} and beta {beta:.6g}, expected 1/6 and 1/2"
        fix = "train or export with that HardSigmoid; others run on the CPU"
        yield Finding(RULE, str(node.name), "", Level.WARNING, message, fix)
    else:
        yield from _factor(node, HARD_SIGMOID_FACTOR, quantizers, "ConvertHardSigmoidToDPUVersion")


def _average_pool(node: ir.Node, quantizers: FileQuantizers) -> Iterator[Finding]:
    side = square_side(node)
    if side is not None:
        yield from _factor(node, average_pool_factor(side, side), quantizers, "ConvertAvgPoolToDPUVersion")


def _factor(node: ir.Node, wanted: float, quantizers: FileQuantizers, option: str) -> Iterator[Finding]:
    """That what the node gives is multiplied by the factor."""
    found = 1.0
    for reader, _ in readers(node.outputs[0]):
        factor = constant(input_value(reader, 1)) if is_constant_factor(reader, quantizers) else None
        found = found if factor is None else float(factor.reshape(()))
    if not math.isclose(found, wanted, rel_tol=_TOLERANCE):
        message = f"the NPU gives {wanted:.6g} times the result, expected a Mul by that; there is {found:.6g}"
        yield _finding(node, message, option)


def _finding(node: ir.Node, message: str, option: str) -> Finding:
    fix = f"quantize with {option} and SimulateDPU on, as XINT8 has them"
    return Finding(RULE, str(node.name), str(node.outputs[0].name), Level.WARNING, message, fix)
