"""From the types and methods of a config to LayerSpecs, which the choosing of quantizers reads.

    QuantizationConfig   ->   QLayerConfig   ->   LayerSpec
    QConfig              ->

    scale     method          becomes
    Float32   any             integers by that method; weights by MinMax where the method says Percentile
    PowerOf2  MinMax, MinMSE  integers by NonOverflow, PowerOfTwoMinMSE; always symmetric, one scale for a tensor
    PowerOf2  any other       the range of that method, at the smallest power of two that clips nothing of it
    Int16     any             as Float32, with scales rounded to a 16-bit integer over a power of two

The exception for weights: Percentile is the default of every spec, and clipping weights costs more than it gains.

The default bias: with integers around it, int32 at the product of the activation's and the weight's scales (an
AffineSpec of int32 stands for that); with blocks or floats, none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quark.decide.options import BlockPlacement, TensorOverride
from quark.decide.specs import AffineSpec, BlockSpec, FloatSpec, GroupRule, LayerSpec, TensorSpec, is_measured
from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError
from quark.formats.spec import ScaleRule
from quark.onnx.quantization.config.config import QuantizationConfig
from quark.onnx.quantization.config.data_type import BLOCK_OPERATORS, DataType
from quark.onnx.quantization.config.option_kinds import GROUP_SIZES
from quark.onnx.quantization.config.option_treatments import Draft
from quark.onnx.quantization.config.quant_types import (
    CalibrationMethod,
    ExtendedCalibrationMethod,
    ExtendedQuantType,
    Int16Method,
    LayerWiseMethod,
    PowerOfTwoMethod,
    format_of_type,
)
from quark.onnx.quantization.config.spec import CalibMethod, QLayerConfig, QTensorConfig, QuantGranularity, ScaleType
from quark.ops.schema import quantizer_of
from quark.ranges import (
    Distribution,
    Entropy,
    LayerwisePercentile,
    MinMax,
    MinMSE,
    NonOverflow,
    Percentile,
    PowerOfTwoMinMSE,
    PowerOfTwoPercentile,
    PowerOfTwoRange,
    RangeMethod,
)

MX_OPERATOR, BFP_OPERATOR = "MXQuantizeDequantize", "BFPQuantizeDequantize"
NVFP4_OPERATOR = "FloatScaleQuantizeDequantize"
ATTRIBUTE_OPTIONS = {
    MX_OPERATOR: "MXAttributes",
    BFP_OPERATOR: "BFPAttributes",
    NVFP4_OPERATOR: "NVFP4Attributes",
}
MOVING_AVERAGE_CONSTANT = 0.01
_CASTS = {"float16": "QFloat16", "bfloat16": "QBFloat16"}
_FLOATS = {**_CASTS, "fp8_e4m3": "QFloat8E4M3FN", "fp8_e5m2": "QFloat8E5M2"}
_GROUPED = ("int4", "uint4", "int8", "uint8")  # types whose blocks the standard DequantizeLinear supports

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
    """The types and methods of a config. By default activations are asymmetric, signed weights symmetric and unsigned
    ones not, as in ONNX Runtime; power-of-two scales are always symmetric."""
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
    activation = QTensorConfig(
        values.get("ActivationSymmetric", False),
        scale_type,
        method,
        QuantGranularity.Tensor,
        data_type_of(config.activation_type),
    )
    group_size = values.get("WeightGroupSize")
    granularity = QuantGranularity.Channel if config.per_channel else QuantGranularity.Tensor
    weight = QTensorConfig(
        values.get("WeightSymmetric", not is_unsigned),
        scale_type,
        weight_method,
        granularity if group_size is None else QuantGranularity.Group,
        data_type_of(config.weight_type),
        group_size,
    )
    return QLayerConfig(activation=activation, weight=weight)


def data_type_of(quant_type: Any) -> DataType:
    """A quant type as a spec names it."""
    return DataType(f"{type(quant_type).__name__}.{quant_type.name}", quant_type)


@dataclass(frozen=True)
class SpecOptions:
    """The extra options that shape specs. Where a bias option is None, the kind of numbers decides."""

    percentile: float = 99.999
    layerwise: LayerwisePercentile = field(default_factory=LayerwisePercentile)
    moving_average: float | None = None
    power_of_two_min_mse: RangeMethod = field(default_factory=PowerOfTwoMinMSE)
    weight_min_mse: RangeMethod = field(default_factory=MinMSE)  # for weights with float scales
    has_reduced_range: bool = False
    is_saturating: bool = False
    follows_reduction: bool = True
    weight_scale_rule: ScaleRule | None = None  # for OCP blocks; None: the rule in the attributes
    is_activation_scaled: bool = False
    is_weight_scaled: bool = False
    has_quantized_bias: bool | None = None
    has_int32_bias: bool = True
    has_int16_bias: bool = False
    has_int16_scale: bool = False
    block_placement: BlockPlacement = BlockPlacement.COMPUTE
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)  # by operator: MXAttributes, BFPAttributes
    has_calibrated_tensor_scales: bool = False
    weight_attributes: dict[str, Any] | None = None  # WeightMXAttributes: of weights in MX, instead of the above


# MinMSEModeFloatScale. Without it the histogram decides, which is as good as all values for all but tiny weights.
_WEIGHT_MIN_MSE: Mapping[str, RangeMethod] = {
    "Percentile": LayerwisePercentile((99.9, 99.99, 99.999, 99.9999), is_exact=True),
    "HistCenter": MinMSE(),
    "All": MinMSE(is_exact=True),
}


def _power_of_two_min_mse(values: Mapping[str, Any], percentile: float) -> RangeMethod:
    mode = values.get("MinMSEModePof2Scale", "All")
    if mode == "Percentile":
        return PowerOfTwoPercentile(values.get("Percentile", percentile))
    return PowerOfTwoMinMSE(has_most_common=mode == "MostCommon")


def spec_options(draft: Draft) -> SpecOptions:
    """The typed options. By default the NPU's convolutions take biases of 8 bits."""
    values, defaults = draft.spec_values, SpecOptions()
    constant = values.get("CalibMovingAverageConstant", MOVING_AVERAGE_CONSTANT)
    return SpecOptions(
        percentile=values.get("Percentile", defaults.percentile),
        layerwise=LayerwisePercentile(
            tuple(values.get("PercentileCandidates", defaults.layerwise.candidates)),
            is_squared=values.get("LWPMetric", "mse") == "mse",
            is_exact=not values.get("LWPUseHistogram", True),
        ),
        moving_average=constant if values.get("CalibMovingAverage", False) else None,
        power_of_two_min_mse=_power_of_two_min_mse(values, defaults.percentile),
        weight_min_mse=_WEIGHT_MIN_MSE[values.get("MinMSEModeFloatScale", "HistCenter")],
        has_reduced_range=draft.run.reduce_range,
        is_saturating=values.get("BF16WithClip", False),
        follows_reduction=values.get("RefineBlockAxis", True),
        weight_scale_rule=ScaleRule(values["WeightScaleRule"]) if "WeightScaleRule" in values else None,
        is_activation_scaled=values.get("ActivationScaled", False),
        is_weight_scaled=values.get("WeightScaled", False),
        has_quantized_bias=values.get("QuantizeBias"),
        has_int32_bias=values.get("Int32Bias", not draft.run.enable_npu_cnn),
        has_int16_bias=values.get("Int16Bias", False),
        has_int16_scale=values.get("Int16Scale", False),
        block_placement=draft.of("choose").get("block_placement", defaults.block_placement),
        attributes={op: dict(values[option]) for op, option in ATTRIBUTE_OPTIONS.items() if option in values},
        has_calibrated_tensor_scales=values.get("TensorScale") == "calibrated",
        weight_attributes=dict(values["WeightMXAttributes"]) if "WeightMXAttributes" in values else None,
    )


