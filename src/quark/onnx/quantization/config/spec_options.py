"""The extra options that shape specs, from their values; and which cannot matter for the specs that came out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quark.formats.spec import ScaleRule
from quark.onnx.choose.options import BlockPlacement
from quark.onnx.choose.specs import AffineSpec, BlockSpec, FloatSpec, LayerSpec, TensorSpec
from quark.onnx.quantization.config.tensor_specs import ATTRIBUTE_OPTIONS, SpecOptions
from quark.ranges import LayerwisePercentile, MinMax, Percentile, PowerOfTwoMinMSE

MOVING_AVERAGE_CONSTANT = 0.01


def spec_options(
    values: Mapping[str, Any], placement: BlockPlacement, is_for_npu: bool, has_reduced_range: bool
) -> SpecOptions:
    """Typed, with the defaults. The NPU's convolutions take biases of 8 bits where nothing else is said."""
    defaults = SpecOptions()
    has_average = values.get("CalibMovingAverage", False)
    constant = values.get("CalibMovingAverageConstant", MOVING_AVERAGE_CONSTANT)
    return SpecOptions(
        percentile=values.get("Percentile", defaults.percentile),
        percentile_candidates=tuple(values.get("PercentileCandidates", defaults.percentile_candidates)),
        moving_average=constant if has_average else None,
        has_most_common=values.get("MinMSEModePof2Scale", "All") == "MostCommon",
        has_reduced_range=has_reduced_range,
        is_saturating=values.get("BF16WithClip", False),
        follows_reduction=values.get("RefineBlockAxis", True),
        weight_scale_rule=ScaleRule(values["WeightScaleRule"]) if "WeightScaleRule" in values else None,
        is_activation_scaled=values.get("ActivationScaled", False),
        is_weight_scaled=values.get("WeightScaled", False),
        has_quantized_bias=values.get("QuantizeBias"),
        has_int32_bias=values.get("Int32Bias", not is_for_npu),
        has_int16_bias=values.get("Int16Bias", False),
        block_placement=placement,
        attributes={op: dict(values[option]) for op, option in ATTRIBUTE_OPTIONS.items() if option in values},
    )


def _is_integer(spec: TensorSpec | None) -> bool:
    return isinstance(spec, AffineSpec)


def _operator_uses(operator: str) -> Callable[[TensorSpec | None], bool]:
    def uses(spec: TensorSpec | None) -> bool:
        if not isinstance(spec, BlockSpec):
            return False
        fmt = spec.quantizer.format
        is_bfp = fmt.sub_blocks is not None or fmt.name.startswith(("bfp", "block_float"))
        return is_bfp == (operator == "BFPQuantizeDequantize")

    return uses


def _method_is(cls: type) -> Callable[[TensorSpec | None], bool]:
    return lambda spec: isinstance(spec, AffineSpec) and isinstance(spec.method, cls)


def _has_average(spec: TensorSpec | None) -> bool:
    """Weights, too, may be ranged by MinMax, but never by an average."""
    return isinstance(spec, AffineSpec) and isinstance(spec.method, MinMax) and spec.method.moving_average is not None


def _has_float_scale(spec: TensorSpec | None) -> bool:
    return isinstance(spec, AffineSpec) and not spec.is_power_of_two


@dataclass(frozen=True)
class _Relevance:
    """What must be among the tensors in these places for an option to matter, and what to say where nothing is."""

    is_user: Callable[[TensorSpec | None], bool]
    reason: str
    places: tuple[str, ...] = ("activation", "weight", "bias", "output")


ACTIVATIONS = ("activation", "output")
NO_FLOATS = "no tensor is float16 or bfloat16"
_RELEVANT: Mapping[str, _Relevance] = {
    "Percentile": _Relevance(_method_is(Percentile), "no range is found by Percentile"),
    "PercentileCandidates": _Relevance(_method_is(LayerwisePercentile), "no range is found by LayerwisePercentile"),
    "CalibMovingAverage": _Relevance(_has_average, "no activation's range is found by MinMax"),
    "CalibMovingAverageConstant": _Relevance(_method_is(MinMax), "no activation's range is found by MinMax"),
    "MinMSEModePof2Scale": _Relevance(_method_is(PowerOfTwoMinMSE), "no range is found by PowerOfTwoMethod.MinMSE"),
    "WeightCalibrateMethod": _Relevance(_has_float_scale, "no weight is of integers with a float scale", ("weight",)),
    "MXAttributes": _Relevance(_operator_uses("MXQuantizeDequantize"), "no tensor is of type QMX"),
    "WeightScaleRule": _Relevance(_operator_uses("MXQuantizeDequantize"), "no weight is of type QMX", ("weight",)),
    "BFPAttributes": _Relevance(_operator_uses("BFPQuantizeDequantize"), "no tensor is of type QBFP"),
    "RefineBlockAxis": _Relevance(lambda spec: isinstance(spec, BlockSpec), "no tensor has blocks"),
    "BF16WithClip": _Relevance(lambda spec: isinstance(spec, FloatSpec), NO_FLOATS),
    "ActivationScaled": _Relevance(lambda spec: isinstance(spec, FloatSpec), NO_FLOATS),
    "WeightScaled": _Relevance(lambda spec: isinstance(spec, FloatSpec), NO_FLOATS),
    "ActivationSymmetric": _Relevance(_is_integer, "no activation is of integers with a scale", ACTIVATIONS),
    "WeightSymmetric": _Relevance(_is_integer, "no weight is of integers with a scale", ("weight",)),
    "Int32Bias": _Relevance(_is_integer, "no bias is of integers", ("bias",)),
    "Int16Bias": _Relevance(_is_integer, "no bias is of integers", ("bias",)),
}


def irrelevant(values: Mapping[str, Any], layers: Iterable[LayerSpec | None]) -> list[str]:
    """A remark for each option that was given and has nothing to act on."""
    found = [layer for layer in layers if layer is not None]
    remarks = [
        f"{name}: {each.reason}"
        for name, each in _RELEVANT.items()
        if values.get(name) not in (None, False) and not any(map(each.is_user, _tensors(found, each.places)))
    ]
    if "CalibMovingAverageConstant" in values and not values.get("CalibMovingAverage"):
        remarks.append("CalibMovingAverageConstant: CalibMovingAverage is not set")
    tensors = _tensors(found, (*ACTIVATIONS, "weight"))
    is_power_of_two = any(isinstance(each, AffineSpec) and each.is_power_of_two for each in tensors)
    unheard = [n for n in ("ActivationSymmetric", "WeightSymmetric") if values.get(n) is False and is_power_of_two]
    return remarks + [f"{name}: power-of-two scales always have their zero in the middle" for name in unheard]


def _tensors(layers: Iterable[LayerSpec], places: Iterable[str]) -> list[TensorSpec | None]:
    return [getattr(layer, place) for place in places for layer in layers]
