"""Convert a float32 model to block float: its layers read numbers of which eight share an exponent."""

from __future__ import annotations

import os
from argparse import Namespace

from quark.onnx.convert.float_presets import block_float_model
from quark.onnx.save import check_output
from quark.onnx.tools.command import EXTERNAL_DATA, Argument, Tool, write


def convert_fp32_to_bfp16(input_model_path: str | os.PathLike[str], output_model_path: str | os.PathLike[str]) -> None:
    """Convert one file to another."""
    _convert(input_model_path, output_model_path, has_external_data=False)


def convert(args: Namespace) -> None:
    """Convert the file `args.input` to `args.output`."""
    _convert(args.input, args.output, has_external_data=args.save_as_external_data)


def _convert(source: str | os.PathLike[str], output: str | os.PathLike[str], *, has_external_data: bool) -> None:
    target = check_output(output, source, has_report=False)
    write(block_float_model(source), source, target, has_external_data=has_external_data)


TOOL = Tool(
    "Convert a float32 model to block float (BFP16).",
    Argument("input", "the float32 model"),
    Argument("output", "the model to write"),
    EXTERNAL_DATA,
    work=convert,
)
parse_args = TOOL.parse_args

if __name__ == "__main__":
    TOOL.run()
