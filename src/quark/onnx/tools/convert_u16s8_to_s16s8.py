"""Give activations signed 16-bit codes: uint16 with zero point 32768 becomes int16 with zero point 0."""

from __future__ import annotations

from quark.onnx.convert.integers import convert_u16s8_to_s16s8
from quark.onnx.tools.command import Argument, ModelTool

__all__ = ["TOOL", "convert", "convert_u16s8_to_s16s8", "parse_args"]

TOOL = ModelTool(
    "Convert the uint16 activations of a quantized model to int16; the weights stay as they are.",
    Argument("input", "the quantized model"),
    Argument("output", "the model to write"),
    change=convert_u16s8_to_s16s8,
)
parse_args, convert = TOOL.parse_args, TOOL.convert

if __name__ == "__main__":
    TOOL.run()
