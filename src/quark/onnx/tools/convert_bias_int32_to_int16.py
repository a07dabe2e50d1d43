"""Convert int32 biases of a quantized model to int16."""

from __future__ import annotations

from argparse import Namespace

from quark.onnx.convert.integers import convert_bias_int32_to_int16
from quark.onnx.save import check_output
from quark.onnx.tools.command import EXTERNAL_DATA, Argument, Tool, naming, read_model, write
from quark.report.console import Console

__all__ = ["TOOL", "convert_bias_int32_to_int16", "parse_args"]


def _convert(args: Namespace) -> None:
    """Convert `args.input_model_path`. Nothing is written if it has no int32 bias."""
    target = check_output(args.output_model_path, args.input_model_path, has_report=False)
    model = read_model(args.input_model_path)
    with naming(args.input_model_path):
        model, has_int32_bias = convert_bias_int32_to_int16(model)
    if has_int32_bias:
        write(model, args.input_model_path, target, has_external_data=args.save_as_external_data)
    else:
        Console().say(f"{args.input_model_path} has no int32 bias; nothing was written")


TOOL = Tool(
    "Convert the int32 biases of a quantized model to int16. The model is converted to opset 21.",
    Argument("--input_model_path", "the quantized model"),
    Argument("--output_model_path", "the model to write"),
    EXTERNAL_DATA,
    work=_convert,
)
parse_args = TOOL.parse_args

if __name__ == "__main__":
    TOOL.run()
