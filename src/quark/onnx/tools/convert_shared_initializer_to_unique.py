"""Give every node its own copy of the initializers that it reads."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence

import onnx

from quark.onnx.convert.graph_edits import unshare_initializers
from quark.onnx.tools.command import Argument, Tool, convert_file


def convert(
    onnx_model: onnx.ModelProto,
    support_op_types: Sequence[str] = (),
    prefix: str = "duplicated",
    only_bias: bool = False,
) -> onnx.ModelProto:
    """Give each reader of a shared initializer its own copy, in place.

    Applies to nodes of the operators `support_op_types`, or of all if there are none; with `only_bias`, to their third
    input. The first reader keeps the original; copies are called `prefix`, its name and a number.
    """
    return unshare_initializers(onnx_model, support_op_types or (), prefix, only_bias=only_bias)


def convert_model_file(args: Namespace) -> None:
    """Convert the file `args.input` and write it to `args.output`."""
    op_types = re.findall(r"\w+", " ".join(args.op_types or ()))
    convert_file(args.input, args.output, lambda model: convert(model, op_types))


TOOL = Tool(
    "Copy shared initializers, so that every node has its own.",
    Argument("--input", "the model"),
    Argument("--op_types", "the operators, such as Conv Gemm; all by default", nargs="*", default=[]),
    Argument("--output", "the model to write"),
    work=convert_model_file,
)
parse_args = TOOL.parse_args

if __name__ == "__main__":
    TOOL.run()
