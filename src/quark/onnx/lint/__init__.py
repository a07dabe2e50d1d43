"""Whether AMD's NPU would take a quantized file, from this project or from elsewhere: `quark lint`.

One file, one kind of check; `CHECKS` has them in the order of their findings. `docs/npu.md` says what is wanted, why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import onnx
import onnx_ir as ir

from quark.onnx.lint.check_constants import check_constants
from quark.onnx.lint.check_float_tensors import check_float_tensors
from quark.onnx.lint.check_numbers import check_numbers
from quark.onnx.lint.check_operators import check_operators, is_quantizing
from quark.onnx.lint.check_positions import check_positions
from quark.onnx.lint.check_shapes import check_inputs, check_opset
from quark.onnx.lint.file_quantizers import FileQuantizers
from quark.onnx.lint.finding import Finding, Level
from quark.onnx.lint.read_graph import read_graph

__all__ = ["CHECKS", "Finding", "Level", "lint"]

Check = Callable[[ir.Model, FileQuantizers], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    check_opset,
    check_inputs,
    check_operators,
    check_float_tensors,
    check_numbers,
    check_positions,
    check_constants,
)


def lint(model: str | os.PathLike[str] | onnx.ModelProto | bytes) -> tuple[Finding, ...]:
    """What the NPU would not take, or take otherwise than meant; nothing where the file is as it wants it.

    A model that is not quantized is one finding. What is no ONNX model is a ModelError.
    """
    graph = read_graph(model)
    if not any(is_quantizing(node) for node in graph.graph):
        return (_not_quantized(),)
    quantizers = FileQuantizers(graph)
    checks = CHECKS if quantizers.all else (check_opset, check_inputs, check_operators)
    return tuple(dict.fromkeys(found for check in checks for found in check(graph, quantizers)))


def _not_quantized() -> Finding:
    message = "the model is not quantized: it has no QuantizeLinear or DequantizeLinear"
    fix = "quantize it: quark quantize MODEL OUTPUT --config XINT8 --calib FOLDER"
    return Finding("Quantized", "", "", Level.ERROR, message, fix)