def layer_spec(layer: QLayerConfig, options: SpecOptions, base: LayerSpec | None = None) -> LayerSpec:
    """The spec that the layer config requests, completed from `base`."""
    for place in ("input_tensors", "activation", "weight", "bias", "output_tensors"):
        value = getattr(layer, place)
        if value is not None and not isinstance(value, QTensorConfig):
            raise UnsupportedTypeError(f"QLayerConfig.{place}: expected a spec such as Int8Spec(), got {value!r}")
    if base is None and (layer.inputs is None or layer.weight is None):
        raise InvalidValueError("global_config: expected specs for input_tensors (or activation) and for weight")
    usual = base or LayerSpec(None, None)
    activation = _activation(layer.inputs, options) if layer.inputs else usual.activation
    weight = _weight(layer.weight, options) if layer.weight else usual.weight
    bias: TensorSpec | None = usual_bias(activation, weight, options)
    if layer.bias:
        bias = tensor_spec(layer.bias, options, is_scaled=False)
        if (isinstance(bias, FloatSpec) and bias.is_eight_bits) or layer.bias.group_size is not None:
            raise InvalidValueError(f"bias of {layer.bias.data_type}: biases have no 8-bit floats and no groups")
        if isinstance(bias, AffineSpec) and bias.format == "int32":
            bias = AffineSpec("int32")
        elif isinstance(bias, AffineSpec) and not bias.is_power_of_two:
            bias = replace(bias, method=MinMax())
    output = _activation(layer.output_tensors, options) if layer.output_tensors else None
    return LayerSpec(activation, weight, bias, None if output == activation else output)


