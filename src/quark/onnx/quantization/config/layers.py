"""The two kinds of config as one: a QuantizationConfig's types and methods as a QLayerConfig, a QConfig's as fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.onnx.quantization.config.config import QConfig, QuantizationConfig
from quark.onnx.quantization.config.data_type import DataType
from quark.onnx.quantization.config.field_checks import is_subgraph
from quark.onnx.quantization.config.quant_types import (
    CalibrationMethod,
    ExtendedCalibrationMethod,
    Int16Method,
    LayerWiseMethod,
    PowerOfTwoMethod,
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


def fields_of(config: QConfig) -> QuantizationConfig:
    """The fields that a QConfig implies. Power-of-two scales for all mean the NPU, as their spec is made for it."""
    layer = config.global_config
    if not isinstance(layer, QLayerConfig):
        raise UnsupportedTypeError(f"global_config: expected a QLayerConfig, got {layer!r}")
    tensors = (layer.inputs, layer.weight)
    has_power_of_two = all(tensor is not None and tensor.scale_type is ScaleType.PowerOf2 for tensor in tensors)
    nodes, subgraphs = _exclusions(config.exclude)
    return QuantizationConfig(
        nodes_to_exclude=nodes,
        subgraphs_to_exclude=subgraphs,
        use_external_data_format=config.use_external_data_format,
        enable_npu_cnn=has_power_of_two and config.extra_options.get("EnableNPUCnn", True),
        extra_options=config.extra_options,
    )


def _exclusions(exclude: Any) -> tuple[list[str], list[Any]]:
    nodes: list[str] = []
    subgraphs: list[Any] = []
    for each in [exclude] if isinstance(exclude, str) else exclude:
        if isinstance(each, str):
            nodes.append(each)
        elif is_subgraph(each):
            subgraphs.append(each)
        elif isinstance(each, list) and all(map(is_subgraph, each)):
            subgraphs.extend(each)
        else:
            raise InvalidValueError(
                f"exclude: {each!r}, expected a name, a regular expression, or for a subgraph a pair "
                "(['first'], ['last'])"
            )
    return nodes, subgraphs
