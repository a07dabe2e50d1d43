"""What both kinds of config come to, on the way to Settings.

    QuantizationConfig, QConfig   ->   RunFields       what is about the whole run
    QuantizationConfig            ->   QLayerConfig    its types and methods, as a QConfig gives them

`options` turns these into Settings; nothing is turned back into a config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.onnx.quantization.config.algorithm_options import fields_and_options
from quark.onnx.quantization.config.config import QConfig, QuantizationConfig, exclusions
from quark.onnx.quantization.config.data_type import DataType
from quark.onnx.quantization.config.options_of_algorithms import (
    BIAS_CORRECTION,
    CROSS_LAYER,
    FINETUNE,
    MIXED_PRECISION,
    SMOOTH,
)
from quark.onnx.quantization.config.quant_types import (
    CalibrationMethod,
    ExtendedCalibrationMethod,
    Int16Method,
    LayerWiseMethod,
    PowerOfTwoMethod,
    QuantFormat,
    format_of_type,
)
from quark.onnx.quantization.config.spec import CalibMethod, QLayerConfig, QTensorConfig, QuantGranularity, ScaleType

_METHODS: Mapping[Any, tuple[CalibMethod, ScaleType]] = {
    CalibrationMethod.MinMax: (CalibMethod.MinMax, ScaleType.Float32),
    CalibrationMethod.Entropy: (CalibMethod.Entropy, ScaleType.Float32),
    CalibrationMethod.Percentile: (CalibMethod.Percentile, ScaleType.Float32),
    CalibrationMethod.Distribution: (CalibMethod.Distribution, ScaleType.Float32),
    LayerWiseMethod.LayerWisePercentile: (CalibMethod.LayerwisePercentile, ScaleType.Float32),
    ExtendedCalibrationMethod.MinMSE: (CalibMethod.MinMSE, ScaleType.Float32),
    PowerOfTwoMethod.NonOverflow: (CalibMethod.MinMax, ScaleType.PowerOf2),
    PowerOfTwoMethod.MinMSE: (CalibMethod.MinMSE, ScaleType.PowerOf2),
    Int16Method.MinMax: (CalibMethod.MinMax, ScaleType.Int16),
}


@dataclass(frozen=True)
class RunFields:
    """The settings of a whole run, with the names and defaults of QuantizationConfig. In a QConfig, specs replace
    `per_channel` and `specific_tensor_precision`."""

    quant_format: Any = QuantFormat.QDQ
    input_nodes: Sequence[str] = ()
    output_nodes: Sequence[str] = ()
    op_types_to_quantize: Sequence[str] = ()
    nodes_to_quantize: Sequence[str] = ()
    extra_op_types_to_quantize: Sequence[str] = ()
    nodes_to_exclude: Sequence[str] = ()
    subgraphs_to_exclude: Sequence[Any] = ()
    specific_tensor_precision: bool = False
    execution_providers: Sequence[str] = ("CPUExecutionProvider",)
    per_channel: bool = False
    reduce_range: bool = False
    optimize_model: bool = True
    use_external_data_format: bool = False
    convert_fp16_to_fp32: bool = False
    convert_nchw_to_nhwc: bool = False
    include_sq: bool = False
    include_rotation: bool = False
    include_cle: bool = False
    include_auto_mp: bool = False
    include_fast_ft: bool = False
    enable_npu_cnn: bool = False
    enable_npu_transformer: bool = False
    debug_mode: bool = False
    crypto_mode: bool = False
    print_summary: bool = True
    ignore_warnings: bool = True
    log_severity_level: int | None = 1
    extra_options: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(config: QuantizationConfig) -> RunFields:
        """The fields of a flat config that have these names."""
        return RunFields(**{each.name: getattr(config, each.name) for each in fields(RunFields)})

    @staticmethod
    def by_tensor(config: QConfig) -> RunFields:
        """The fields that a QConfig implies. Its algorithms become the fields and extra options that ask for the same;
        power-of-two scales for all tensors imply the NPU, which their spec is made for."""
        algorithms, extra_options = fields_and_options(config.algo_config, config.extra_options)
        layer = config.global_config
        if not isinstance(layer, QLayerConfig):
            raise UnsupportedTypeError(f"global_config: expected a QLayerConfig, got {layer!r}")
        tensors = (layer.inputs, layer.weight)
        has_power_of_two = all(tensor is not None and tensor.scale_type is ScaleType.PowerOf2 for tensor in tensors)
        nodes, subgraphs = exclusions(config.exclude)
        return RunFields(
            nodes_to_exclude=nodes,
            subgraphs_to_exclude=subgraphs,
            use_external_data_format=config.use_external_data_format,
            enable_npu_cnn=has_power_of_two and config.extra_options.get("EnableNPUCnn", True),
            extra_options=extra_options,
            **algorithms,
        )

    @property
    def switched_on(self) -> frozenset[str]:
        """The fields and extra options that turn an algorithm on."""
        names = [name for name in (CROSS_LAYER, SMOOTH, MIXED_PRECISION, FINETUNE) if getattr(self, name)]
        return frozenset([*names, BIAS_CORRECTION] if self.extra_options.get(BIAS_CORRECTION) else names)


def layer_of(config: QuantizationConfig, values: Mapping[str, Any]) -> QLayerConfig:
    """The types and methods of a config. Where nothing is said of symmetry, activations are asymmetric, signed weights
    symmetric, unsigned ones not, as in ONNX Runtime; power-of-two scales are always symmetric."""
    method, scale_type = _METHODS[config.calibrate_method]
    weight_method = method
    if scale_type is ScaleType.Float32:
        weight_method, weight_scale = _METHODS[values.get("WeightCalibrateMethod", CalibrationMethod.MinMax)]
        if weight_scale is not ScaleType.Float32:
            raise InvalidValueError(
                f"option 'WeightCalibrateMethod' = {values['WeightCalibrateMethod']} with float scales of "
                f"{config.calibrate_method}: expected a member of CalibrationMethod or ExtendedCalibrationMethod.MinMSE"
            )
    is_unsigned = format_of_type(config.weight_type).startswith("u")
    granularity = QuantGranularity.Channel if config.per_channel else QuantGranularity.Tensor
    activation = QTensorConfig(
        values.get("ActivationSymmetric", False),
        scale_type,
        method,
        QuantGranularity.Tensor,
        data_type_of(config.activation_type),
    )
    weight = QTensorConfig(
        values.get("WeightSymmetric", not is_unsigned),
        scale_type,
        weight_method,
        granularity,
        data_type_of(config.weight_type),
    )
    return QLayerConfig(activation=activation, weight=weight)


def data_type_of(quant_type: Any) -> DataType:
    """A quant type as a spec names it."""
    return DataType(f"{type(quant_type).__name__}.{quant_type.name}", quant_type)
