"""From a QLayerConfig, which people write, to a LayerSpec, which the choosing of quantizers reads.

    scale     method          becomes
    Float32   any             integers by that method; weights by MinMax where the method says Percentile
    PowerOf2  MinMax, MinMSE  integers by NonOverflow, PowerOfTwoMinMSE; always symmetric, one scale for a tensor

The weights' exception: Percentile is the default of every spec, and clipping weights costs more than it gains.

Where a layer says nothing of its bias: with integers around it, int32 at the product of the activation's and the
weight's scales (an AffineSpec of int32 stands for that); with blocks or floats, none.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError
from quark.formats.spec import ScaleRule
from quark.onnx.choose.options import BlockPlacement
from quark.onnx.choose.specs import AffineSpec, BlockSpec, FloatSpec, LayerSpec, TensorSpec
from quark.onnx.quantization.config.data_type import DataType
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
    RangeMethod,
)


@dataclass(frozen=True)
class SpecOptions:
    """The extra options that shape specs. A bias option of None: by the rule of the kind of numbers."""

    percentile: float = 99.999
    percentile_candidates: tuple[float, ...] = LayerwisePercentile().candidates
    moving_average: float | None = None
    has_most_common: bool = False
    has_reduced_range: bool = False
    is_saturating: bool = False
    follows_reduction: bool = True
    weight_scale_rule: ScaleRule | None = None  # of OCP blocks; None: that of the attributes
    is_activation_scaled: bool = False
    is_weight_scaled: bool = False
    has_quantized_bias: bool | None = None
    has_int32_bias: bool = True
    has_int16_bias: bool = False
    block_placement: BlockPlacement = BlockPlacement.COMPUTE
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)  # by operator: MXAttributes, BFPAttributes


MX_OPERATOR = "MXQuantizeDequantize"
ATTRIBUTE_OPTIONS = {MX_OPERATOR: "MXAttributes", "BFPQuantizeDequantize": "BFPAttributes"}


def layer_spec(layer: QLayerConfig, options: SpecOptions, base: LayerSpec | None = None) -> LayerSpec:
    """What the layer config asks for; where it says nothing, what `base` has."""
    for place in ("input_tensors", "activation", "weight", "bias", "output_tensors"):
        value = getattr(layer, place)
        if value is not None and not isinstance(value, QTensorConfig):
            raise UnsupportedTypeError(f"QLayerConfig.{place}: expected a spec such as Int8Spec(), got {value!r}")
    if base is None and (layer.inputs is None or layer.weight is None):
        raise InvalidValueError("global_config: expected specs for input_tensors (or activation) and for weight")
    usual = base or LayerSpec(None, None)
    activation = _activation(layer.inputs, options) if layer.inputs else usual.activation
    weight = _weight(layer.weight, options) if layer.weight else usual.weight
    bias = _bias(layer.bias, options) if layer.bias else usual_bias(activation, weight, options)
    output = _activation(layer.output_tensors, options) if layer.output_tensors else None
    return LayerSpec(activation, weight, bias, None if output == activation else output)


def _activation(tensor: QTensorConfig, options: SpecOptions) -> TensorSpec:
    if tensor.quant_granularity is not QuantGranularity.Tensor:
        raise InvalidValueError(f"{tensor.quant_granularity} for activations: they have one scale; use it for weights")
    return tensor_spec(tensor, options, options.is_activation_scaled)


def _weight(tensor: QTensorConfig, options: SpecOptions) -> TensorSpec:
    spec = tensor_spec(tensor, options, options.is_weight_scaled)
    if isinstance(spec, BlockSpec) and options.weight_scale_rule and tensor.data_type.operator == MX_OPERATOR:
        return replace(spec, quantizer=replace(spec.quantizer, scale_rule=options.weight_scale_rule))
    if not isinstance(spec, AffineSpec):
        return spec
    if options.has_reduced_range:
        if spec.is_power_of_two:
            raise InvalidValueError("reduce_range with power-of-two scales: they are of the full range; leave it out")
        spec = replace(spec, has_reduced_range=True)
    if isinstance(spec.method, Percentile) or spec.method == MinMax(options.moving_average):
        spec = replace(spec, method=MinMax())
    return spec


def _bias(tensor: QTensorConfig, options: SpecOptions) -> TensorSpec:
    spec = tensor_spec(tensor, options, is_scaled=False)
    if not isinstance(spec, AffineSpec):
        return spec
    if spec.format == "int32":
        return AffineSpec("int32")
    return replace(spec, method=spec.method if spec.is_power_of_two else MinMax())


def usual_bias(
    activation: TensorSpec | None, weight: TensorSpec | None, options: SpecOptions
) -> AffineSpec | BlockSpec | FloatSpec | None:
    """The bias of a layer that says nothing of it."""
    if options.has_quantized_bias is False:
        return None
    if isinstance(activation, AffineSpec) and isinstance(weight, AffineSpec):
        return _integer_bias(weight, options)
    is_wanted = options.has_quantized_bias or options.block_placement is BlockPlacement.ALL
    return weight if is_wanted and isinstance(weight, (BlockSpec, FloatSpec)) else None


def _integer_bias(weight: AffineSpec, options: SpecOptions) -> AffineSpec:
    if options.has_int16_bias:
        wanted = "int16"
    elif options.has_int32_bias:
        return AffineSpec("int32")
    else:
        wanted = weight.format
    is_symmetric = weight.is_symmetric or not wanted.startswith("u")
    return AffineSpec(wanted, weight.method, is_symmetric, is_power_of_two=weight.is_power_of_two)


def tensor_spec(tensor: QTensorConfig, options: SpecOptions, is_scaled: bool) -> TensorSpec:
    """The spec of one tensor, whatever its place."""
    data_type = tensor.data_type
    if not isinstance(data_type, DataType):
        raise UnsupportedTypeError(f"data_type {data_type!r}: expected one of quark.onnx.quantization.config.data_type")
    if data_type.operator is not None:
        if is_scaled:
            raise UnsupportedOptionError(
                f"ActivationScaled or WeightScaled with {data_type}: its blocks have scales of their own; leave it out"
            )
        return _block_spec(data_type.operator, data_type, options)
    if data_type.format in ("float16", "bfloat16"):
        return FloatSpec(data_type.format, options.is_saturating, is_scaled)
    return _affine_spec(tensor, options)


def _block_spec(operator: str, data_type: DataType, options: SpecOptions) -> BlockSpec:
    attributes = {**data_type.attributes, **options.attributes.get(operator, {})}
    try:
        quantizer, axis, to_bfloat16_first = quantizer_of(operator, attributes)
    except (InvalidValueError, UnsupportedTypeError) as error:
        raise type(error)(f"option '{ATTRIBUTE_OPTIONS[operator]}': {error}") from error
    return BlockSpec(quantizer, axis, options.follows_reduction, to_bfloat16_first)


def _affine_spec(tensor: QTensorConfig, options: SpecOptions) -> AffineSpec:
    if tensor.quant_granularity is QuantGranularity.Group:
        raise UnsupportedOptionError(
            "QuantGranularity.Group: a spec has no place for the size of a group. For weights of MatMul in groups set "
            "UseMatMulNBits and MatMulNBitsParams, as the preset MATMUL_NBITS does"
        )
    is_per_channel = tensor.quant_granularity is QuantGranularity.Channel
    is_power_of_two = tensor.scale_type is ScaleType.PowerOf2
    if is_power_of_two and is_per_channel:
        raise InvalidValueError(
            "per_channel with power-of-two scales: they are one for a tensor; leave one of the two out"
        )
    return AffineSpec(
        tensor.data_type.format,
        range_method(tensor, options),
        tensor.symmetric or is_power_of_two,
        is_per_channel,
        is_power_of_two,
    )


def range_method(tensor: QTensorConfig, options: SpecOptions) -> RangeMethod:
    """How the range of a tensor is found: by its scale type and method."""
    float_methods: dict[CalibMethod, RangeMethod] = {
        CalibMethod.MinMax: MinMax(options.moving_average),
        CalibMethod.MinMSE: MinMSE(),
        CalibMethod.Percentile: Percentile(options.percentile),
        CalibMethod.Entropy: Entropy(),
        CalibMethod.LayerwisePercentile: LayerwisePercentile(options.percentile_candidates),
        CalibMethod.Distribution: Distribution(),
    }
    power_of_two_methods: dict[CalibMethod, RangeMethod] = {
        CalibMethod.MinMax: NonOverflow(),
        CalibMethod.MinMSE: PowerOfTwoMinMSE(options.has_most_common),
    }
    if tensor.scale_type is ScaleType.Int16:
        raise UnsupportedOptionError(
            "ScaleType.Int16 (Int16Method, Int16Scale): scales as 16-bit integers are not available in this version. "
            "Use ScaleType.Float32 or ScaleType.PowerOf2"
        )
    methods = power_of_two_methods if tensor.scale_type is ScaleType.PowerOf2 else float_methods
    if tensor.calibration_method not in methods:
        raise InvalidValueError(
            f"{tensor.calibration_method} with {tensor.scale_type}: expected {' or '.join(map(str, methods))}"
        )
    return methods[tensor.calibration_method]
