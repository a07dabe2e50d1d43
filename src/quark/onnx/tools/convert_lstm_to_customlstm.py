"""Convert quantized LSTMs to ExtendedLSTM of com.amd.quark."""

from __future__ import annotations

from onnx import ModelProto

from quark.errors import ModelError
from quark.onnx.convert.lstm import convert_lstm_to_customlstm, has_lstm
from quark.onnx.convert.operators import EXTENDED_LSTM, custom_ops_infer_shapes, require
from quark.onnx.tools.command import Argument, ModelTool

__all__ = ["TOOL", "convert_lstm_to_customlstm", "custom_ops_infer_shapes", "run_main"]


def _converted(model: ModelProto) -> ModelProto:
    require(has_lstm(model), model, "LSTM")
    result = convert_lstm_to_customlstm(model)
    if all(node.op_type != EXTENDED_LSTM for node in result.graph.node):
        raise ModelError(
            f"'{model.graph.name or 'model'}': no LSTM can be converted. Expected bidirectional ones whose X, W, R, B "
            "and Y are quantized to uint16, with one scale each"
        )
    return result


TOOL = ModelTool(
    "Convert quantized bidirectional LSTMs to ExtendedLSTM, which computes them as AMD's NPU does.",
    Argument("--input_model", "the quantized model"),
    Argument("--output_model", "the model to write"),
    change=_converted,
)
run_main = TOOL.run

if __name__ == "__main__":
    run_main()
