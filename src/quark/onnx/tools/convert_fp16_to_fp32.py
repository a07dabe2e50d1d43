"""Convert a float16 model, or parts of one, to float32."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import ModelProto

from quark.errors import InvalidValueError
from quark.onnx.convert.floats import FLOAT16, check_type, to_float32
from quark.onnx.tools.command import EXTERNAL_DATA, Argument, ModelTool


def _converted(model: ModelProto, *, subgraphs_to_include: Sequence[str] | None) -> ModelProto:
    check_type(model, FLOAT16)
    return to_float32(model, subgraphs_to_include=[_pair(subgraph) for subgraph in subgraphs_to_include or ()])


def _pair(text: str) -> tuple[list[str], list[str]]:
    """The names of the first and of the last nodes: 'a,b:z'."""
    first, colon, last = text.partition(":")
    if not colon:
        raise InvalidValueError(
            f"--subgraphs_to_include '{text}': expected FIRST:LAST, names of nodes with commas between them; one side "
            "may be empty"
        )
    sides = [[name.strip() for name in side.split(",") if name.strip()] for side in (first, last)]
    return sides[0], sides[1]


TOOL = ModelTool(
    "Convert a float16 model to float32, inputs and outputs included.",
    Argument("--input", "the float16 model"),
    Argument("--output", "the model to write"),
    EXTERNAL_DATA,
    Argument(
        "--subgraphs_to_include",
        "Convert only the nodes between these, with Casts around them; inputs and outputs stay in float16. FIRST:LAST "
        "has names of nodes with commas between them, and one side may be empty.",
        nargs="*",
        default=None,
        metavar="FIRST:LAST",
    ),
    change=_converted,
)
parse_args, convert = TOOL.parse_args, TOOL.convert

if __name__ == "__main__":
    TOOL.run()
