"""Replace quantizers that round to bfloat16 by Casts."""

from __future__ import annotations

from onnx import ModelProto

from quark.onnx.convert.bfloat16 import has_custom_bfloat16, replace_bfloat16_qdq_cast
from quark.onnx.convert.operators import require
from quark.onnx.tools.command import Argument, ModelTool

__all__ = ["TOOL", "main", "replace_bfloat16_qdq_cast"]


def _converted(model: ModelProto) -> ModelProto:
    require(has_custom_bfloat16(model), model, "quantizers of com.amd.quark that round to bfloat16")
    return replace_bfloat16_qdq_cast(model)


TOOL = ModelTool(
    "Replace quantizers of com.amd.quark that round to bfloat16 with Casts, and a Mul if their scale is not 1.",
    Argument("--input_model", "the quantized model"),
    Argument("--output_model", "the model to write"),
    change=_converted,
)
main = TOOL.run

if __name__ == "__main__":
    main()
