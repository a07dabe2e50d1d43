"""Insert a Clip before activations that are quantized to bfloat16."""

from __future__ import annotations

from onnx import ModelProto

from quark.onnx.convert.bfloat16 import has_custom_bfloat16, insert_clip_bfloat16_qdq
from quark.onnx.convert.operators import require
from quark.onnx.tools.command import Argument, ModelTool

__all__ = ["TOOL", "insert_clip_bfloat16_qdq", "main"]


def _converted(model: ModelProto) -> ModelProto:
    require(has_custom_bfloat16(model), model, "quantizers of com.amd.quark that round to bfloat16")
    return insert_clip_bfloat16_qdq(model)


TOOL = ModelTool(
    "Insert a Clip before activations that quantizers of com.amd.quark round to bfloat16.",
    Argument("--input_model", "the quantized model"),
    Argument("--output_model", "the model to write"),
    change=_converted,
)
main = TOOL.run

if __name__ == "__main__":
    main()
