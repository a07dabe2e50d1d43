"""Give the quantizers around Resize power-of-two scales."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping

import onnx

from quark.onnx.convert.integers import pos2scale, resize_to_power_of_two, scale2pos, to_power_of_two
from quark.onnx.tools.command import Argument, Tool, convert_model

__all__ = ["TOOL", "convert_resize_fs_to_pof2s", "fs_to_pof2s", "main", "parse_args", "pos2scale", "scale2pos"]


def convert_resize_fs_to_pof2s(
    input_model: str | os.PathLike[str] | onnx.ModelProto, output_model: str | os.PathLike[str] | None = None
) -> onnx.ModelProto | None:
    """Convert a model or a file. Without `output_model`, the file to write, the converted model is returned."""
    return convert_model(input_model, output_model, resize_to_power_of_two)


def fs_to_pof2s(node: onnx.NodeProto, initializer_map: Mapping[str, onnx.TensorProto]) -> None:
    """Change the scale and the zero point of a QuantizeLinear or DequantizeLinear in place, as if nothing else used
    these initializers."""
    to_power_of_two(initializer_map[node.input[1]], initializer_map[node.input[2]])


def _convert(args: Namespace) -> None:
    convert_resize_fs_to_pof2s(args.input_model, args.output_model)


TOOL = Tool(
    "Give the quantizers before and after every Resize symmetric power-of-two scales.",
    Argument("--input_model", "the quantized model"),
    Argument("--output_model", "the model to write"),
    work=_convert,
)
parse_args, main = TOOL.parse_args, TOOL.run

if __name__ == "__main__":
    main()