def _activation(tensor: QTensorConfig, options: SpecOptions) -> TensorSpec:
    if tensor.quant_granularity is not QuantGranularity.Tensor:
        raise InvalidValueError(f"{tensor.quant_granularity} for activations: they have one scale; use it for weights")
    return tensor_spec(tensor, options, options.is_activation_scaled)


def _weight(tensor: QTensorConfig, options: SpecOptions) -> TensorSpec:
    if options.weight_attributes is not None and tensor.data_type.operator == MX_OPERATOR:
        options = replace(options, attributes={**options.attributes, MX_OPERATOR: options.weight_attributes})
    spec = tensor_spec(tensor, options, options.is_weight_scaled)
    if isinstance(spec, FloatSpec):
        rule = options.weight_scale_rule
        if spec.is_eight_bits and rule not in (None, ScaleRule.FLOOR, ScaleRule.MSE):
            raise InvalidValueError(
                f"option 'WeightScaleRule' {rule.value!r} with weights of {spec.format}: their scales are any numbers; "
                "use 'mse', or 'floor' for the largest magnitude at the largest code"
            )
        return replace(spec, method=MinMax(), has_searched_scales=spec.is_eight_bits and rule is ScaleRule.MSE)
    if isinstance(spec, BlockSpec) and options.weight_scale_rule and tensor.data_type.operator != BFP_OPERATOR:
        return replace(spec, quantizer=replace(spec.quantizer, scale_rule=options.weight_scale_rule))
    if not isinstance(spec, AffineSpec):
        return spec
    if options.has_reduced_range:
        if spec.is_power_of_two:
            raise InvalidValueError("reduce_range with power-of-two scales: they are of the full range; leave it out")
        spec = replace(spec, has_reduced_range=True)
    if isinstance(spec.method, Percentile) or spec.method == MinMax(options.moving_average):
        spec = replace(spec, method=MinMax())
    elif isinstance(spec.method, PowerOfTwoRange) and isinstance(spec.method.method, Percentile):
        spec = replace(spec, method=NonOverflow())
    elif spec.method == MinMSE():
        spec = replace(spec, method=options.weight_min_mse)
    return spec


