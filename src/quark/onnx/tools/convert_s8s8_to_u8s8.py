"""Give activations unsigned codes: int8 with zero point 0 becomes uint8 with zero point 128."""

from __future__ import annotations

from quark.onnx.convert.integers import convert_s8s8_to_u8s8
from quark.onnx.tools.command import Argument, ModelTool

__all__ = ["TOOL", "convert", "convert_s8s8_to_u8s8", "parse_args"]

TOOL = ModelTool(
    "Convert the int8 activations of a quantized model to uint8; the weights stay int8.",
    Argument("input", "the quantized model"),
    Argument("output", "the model to write"),
    change=convert_s8s8_to_u8s8,
)
parse_args, convert = TOOL.parse_args, TOOL.convert

if __name__ == "__main__":
    TOOL.run()
