"""Write an ONNX file as text."""

from __future__ import annotations

from argparse import Namespace

from quark.onnx.convert.text import model_text
from quark.onnx.save import check_output, write_text
from quark.onnx.tools.command import Argument, Tool, read_model
from quark.report.console import Console


def convert(args: Namespace) -> None:
    """Convert the file `args.input_model` to `args.output_model`."""
    target = check_output(args.output_model, args.input_model, has_report=False)
    write_text(model_text(read_model(args.input_model)), target)
    Console().say(f"{args.input_model} -> {target}")


TOOL = Tool(
    "Write an ONNX file, with its weights, as text.",
    Argument("--input_model", "the ONNX file"),
    Argument("--output_model", "the text file to write"),
    work=convert,
)
run_main = TOOL.run

if __name__ == "__main__":
    run_main()