def usual_bias(
    activation: TensorSpec | None, weight: TensorSpec | None, options: SpecOptions
) -> AffineSpec | BlockSpec | FloatSpec | None:
    """The bias of a layer whose config has none."""
    if options.has_quantized_bias is False:
        return None
    if isinstance(weight, FloatSpec) and weight.is_eight_bits:
        if options.has_quantized_bias:
            raise InvalidValueError(f"option 'QuantizeBias' with weights of {weight.format}: their biases stay float")
        return None
    if not isinstance(activation, AffineSpec) or not isinstance(weight, AffineSpec):
        is_wanted = options.has_quantized_bias or options.block_placement is BlockPlacement.ALL
        return weight if is_wanted and isinstance(weight, (BlockSpec, FloatSpec)) else None
    if options.has_int32_bias and not options.has_int16_bias:
        return AffineSpec("int32")
    wanted = "int16" if options.has_int16_bias else weight.format
    is_symmetric = weight.is_symmetric or not wanted.startswith("u")
    return AffineSpec(
        wanted,
        weight.method,
        is_symmetric,
        is_power_of_two=weight.is_power_of_two,
        has_int16_scale=weight.has_int16_scale,
    )


def tensor_spec(tensor: QTensorConfig, options: SpecOptions, is_scaled: bool) -> TensorSpec:
    """The spec of one tensor, whatever its place."""
    data_type = tensor.data_type
    if not isinstance(data_type, DataType):
        raise UnsupportedTypeError(f"data_type {data_type!r}: expected one of quark.onnx.quantization.config.data_type")
    operator = data_type.operator
    if (tensor.quant_granularity is QuantGranularity.Group) != (tensor.group_size is not None):
        raise InvalidValueError(
            f"{tensor.quant_granularity} with group_size {tensor.group_size}: QuantGranularity.Group goes with the "
            "size of a group, such as 32 (option WeightGroupSize)"
        )
    if tensor.group_size is not None:
        return _grouped_spec(tensor)
    if operator is None and data_type.format in _CASTS:
        return FloatSpec(data_type.format, options.is_saturating, is_scaled)
    if operator is None and data_type.format in _FLOATS:
        return _float8_spec(tensor, options)
    if operator is None:
        is_per_channel = tensor.quant_granularity is QuantGranularity.Channel
        is_power_of_two = tensor.scale_type is ScaleType.PowerOf2
        if is_power_of_two and is_per_channel:
            raise InvalidValueError(
                "per_channel with power-of-two scales: they are one for a tensor; leave one of the two out"
            )
        return AffineSpec(
            data_type.format,
            range_method(tensor, options),
            tensor.symmetric or is_power_of_two,
            is_per_channel,
            is_power_of_two,
            has_int16_scale=tensor.scale_type is ScaleType.Int16 or (options.has_int16_scale and not is_power_of_two),
        )
    if is_scaled:
        raise UnsupportedOptionError(
            f"ActivationScaled or WeightScaled with {data_type}: its blocks have scales of their own; leave it out"
        )
    attributes = {**data_type.attributes, **options.attributes.get(operator, {})}
    try:
        quantizer, axis, to_bfloat16_first = quantizer_of(operator, attributes)
    except (InvalidValueError, UnsupportedTypeError) as error:
        raise type(error)(f"option '{ATTRIBUTE_OPTIONS[operator]}': {error}") from error
    return BlockSpec(
        quantizer, axis, options.follows_reduction, to_bfloat16_first, options.has_calibrated_tensor_scales
    )


