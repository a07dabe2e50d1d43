"""The ten rules on positions, `quark.npu.RULES`, for every operator of a file."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from quark.npu import RULES, Violation
from quark.onnx.choose.npu_operations import npu_operations
from quark.onnx.lint.file_quantizers import FileQuantizers, TensorKey
from quark.onnx.lint.finding import Finding, Level


def check_positions(model: ir.Model, quantizers: FileQuantizers) -> Iterator[Finding]:
    operations = npu_operations(model, quantizers)
    for operation in operations:
        for rule in RULES:
            for found in rule.check(operation, quantizers.positions):
                yield _finding(found, quantizers)


def _finding(found: Violation, quantizers: FileQuantizers) -> Finding:
    bound = found.bound
    assert isinstance(bound.key, TensorKey)
    before = quantizers.positions[bound.key]
    after = before - bound.direction * bound.excess
    fix = f"quantize with {found.rule} and NPULimitationCheck on, as XINT8 has them: it goes from {before} to {after}"
    return Finding(found.rule, found.operation, bound.key.tensor, Level.ERROR, str(found), fix)
