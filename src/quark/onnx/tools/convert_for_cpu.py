"""Convert a model with power-of-two scales, such as one for an NPU, or with block formats for CPUs; outputs stay the
same to the bit."""

from __future__ import annotations

from quark.onnx.convert.for_cpu import convert_for_cpu
from quark.onnx.tools.command import Argument, ModelTool

__all__ = ["TOOL", "convert_for_cpu", "parse_args"]

TOOL = ModelTool(
    "Convert a model with power-of-two scales (XINT8) so that ONNX Runtime computes it in integers on a CPU, and let "
    "block operators do what stands before them, with the same outputs to the bit.",
    Argument("input", "the quantized model"),
    Argument("output", "the model to write"),
    change=convert_for_cpu,
)
parse_args = TOOL.parse_args

if __name__ == "__main__":
    TOOL.run()