def _grouped_spec(tensor: QTensorConfig) -> AffineSpec:
    """A weight with scales for groups. Where MatMul, Gemm and Conv sum over too few elements for a group, placement
    gives 8 bits with a scale for each channel."""
    name, size = tensor.data_type.format, tensor.group_size
    if name not in _GROUPED or tensor.scale_type is not ScaleType.Float32:
        raise InvalidValueError(
            f"groups of {size} with {tensor.data_type} and {tensor.scale_type}: expected {', '.join(_GROUPED)} with "
            "ScaleType.Float32"
        )
    if isinstance(size, bool) or not isinstance(size, int) or size not in GROUP_SIZES:
        raise InvalidValueError(f"group_size {size!r}: expected {', '.join(map(str, GROUP_SIZES))}")
    return AffineSpec(name, is_symmetric=tensor.symmetric, group_size=size, group_rule=GroupRule.SEARCHED)


def _float8_spec(tensor: QTensorConfig, options: SpecOptions) -> FloatSpec:
    if tensor.scale_type is not ScaleType.Float32:
        raise InvalidValueError(f"{tensor.data_type} with {tensor.scale_type}: its scale is any number; use Float32")
    if tensor.calibration_method not in (CalibMethod.MinMax, CalibMethod.Percentile):
        raise InvalidValueError(
            f"{tensor.data_type} with {tensor.calibration_method}: that method weighs the steps of integers, and "
            "floats have none; use MinMax or Percentile"
        )
    is_per_channel = tensor.quant_granularity is QuantGranularity.Channel
    method = range_method(tensor, options)
    return FloatSpec(
        tensor.data_type.format, is_saturating=True, is_scaled=True, is_per_channel=is_per_channel, method=method
    )


def draft_overrides(draft: Draft, options: SpecOptions, default: LayerSpec) -> None:
    """Complete the types that single tensors are given by name: MixedPrecisionTensor is another way to write
    TensorQuantOverrides. A type gets its whole spec, unless it is an integer type that only replaces another one."""
    by_type = draft.spec_values.get("MixedPrecisionTensor")
    if by_type and not draft.run.specific_tensor_precision:
        draft.remarks.append("MixedPrecisionTensor: specific_tensor_precision is False, so it is not used")
    elif by_type:
        typed = [(tensor, quant_type) for quant_type, tensors in by_type.items() for tensor in tensors]
        draft.put("choose", "overrides", tuple(TensorOverride(name, format_of_type(dtype)) for name, dtype in typed))
    fields = draft.of("choose")
    if "overrides" in fields:
        fields["overrides"] = tuple(_with_spec(override, options, default) for override in fields["overrides"])


def _with_spec(override: TensorOverride, options: SpecOptions, default: LayerSpec) -> TensorOverride:
    if override.converted is not None:
        override = replace(override, converted=_with_spec(override.converted, options, default))
    fmt = override.format
    if fmt is None:
        return override
    if fmt not in BLOCK_OPERATORS and fmt not in _FLOATS:
        are_integers = isinstance(default.activation, AffineSpec) and isinstance(default.weight, AffineSpec)
        integers = AffineSpec(fmt, is_symmetric=not fmt.startswith("u"))
        return override if are_integers else replace(override, spec=integers)
    subject = f"option 'TensorQuantOverrides.{override.tensor}'"
    of_integers = (override.is_symmetric, override.range, override.scale, override.has_reduced_range)
    if any(setting is not None for setting in of_integers):
        raise InvalidValueError(f"{subject}: {fmt} has no range or zero point to set; give quant_type alone")
    data_type = data_type_of(ExtendedQuantType[_FLOATS.get(fmt, fmt)])
    tensor = QTensorConfig(True, ScaleType.Float32, CalibMethod.MinMax, QuantGranularity.Tensor, data_type)
    spec = tensor_spec(tensor, options, is_scaled=False)
    if override.axis is not None:
        if not isinstance(spec, BlockSpec):
            raise InvalidValueError(f"{subject}: {fmt} has no axis; give quant_type alone")
        spec = replace(spec, axis=override.axis, follows_reduction=False)
    return replace(override, spec=spec)


