"""Convert QuantizeLinear and DequantizeLinear around operators to ONNX Runtime's operators on codes."""

from __future__ import annotations

from quark.onnx.convert.quantizers import convert_qdq_to_qop
from quark.onnx.tools.command import Argument, ModelTool

__all__ = ["TOOL", "convert_qdq_to_qop", "run_main"]

TOOL = ModelTool(
    "Convert a quantized model from QDQ to QOperator format, where ONNX Runtime has such operators.",
    Argument("--input_model", "the quantized model"),
    Argument("--output_model", "the model to write"),
    change=convert_qdq_to_qop,
)
run_main = TOOL.run

if __name__ == "__main__":
    run_main()
