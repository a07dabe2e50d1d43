"""Remove Casts to bfloat16 and back: weights are stored rounded, and the network computes in float32."""

from __future__ import annotations

from onnx import ModelProto

from quark.onnx.convert.bfloat16 import (
    convert_bf16_cast_to_fp32_weights,
    float32_to_bfloat16,
    get_input_tensor_to_node_dict,
    has_bfloat16_casts,
    remove_bf16_cast,
    remove_couples_of_cast,
    remove_output_cast,
)
from quark.onnx.convert.operators import require
from quark.onnx.tools.command import EXTERNAL_DATA, Argument, ModelTool

__all__ = [
    "TOOL",
    "convert_bf16_cast_to_fp32_weights",
    "float32_to_bfloat16",
    "get_input_tensor_to_node_dict",
    "parse_args",
    "remove_bf16_cast",
    "remove_couples_of_cast",
    "remove_output_cast",
]


def _converted(model: ModelProto) -> ModelProto:
    require(has_bfloat16_casts(model), model, "Casts to bfloat16")
    return remove_bf16_cast(model)


TOOL = ModelTool(
    "Remove pairs of Casts to bfloat16 and back. Weights are stored rounded to bfloat16, in float32.",
    Argument("input_model_path", "the model with Casts"),
    Argument("output_model_path", "the model to write"),
    EXTERNAL_DATA,
    change=_converted,
)
parse_args = TOOL.parse_args

if __name__ == "__main__":
    TOOL.run()