def range_method(tensor: QTensorConfig, options: SpecOptions) -> RangeMethod:
    """The method for the range of a tensor, from its scale type and calibration method."""
    float_methods: dict[CalibMethod, RangeMethod] = {
        CalibMethod.MinMax: MinMax(options.moving_average),
        CalibMethod.MinMSE: MinMSE(),
        CalibMethod.Percentile: Percentile(options.percentile),
        CalibMethod.Entropy: Entropy(),
        CalibMethod.LayerwisePercentile: options.layerwise,
        CalibMethod.Distribution: Distribution(),
    }
    power_of_two_methods: dict[CalibMethod, RangeMethod] = {
        **{name: PowerOfTwoRange(method) for name, method in float_methods.items()},
        CalibMethod.MinMax: NonOverflow(),
        CalibMethod.MinMSE: options.power_of_two_min_mse,
    }
    methods = power_of_two_methods if tensor.scale_type is ScaleType.PowerOf2 else float_methods
    if tensor.calibration_method not in methods:
        raise InvalidValueError(
            f"{tensor.calibration_method} with {tensor.scale_type}: expected {' or '.join(map(str, methods))}"
        )
    return methods[tensor.calibration_method]


# ---------------------------------------------------------------- options that have nothing to act on
@dataclass(frozen=True)
class _Relevance:
    """When an option matters: if these places have specs of a kind; and the remark if there are none."""

    is_user: Callable[[TensorSpec | None], bool]
    reason: str
    places: tuple[str, ...] = ("activation", "weight", "bias", "output")
    idle: Any = False  # the value without an effect


def _method_is(*classes: type) -> Callable[[TensorSpec | None], bool]:
    def is_user(spec: TensorSpec | None) -> bool:
        method = spec.method if spec is not None and is_measured(spec) else None
        return isinstance(method.method if isinstance(method, PowerOfTwoRange) else method, classes)

    return is_user


def _operator_is(operator: str) -> Callable[[TensorSpec | None], bool]:
    def is_user(spec: TensorSpec | None) -> bool:
        if not isinstance(spec, BlockSpec):
            return False
        fmt = spec.quantizer.format
        if fmt.scale is not None:
            return operator == NVFP4_OPERATOR
        is_bfp = fmt.sub_blocks is not None or fmt.name.startswith(("bfp", "block_float"))
        return operator == (BFP_OPERATOR if is_bfp else MX_OPERATOR)

    return is_user


def _is_integer(spec: TensorSpec | None) -> bool:
    return isinstance(spec, AffineSpec)


def _is_power_of_two(spec: TensorSpec | None) -> bool:
    return isinstance(spec, AffineSpec) and spec.is_power_of_two


