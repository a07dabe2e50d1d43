"""Convert a model to another opset."""

from __future__ import annotations

from argparse import Namespace

from quark.onnx.convert.graph_edits import convert_opset_version
from quark.onnx.tools.command import Argument, Tool, convert_file

__all__ = ["TOOL", "convert", "convert_opset_version", "parse_args"]


def convert(args: Namespace) -> None:
    """Convert the file `args.input` to `args.target_opset` and write it to `args.output`."""
    convert_file(args.input, args.output, lambda model: convert_opset_version(model, args.target_opset))


TOOL = Tool(
    "Convert a model to another opset, newer or older.",
    Argument("input", "the model"),
    Argument("target_opset", "the opset, such as 20", type=int),
    Argument("output", "the model to write"),
    work=convert,
)
parse_args = TOOL.parse_args

if __name__ == "__main__":
    TOOL.run()
