"""Convert a float32 model to float16."""

from __future__ import annotations

from onnx import ModelProto

from quark.onnx.convert.floats import FLOAT, check_type, to_float16
from quark.onnx.tools.command import EXTERNAL_DATA, Argument, ModelTool


def _converted(model: ModelProto, *, not_simplify: bool, all_tensors_to_one_file: bool, **options: bool) -> ModelProto:
    del all_tensors_to_one_file  # they always are
    check_type(model, FLOAT)
    return to_float16(model, is_simplified=not not_simplify, **options)


TOOL = ModelTool(
    "Convert a float32 model to float16. Operators that have no float16 form stay in float32, between Casts.",
    Argument("input", "the float32 model"),
    Argument("output", "the model to write"),
    Argument("--keep_io_types", "Inputs and outputs stay in float32.", action="store_true"),
    Argument("--disable_shape_infer", "The model declares the types of all tensors.", action="store_true"),
    EXTERNAL_DATA,
    Argument(
        "--all_tensors_to_one_file",
        "Weights beside the model are in one file, with or without this.",
        action="store_true",
    ),
    Argument("--not_simplify", "Do not fold constants, nor remove nodes without effect.", action="store_true"),
    change=_converted,
)
parse_args, convert = TOOL.parse_args, TOOL.convert

if __name__ == "__main__":
    TOOL.run()
