"""Give a model inputs and outputs with channels last."""

from __future__ import annotations

from quark.onnx.convert.graph_edits import convert_nchw_to_nhwc
from quark.onnx.tools.command import Argument, ModelTool

__all__ = ["TOOL", "convert", "convert_nchw_to_nhwc", "parse_args"]

TOOL = ModelTool(
    "Convert the inputs and outputs of a model from NCHW to NHWC, with a Transpose at each.",
    Argument("input", "the model"),
    Argument("output", "the model to write"),
    change=convert_nchw_to_nhwc,
)
parse_args, convert = TOOL.parse_args, TOOL.convert

if __name__ == "__main__":
    TOOL.run()
