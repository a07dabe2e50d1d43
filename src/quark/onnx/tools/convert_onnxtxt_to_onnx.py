"""Write a model that is stored as text to an ONNX file."""

from __future__ import annotations

from argparse import Namespace

from quark.onnx.convert.text import model_of_text
from quark.onnx.save import check_output
from quark.onnx.tools.command import Argument, Tool, write


def convert(args: Namespace) -> None:
    """Convert the file `args.input_model` to `args.output_model`."""
    target = check_output(args.output_model, args.input_model, has_report=False)
    write(model_of_text(args.input_model), args.input_model, target)


TOOL = Tool(
    "Convert a model in text format to an ONNX file.",
    Argument("--input_model", "the text file"),
    Argument("--output_model", "the ONNX file to write"),
    work=convert,
)
run_main = TOOL.run

if __name__ == "__main__":
    run_main()
