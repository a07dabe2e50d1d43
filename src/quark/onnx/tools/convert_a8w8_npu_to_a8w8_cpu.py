"""Convert a model for AMD's NPU to one for CPUs: int8 biases become int32."""

from __future__ import annotations

from quark.onnx.convert.integers import convert_a8w8_npu_to_a8w8_cpu
from quark.onnx.tools.command import Argument, ModelTool

__all__ = ["TOOL", "convert_a8w8_npu_to_a8w8_cpu", "parse_args"]

TOOL = ModelTool(
    "Convert the int8 biases of an A8W8 model for the NPU to int32, as CPU kernels expect.",
    Argument("input", "the quantized model"),
    Argument("output", "the model to write"),
    change=convert_a8w8_npu_to_a8w8_cpu,
)
parse_args = TOOL.parse_args

if __name__ == "__main__":
    TOOL.run()
