"""Replace quantizers of com.amd.quark by QuantizeLinear and DequantizeLinear of com.microsoft."""

from __future__ import annotations

from onnx import ModelProto

from quark.onnx.convert.operators import convert_customqdq_to_qdq, custom_ops_infer_shapes, is_custom_quantizer, require
from quark.onnx.tools.command import Argument, ModelTool
from quark.ops.onnx_nodes import all_nodes

__all__ = ["TOOL", "convert_customqdq_to_qdq", "custom_ops_infer_shapes", "run_main"]


def _converted(model: ModelProto) -> ModelProto:
    before = sum(map(is_custom_quantizer, all_nodes(model.graph.node)))
    result = convert_customqdq_to_qdq(model)
    after = sum(map(is_custom_quantizer, all_nodes(result.graph.node)))
    require(after < before, model, "quantizers of com.amd.quark with integers of 8 or 16 bits")
    return custom_ops_infer_shapes(result)


TOOL = ModelTool(
    "Replace quantizers of com.amd.quark with those of com.microsoft, where their types allow it.",
    Argument("--input_model", "the quantized model"),
    Argument("--output_model", "the model to write"),
    change=_converted,
)
run_main = TOOL.run

if __name__ == "__main__":
    run_main()
