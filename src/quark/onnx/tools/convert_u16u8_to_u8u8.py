"""Give activations 8-bit codes over the range of their 16-bit codes, without calibration."""

from __future__ import annotations

import os
from argparse import Namespace

import onnx

from quark.onnx.convert.integers import narrow_to_uint8
from quark.onnx.tools.command import Argument, Tool, convert_model


def convert_u16u8_to_u8u8(
    input_model: str | os.PathLike[str] | onnx.ModelProto, output_model: str | os.PathLike[str] | None = None
) -> onnx.ModelProto | None:
    """Convert a model or a file. Without `output_model`, the file to write, the converted model is returned."""
    return convert_model(input_model, output_model, narrow_to_uint8)


def convert(args: Namespace) -> None:
    """Convert the file `args.input` to `args.output`."""
    convert_u16u8_to_u8u8(args.input, args.output)


TOOL = Tool(
    "Convert the uint16 activations of a quantized model to uint8, with the same ranges.",
    Argument("input", "the quantized model"),
    Argument("output", "the model to write"),
    work=convert,
)
parse_args = TOOL.parse_args

if __name__ == "__main__":
    TOOL.run()