_ACTIVATIONS = ("activation", "output")
_FLOAT = _Relevance(
    lambda spec: isinstance(spec, FloatSpec) and not spec.is_eight_bits, "no tensor is float16 or bfloat16"
)
_LAYERWISE = _Relevance(_method_is(LayerwisePercentile), "no range is found by LayerwisePercentile", _ACTIVATIONS)
_INTEGER_BIAS = _Relevance(_is_integer, "no bias is of integers", ("bias",))
_RELEVANT: Mapping[str, _Relevance] = {
    "Percentile": _Relevance(_method_is(Percentile, PowerOfTwoPercentile), "no range is found by Percentile"),
    "PercentileCandidates": _LAYERWISE,
    "LWPMetric": _LAYERWISE,
    "LWPUseHistogram": replace(_LAYERWISE, idle=True),
    "MinMSEModeFloatScale": _Relevance(
        _method_is(MinMSE, LayerwisePercentile),
        "no weight has a float scale that is found by MinMSE (WeightCalibrateMethod)",
        ("weight",),
    ),
    # ranges of weights may be found by MinMax, too, but never by an average
    "CalibMovingAverage": _Relevance(
        lambda spec: (
            spec is not None
            and is_measured(spec)
            and isinstance(spec.method, MinMax)
            and spec.method.moving_average is not None
        ),
        "no activation's range is found by MinMax",
    ),
    "CalibMovingAverageConstant": _Relevance(_method_is(MinMax), "no activation's range is found by MinMax"),
    "MinMSEModePof2Scale": _Relevance(
        _method_is(PowerOfTwoMinMSE, PowerOfTwoPercentile), "no range is found by PowerOfTwoMethod.MinMSE"
    ),
    "WeightCalibrateMethod": _Relevance(
        lambda spec: _is_integer(spec) and not _is_power_of_two(spec),
        "no weight is of integers with a float scale",
        ("weight",),
    ),
    "MXAttributes": _Relevance(_operator_is(MX_OPERATOR), "no tensor is of type QMX"),
    "WeightMXAttributes": _Relevance(_operator_is(MX_OPERATOR), "no weight is of type QMX", ("weight",)),
    "WeightScaleRule": _Relevance(
        lambda spec: (
            _operator_is(MX_OPERATOR)(spec)
            or _operator_is(NVFP4_OPERATOR)(spec)
            or (isinstance(spec, FloatSpec) and spec.is_eight_bits)
        ),
        "no weight is of type QMX, QNVFP4 or an 8-bit float",
        ("weight",),
    ),
    "NVFP4Attributes": _Relevance(_operator_is(NVFP4_OPERATOR), "no tensor is of type QNVFP4"),
    "TensorScale": _Relevance(
        _operator_is(NVFP4_OPERATOR), "no activation is of type QNVFP4", ("activation", "output"), idle="dynamic"
    ),
    "BFPAttributes": _Relevance(_operator_is(BFP_OPERATOR), "no tensor is of type QBFP"),
    "RefineBlockAxis": _Relevance(lambda spec: isinstance(spec, BlockSpec), "no tensor has blocks"),
    "BF16WithClip": _FLOAT,
    "ActivationScaled": _FLOAT,
    "WeightScaled": _FLOAT,
    "ActivationSymmetric": _Relevance(_is_integer, "no activation is of integers with a scale", _ACTIVATIONS),
    "WeightSymmetric": _Relevance(_is_integer, "no weight is of integers with a scale", ("weight",)),
    "Int16Scale": _Relevance(
        lambda spec: isinstance(spec, AffineSpec) and spec.has_int16_scale,
        "no tensor is of integers with a scale that is not a power of two",
    ),
    "Int32Bias": _INTEGER_BIAS,
    "Int16Bias": _INTEGER_BIAS,
}


def irrelevant(values: Mapping[str, Any], layers: Iterable[LayerSpec | None]) -> list[str]:
    """A remark for each option that was given and has nothing to act on."""
    given = [layer for layer in layers if layer is not None]

    def is_any(is_user: Callable[[TensorSpec | None], bool], places: Iterable[str]) -> bool:
        return any(is_user(getattr(layer, place)) for place in places for layer in given)

    remarks = [
        f"{name}: {relevance.reason}"
        for name, relevance in _RELEVANT.items()
        if values.get(name) not in (None, relevance.idle) and not is_any(relevance.is_user, relevance.places)
    ]
    if "CalibMovingAverageConstant" in values and not values.get("CalibMovingAverage"):
        remarks.append("CalibMovingAverageConstant: CalibMovingAverage is not set")
    if values.get("WeightGroupSize") is not None and values.get("UseMatMulNBits"):
        remarks.append("WeightGroupSize: the groups of UseMatMulNBits have the GroupSize of MatMulNBitsParams")
    if is_any(_is_power_of_two, (*_ACTIVATIONS, "weight")):
        unheard = [name for name in ("ActivationSymmetric", "WeightSymmetric") if values.get(name) is False]
        remarks += [f"{name}: power-of-two scales always have their zero in the middle" for name in unheard]
    return remarks
