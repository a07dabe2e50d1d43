"""Remove the quantizers of activations from a quantized model."""

from __future__ import annotations

from quark.onnx.convert.quantizers import remove_qdq
from quark.onnx.tools.command import Argument, ModelTool

__all__ = ["TOOL", "remove_qdq", "run_main"]

TOOL = ModelTool(
    "Remove all pairs of QuantizeLinear and DequantizeLinear. Weights that are stored as integers stay integers.",
    Argument("--input_model", "the quantized model"),
    Argument("--output_model", "the model to write"),
    change=remove_qdq,
)
run_main = TOOL.run

if __name__ == "__main__":
    run_main()
