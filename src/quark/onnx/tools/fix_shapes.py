"""Declare the shape of every tensor of a model."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray

from quark.onnx.convert import shapes
from quark.onnx.tools.command import EXTERNAL_DATA, Argument, Tool, convert_file, read_model


def parse_input_and_output_shapes(fix_shapes: str) -> dict[str, list[int]]:
    """Shapes by name, of a text such as 'input_1:[1,224,224,3];output_1:[1,1000]'."""
    return {name: list(shape) for name, shape in shapes.parse_shapes(fix_shapes).items()}


def fix_input_and_output_shapes(model_input: str | Path | onnx.ModelProto, fix_shapes: str) -> onnx.ModelProto:
    """Give inputs and outputs the shapes of a text such as 'input_1:[1,224,224,3];output_1:[1,1000]'. Those that it
    does not mention stay, or get what follows from the others."""
    return shapes.fix_input_and_output_shapes(_opened(model_input), shapes.parse_shapes(fix_shapes))


def generate_random_data(model_input: str | Path | onnx.ModelProto) -> dict[str, NDArray[Any]]:
    """Random numbers from 0 to 1 for every input of the model, as its type."""
    return shapes.random_feeds(_opened(model_input))


def infer_all_tensors_shape(
    model_input: str | Path | onnx.ModelProto, save_as_external_data: bool = False
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that nodes compute: inferred, or else observed in ONNX Runtime. Those that depend on the
    data are left out. `save_as_external_data` changes nothing: models of any size are accepted."""
    return shapes.tensor_shapes(_opened(model_input))


def save_all_tensors_shape(
    model_input: str | Path | onnx.ModelProto, tensor_name_shape_dict: Mapping[str, Sequence[int]]
) -> onnx.ModelProto:
    """Declare these shapes of tensors in the model."""
    return shapes.declare_shapes(_opened(model_input), tensor_name_shape_dict)


def find_nms(model: onnx.ModelProto) -> list[str]:
    """Names of the NonMaxSuppression nodes, behind which shapes depend on the data."""
    return [node.name for node in model.graph.node if node.op_type == "NonMaxSuppression"]


def fix_shapes(args: Namespace) -> None:
    """Declare all shapes of the file `args.input_model_path` and write it to `args.output_model_path`."""

    def change(model: onnx.ModelProto) -> onnx.ModelProto:
        if args.fix_shapes:
            model = fix_input_and_output_shapes(model, args.fix_shapes)
        return shapes.assign_shapes(model)

    convert_file(args.input_model_path, args.output_model_path, change, has_external_data=args.save_as_external_data)


def _opened(model: str | Path | onnx.ModelProto) -> onnx.ModelProto:
    return model if isinstance(model, onnx.ModelProto) else read_model(model)


TOOL = Tool(
    "Declare the shape of every tensor of a model.",
    Argument("--input_model_path", "the model"),
    Argument("--output_model_path", "the model to write"),
    Argument(
        "--fix_shapes",
        "shapes of inputs and outputs, such as 'input_1:[1,224,224,3];output_1:[1,1000]', if the model leaves sizes "
        "of inputs open",
        default=None,
    ),
    EXTERNAL_DATA,
    work=fix_shapes,
)
parse_args = TOOL.parse_args

if __name__ == "__main__":
    TOOL.run()
