"""Convert a quantized model back to float: without quantizers, and with the weights that its codes stand for."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping

import onnx

from quark.onnx.convert.quantizers import split_codes, to_float, with_numbers
from quark.onnx.tools.command import Argument, Tool, convert_model


def convert_quant_to_float(
    quant_model: str | os.PathLike[str] | onnx.ModelProto, float_model: str | os.PathLike[str] | None = None
) -> onnx.ModelProto | None:
    """Convert a model or a file. Without `float_model`, the file to write, the model in float is returned."""
    return convert_model(quant_model, float_model, to_float)


def remove_quantize_dequantize_nodes(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, dict[str, str]]]:
    """Remove all quantizers. The second result says which initializers hold codes now that nothing dequantizes, and
    with what scale and zero point: `convert_initializers_to_float` takes it."""
    return split_codes(model)


def convert_initializers_to_float(
    model: onnx.ModelProto, initializers_to_convert: Mapping[str, Mapping[str, str]]
) -> onnx.ModelProto:
    """Replace codes by numbers. For each initializer the entry names 'scale' and 'zero_point', and the 'axis' of a
    scale for each channel (1 by default)."""
    return with_numbers(model, initializers_to_convert)


def _convert(args: Namespace) -> None:
    convert_quant_to_float(args.input, args.output)


TOOL = Tool(
    "Convert a quantized model to a float32 model.",
    Argument("input", "the quantized model"),
    Argument("output", "the model to write"),
    work=_convert,
)
parse_args = TOOL.parse_args

if __name__ == "__main__":
    TOOL.run()
