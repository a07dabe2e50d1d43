"""Replace infinite numbers in the weights of a model."""

from __future__ import annotations

import os
from argparse import Namespace

from onnx import ModelProto

from quark.onnx.convert.floats import replace_infinities
from quark.onnx.tools.command import Argument, Tool, convert_model

DEFAULT_VALUE = 10000.0


def replace_inf_in_onnx_weights(
    input_model: str | os.PathLike[str] | ModelProto,
    output_model: str | os.PathLike[str] | None = None,
    replace_inf_value: float = DEFAULT_VALUE,
) -> ModelProto | None:
    """Replace Inf by `replace_inf_value` and -Inf by its negative, in the initializers of a model.

    The result is written to `output_model`, or returned if that is None. A ModelProto is changed in place.
    """

    def change(model: ModelProto) -> ModelProto:
        replace_infinities(model, replace_inf_value)
        return model

    return convert_model(input_model, output_model, change)


def convert(args: Namespace) -> None:
    """Convert the file `args.input_model` to `args.output_model`."""
    replace_inf_in_onnx_weights(args.input_model, args.output_model, args.replace_inf_value)


TOOL = Tool(
    "Replace Inf and -Inf in the weights of a model. A model without any is written unchanged.",
    Argument("--input_model", "the model"),
    Argument("--output_model", "the model to write"),
    Argument(
        "--replace_inf_value",
        "Inf becomes this number, and -Inf its negative; 10000 if not given",
        type=float,
        default=DEFAULT_VALUE,
    ),
    work=convert,
)

if __name__ == "__main__":
    TOOL.run()
