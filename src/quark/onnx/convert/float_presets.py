"""Float models whose tensors are rounded to bfloat16 or block float, by the presets BF16 and BFP16 without data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir

from quark.errors import InvalidValueError
from quark.onnx.convert.floats import FLOAT, FLOAT16, check_type, to_bfloat16, with_float16_ports
from quark.onnx.file_graph import read_message
from quark.onnx.quantization.config import Config, get_default_config
from quark.onnx.quantization.quantizer import ModelQuantizer

BF16_FORMATS = ("bf16", "customqdq", "with_cast", "simulate_bf16")

# AMD's tools round biases as well, and leave ReduceMean as it is.
AS_AMD_DOES = {"QuantizeBias": True, "ConvertReduceMeanToGlobalAvgPool": False}

Source = str | os.PathLike[str] | onnx.ModelProto


def bfloat16_model(source: Source, format: str, *, is_float16: bool = False) -> onnx.ModelProto:
    """A model whose tensors are bfloat16, in one of AMD's formats:

        bf16             the network computes in bfloat16
        customqdq        in float32, with quantizers of com.amd.quark that round to bfloat16
        with_cast        the same with pairs of Casts
        simulate_bf16    in float32; the weights and the inputs are rounded to bfloat16, nothing else is

    `is_float16` says that the model is a float16 one: its inputs and outputs stay in float16.
    """
    if format not in BF16_FORMATS:
        raise InvalidValueError(f"format '{format}': expected one of {', '.join(BF16_FORMATS)}")
    kind = FLOAT16 if is_float16 else FLOAT
    _check(source, kind)
    if format == "bf16":
        return to_bfloat16(source if isinstance(source, onnx.ModelProto) else read_message(source)[0].filled(), kind)
    form = {"with_cast": "BF16QDQToCast", "simulate_bf16": "EnableVaimlBF16"}.get(format)
    options = AS_AMD_DOES | ({} if form is None else {form: True})
    result = _quantized(source, "BF16", options, is_converted=is_float16)
    return with_float16_ports(result) if is_float16 else result


def block_float_model(source: Source, *, is_float16: bool = False) -> onnx.ModelProto:
    """A model whose layers read BFP16 tensors: eight numbers share an exponent. A float16 model (`is_float16`) still
    computes in float16."""
    _check(source, FLOAT16 if is_float16 else FLOAT)
    return _quantized(source, "BFP16", AS_AMD_DOES | {"BlockPlacement": "all"}, is_converted=False)


def _check(source: Source, kind: ir.DataType) -> None:
    """Raise ModelError if the model has nothing of the type that is to be converted."""
    if isinstance(source, onnx.ModelProto):
        check_type(source, kind)
    else:
        check_type(read_message(source)[0].proto, kind, os.fspath(source))  # without its weights


def _quantized(source: Source, preset: str, options: Mapping[str, Any], *, is_converted: bool) -> onnx.ModelProto:
    """The model quantized by a preset, which needs no calibration data; in float32 if `is_converted`."""
    config = get_default_config(preset)
    config.extra_options.update(options)
    config.convert_fp16_to_fp32 = is_converted
    config.print_summary = False
    result = ModelQuantizer(Config(global_quant_config=config)).quantize_model(source)
    assert result is not None  # without an output path
    return result
