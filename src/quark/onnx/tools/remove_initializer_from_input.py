"""Turn initializers that are also graph inputs into constants."""

from __future__ import annotations

from quark.onnx.convert.graph_edits import remove_initializers_from_inputs
from quark.onnx.tools.command import Argument, ModelTool

TOOL = ModelTool(
    "Turn initializers that are also graph inputs into constants.",
    Argument("--input", "the model"),
    Argument("--output", "the model to write"),
    change=remove_initializers_from_inputs,
)
parse_args, remove_initializer_from_input = TOOL.parse_args, TOOL.convert

if __name__ == "__main__":
    TOOL.run()
