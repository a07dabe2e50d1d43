"""Fix the sizes of a model's inputs."""

from __future__ import annotations

from argparse import Namespace

import onnx

from quark.onnx.convert.shapes import declared_shapes, fix_input_shapes, parse_shapes
from quark.onnx.tools.command import Argument, Tool, convert_file
from quark.report.console import Console


def get_input_shapes(onnx_model: onnx.ModelProto) -> dict[str, list[int]]:
    """Shapes of the inputs by name, with 0 for a size that is not fixed."""
    return declared_shapes(onnx_model.graph.input)


def get_output_shapes(onnx_model: onnx.ModelProto) -> dict[str, list[int]]:
    """Shapes of the outputs by name, with 0 for a size that is not fixed."""
    return declared_shapes(onnx_model.graph.output)


def fix_shapes(model: onnx.ModelProto, fix_shapes_config: str) -> onnx.ModelProto:
    """Give inputs the shapes of a text such as 'input_1:[1,224,224,3];input_2:[1,96,96,3]', in place. Outputs and other
    declared tensors get the shapes that follow."""
    return fix_input_shapes(model, parse_shapes(fix_shapes_config))


def convert(args: Namespace) -> None:
    """Convert the file `args.input_model` to `args.output_model`."""

    def change(model: onnx.ModelProto) -> onnx.ModelProto:
        before = get_input_shapes(model) | get_output_shapes(model)
        fixed = fix_shapes(model, args.fix_shapes)
        for name, shape in (get_input_shapes(fixed) | get_output_shapes(fixed)).items():
            Console().say(f"{name}: {_written(before[name])} -> {_written(shape)}")
        return fixed

    convert_file(args.input_model, args.output_model, change)


def _written(shape: list[int]) -> str:
    return f"[{', '.join(str(size or '?') for size in shape)}]"


TOOL = Tool(
    "Fix the sizes of a model's inputs.",
    Argument("--fix_shapes", "the shapes of inputs, such as 'input_1:[1,224,224,3];input_2:[1,96,96,3]'"),
    Argument("input_model", "the model"),
    Argument("output_model", "the model to write"),
    work=convert,
)
convert_dynamic_to_fix = TOOL.run

if __name__ == "__main__":
    convert_dynamic_to_fix()
