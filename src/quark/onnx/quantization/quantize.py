"""`quantize_static` and `quantize_dynamic`: one call with the fields of a QuantizationConfig as arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import onnx

from quark.onnx.quantization.config.config import QuantizationConfig
from quark.onnx.quantization.config.quant_types import CalibrationMethod, QuantFormat, QuantType
from quark.onnx.quantization.quantizer import ModelQuantizer, Source
from quark.text import get_logger

__all__ = ["quantize_dynamic", "quantize_static"]

_LOG = get_logger(__name__)


def quantize_static(  # noqa: PLR0913 - the arguments of AMD Quark, in its order
    model_input: Source,
    model_output: str | os.PathLike[str] | None = None,
    calibration_data_reader: Any = None,
    calibration_data_path: str | os.PathLike[str] | None = None,
    quant_format: Any = QuantFormat.QDQ,
    calibrate_method: Any = CalibrationMethod.MinMax,
    input_nodes: list[str] | None = None,
    output_nodes: list[str] | None = None,
    op_types_to_quantize: list[str] | None = None,
    extra_op_types_to_quantize: list[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    activation_type: Any = QuantType.QInt8,
    weight_type: Any = QuantType.QInt8,
    nodes_to_quantize: list[str] | None = None,
    nodes_to_exclude: list[str] | None = None,
    subgraphs_to_exclude: list[Any] | None = None,
    optimize_model: bool = True,
    use_external_data_format: bool = False,
    execution_providers: list[str] | None = None,
    enable_dpu: bool = False,
    enable_npu_cnn: bool = False,
    enable_npu_transformer: bool = False,
    specific_tensor_precision: bool = False,
    convert_fp16_to_fp32: bool = False,
    convert_nchw_to_nhwc: bool = False,
    debug_mode: bool = False,
    crypto_mode: bool = False,
    include_cle: bool = True,
    include_sq: bool = False,
    include_rotation: bool = False,
    include_fast_ft: bool = False,
    include_auto_mp: bool = False,
    print_summary: bool = True,
    extra_options: dict[str, Any] | None = None,
) -> onnx.ModelProto | None:
    """Quantize a model with ranges from calibration data. With `model_output` the file is written there, and the report
    beside it; without it, the quantized model is returned.

    The arguments are the fields of a QuantizationConfig, where they are described; `include_cle` is on by default here.
    `enable_dpu` is a former name of `enable_npu_cnn`. Data comes from `calibration_data_reader`, else from the folder
    `calibration_data_path`, else from random numbers if the extra option UseRandomData is set; without any it is an
    error.
    """
    config = _config(locals())
    config.enable_npu_cnn = enable_npu_cnn or enable_dpu
    quantizer = ModelQuantizer(config)
    if calibration_data_reader is not None:
        if calibration_data_path is not None:
            _LOG.warning("calibration_data_path is not used, because there is a calibration_data_reader")
        return quantizer.quantize_model(model_input, model_output, calibration_data_reader)
    return quantizer.quantize_model(model_input, model_output, calibration_data_path=calibration_data_path)


def quantize_dynamic(  # noqa: PLR0913 - the arguments of AMD Quark, in its order
    model_input: Source,
    model_output: str | os.PathLike[str] | None = None,
    op_types_to_quantize: list[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    weight_type: Any = QuantType.QInt8,
    nodes_to_quantize: list[str] | None = None,
    nodes_to_exclude: list[str] | None = None,
    subgraphs_to_exclude: list[Any] | None = None,
    use_external_data_format: bool = False,
    debug_mode: bool = False,
    crypto_mode: bool = False,
    extra_options: dict[str, Any] | None = None,
) -> onnx.ModelProto | None:
    """Quantize a model whose activations are quantized at run time, which needs no data. With `model_output` the file
    is written there, and the report beside it; without it, the quantized model is returned.

    The arguments are the fields of a QuantizationConfig, where they are described.
    """
    config = _config(locals())
    config.use_dynamic_quant = True
    return ModelQuantizer(config).quantize_model(model_input, model_output)


def _config(arguments: Mapping[str, Any]) -> QuantizationConfig:
    """Return a config of those arguments that are fields of one; None leaves a field at its default."""
    fields = QuantizationConfig.__dataclass_fields__
    given = {name: value for name, value in arguments.items() if name in fields and value is not None}
    given["extra_options"] = dict(given.get("extra_options", {}))
    return QuantizationConfig(**given)
