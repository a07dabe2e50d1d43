"""Convert a float16 model to bfloat16, in one of four formats."""

from __future__ import annotations

from argparse import Namespace

from onnx import ModelProto

from quark.onnx.convert.float_presets import BF16_FORMATS, bfloat16_model
from quark.onnx.convert.floats import with_float16_ports
from quark.onnx.save import check_output
from quark.onnx.tools.command import EXTERNAL_DATA, Argument, Tool, write


def add_fp16_input_output_cast(model: ModelProto) -> ModelProto:
    """Give a model float16 instead of float32 inputs and outputs, with Casts between these and its nodes."""
    return with_float16_ports(model)


def convert(args: Namespace) -> None:
    """Convert the file `args.input` to `args.output`, in the format `args.format`."""
    target = check_output(args.output, args.input, has_report=False)
    model = bfloat16_model(args.input, args.format, is_float16=True)
    write(model, args.input, target, has_external_data=args.save_as_external_data)


TOOL = Tool(
    "Convert a float16 model to bfloat16. Inputs and outputs stay in float16.",
    Argument("--input", "the float16 model"),
    Argument("--output", "the model to write"),
    Argument("--format", f"one of {', '.join(BF16_FORMATS)}; with_cast if not given", default="with_cast"),
    EXTERNAL_DATA,
    work=convert,
)
parse_args = TOOL.parse_args

if __name__ == "__main__":
    TOOL.run()
