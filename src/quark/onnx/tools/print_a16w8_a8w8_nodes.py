"""Print which layers of a quantized model read 8-bit activations, and which 16-bit ones."""

from __future__ import annotations

import os
from argparse import Namespace

from quark.onnx.convert.quantizers import activation_widths
from quark.onnx.tools.command import Argument, Tool, naming, read_model
from quark.report.console import Console


def a16w8_a8w8_nodes(input_model_path: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
    """The names of the Conv, ConvTranspose, Gemm and MatMul nodes with 8-bit, and with 16-bit activations.

    A MatMul counts if one of its factors is a weight. Both lists are empty for a model in float. Raises ModelError if
    the file is not a model.
    """
    model = read_model(input_model_path)
    with naming(input_model_path):
        widths = activation_widths(model)
    return widths.get(8, []), widths.get(16, [])


def print_a16w8_a8w8_nodes(args: Namespace) -> None:
    """Print the layers of the file `args.input`."""
    names = dict(zip(("int8", "int16"), a16w8_a8w8_nodes(args.input), strict=True))
    console = Console()
    for kind, layers in names.items():
        console.say(f"{kind} activation node names:")
        for name in layers:
            console.say(name)
    for kind, layers in names.items():
        console.say(f"{kind} activation node count:  {len(layers)}")


TOOL = Tool(
    "Print the names and the number of layers with 8-bit and with 16-bit activations.",
    Argument("input", "the quantized model"),
    work=print_a16w8_a8w8_nodes,
)
parse_args = TOOL.parse_args

if __name__ == "__main__":
    TOOL.run()
