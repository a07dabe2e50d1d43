"""The extra option AutoMixprecision as typed options: the lower types, and how far to go with them.

Types that are not given are those of the config. `MXAttributes` and `BFPAttributes` say what QMX and QBFP are, for the
higher and the lower types alike; where the two are members of one family, `TargetMXAttributes` and
`TargetBFPAttributes` say it for the lower ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quark.errors import InvalidValueError, UnsupportedOptionError, unknown_name
from quark.measures import Measure
from quark.mixed_precision import DEFAULT_SQNR_DB
from quark.onnx.choose.operators import OPERATORS
from quark.onnx.choose.options import ChoiceOptions, Target
from quark.onnx.choose.specs import AffineSpec, DynamicSpec, LayerSpec, bits_of, words_of
from quark.onnx.insert.options import NodeStyle
from quark.onnx.mix.options import LAYER_TYPES, Method, MixOptions
from quark.onnx.quantization.config.layers import data_type_of
from quark.onnx.quantization.config.option_treatments import Draft
from quark.onnx.quantization.config.options_of_algorithms import MIXED_PRECISION
from quark.onnx.quantization.config.spec import QLayerConfig, QTensorConfig, QuantGranularity
from quark.onnx.quantization.config.tensor_specs import ATTRIBUTE_OPTIONS, SpecOptions, layer_spec
from quark.onnx.simulate.options import SimulateOptions

OPTION = "AutoMixprecision"
_TYPES = ("ActTargetQuantType", "WeightTargetQuantType", "TargetQuantType", "TargetLayerConfig")
DEFAULT_MEASURE_DROP = 0.01
_TARGETS = ("Top1AccTarget", "Metric", "MetricTarget", "L2Target", "SQNRTarget", "BitsTarget", "BitOperationsTarget")


def draft_low_spec(draft: Draft, base: QLayerConfig, options: SpecOptions, high: LayerSpec) -> None:
    """Put the lower spec into the draft, where mixed precision is asked for. `base` is what `high` was made of."""
    if MIXED_PRECISION not in draft.switched_on:
        return
    settings = _settings(draft)
    if isinstance(high.activation, DynamicSpec):
        raise UnsupportedOptionError(
            f"{MIXED_PRECISION} with use_dynamic_quant: there are no lower types; leave one out"
        )
    if isinstance(high.weight, AffineSpec) and high.weight.group_size is not None:
        raise UnsupportedOptionError(f"{MIXED_PRECISION} with UseMatMulNBits: there is one type only; leave one out")
    wanted = settings.get("TargetLayerConfig")
    if isinstance(wanted, Mapping):  # from a file
        wanted = QLayerConfig.from_dict(dict(wanted))
    mine = {
        operator: dict(settings[f"Target{name}"])
        for operator, name in ATTRIBUTE_OPTIONS.items()
        if f"Target{name}" in settings
    }
    low_options = replace(options, attributes=options.attributes | mine)
    layer = wanted or _lowered(base, settings)
    low = layer_spec(layer, low_options, high)
    if layer.bias is None and isinstance(low.weight, AffineSpec) and isinstance(high.weight, AffineSpec):
        low = replace(low, bias=high.bias)  # a bias is small, and 8 bits of its own would be coarse
    _check_lower(high, low)
    draft.put("mix", "low", low)


def _lowered(base: QLayerConfig, settings: Mapping[str, Any]) -> QLayerConfig:
    """The base with the target types in place of its own."""
    both = settings.get("TargetQuantType")
    activation = _with_type(base.inputs, settings.get("ActTargetQuantType", both))
    weight = _with_type(base.weight, settings.get("WeightTargetQuantType", both))
    bias = base.bias
    if "BiasTargetQuantType" in settings:
        assert base.weight is not None  # the higher spec could not have been made without
        whole = replace(base.weight, symmetric=True, quant_granularity=QuantGranularity.Tensor)
        bias = _with_type(whole, settings["BiasTargetQuantType"])
    output = _with_type(base.output_tensors, settings.get("ActTargetQuantType", both))
    return QLayerConfig(activation=activation, weight=weight, bias=bias, output_tensors=output)


def _with_type(tensor: QTensorConfig | None, quant_type: Any) -> QTensorConfig | None:
    if tensor is None or quant_type is None:
        return tensor
    return replace(tensor, data_type=data_type_of(quant_type))


def _check_lower(high: LayerSpec, low: LayerSpec) -> None:
    if (high.activation, high.weight) == (low.activation, low.weight):
        raise InvalidValueError(
            f"{OPTION}: the target types are those of the config ({words_of(high)}): give lower ones"
        )
    places = ("activations", "weights")
    for place, upper, lower in zip(places, bits_of(high), bits_of(low), strict=True):
        if lower > upper:
            raise InvalidValueError(
                f"{OPTION}: {place} of {lower:g} bits as the target and {upper:g} in the config ({words_of(low)}; "
                f"{words_of(high)}): the target is to have no more bits, so exchange the two"
            )


def mix_options(draft: Draft, choose: ChoiceOptions, simulate: SimulateOptions, style: NodeStyle) -> MixOptions | None:
    """The typed options; None where mixed precision is off."""
    if MIXED_PRECISION not in draft.switched_on:
        return None
    _refuse_surroundings(choose, simulate, style)
    settings = _settings(draft)
    _check_targets(settings)
    op_types = settings.get("TargetOpType", LAYER_TYPES)
    for name in op_types:
        if name not in OPERATORS:
            raise unknown_name(f"operator type with a quantized form ({OPTION}.TargetOpType)", name, OPERATORS)
    plan_file = settings.get("PlanFile")
    return MixOptions(
        draft.of("mix")["low"],
        op_types=frozenset(op_types),
        included=tuple(settings.get("IncludeLayers", ())),
        excluded=tuple(settings.get("ExcludeLayers", ())),
        output_index=settings.get("OutputIndex", 0),
        method=Method(settings.get("Method", Method.GREEDY)),
        plan_file=None if plan_file is None else Path(plan_file),
        sample_limit=settings.get("SampleLimit"),
        **_targets(settings, draft),
    )


def _settings(draft: Draft) -> Mapping[str, Any]:
    """What was given and is not None."""
    given = draft.of("mix").get("settings", {})
    settings = {name: value for name, value in given.items() if value is not None}
    if not any(name in settings for name in _TYPES):
        raise InvalidValueError(
            f"{MIXED_PRECISION}=True without target types: give the extra option {OPTION} with ActTargetQuantType, "
            f"WeightTargetQuantType or both, such as QuantType.QInt8"
        )
    return settings


def _refuse_surroundings(choose: ChoiceOptions, simulate: SimulateOptions, style: NodeStyle) -> None:
    if choose.target is Target.NPU_CNN or choose.positions is not None or simulate.substitutions:
        raise UnsupportedOptionError(
            f"{MIXED_PRECISION} with the limits of an NPU (enable_npu_cnn, NPULimitationCheck, SimulateDPU): its "
            "convolutions have one type; leave one out"
        )
    if style is NodeStyle.QOPERATOR:
        raise UnsupportedOptionError(
            f"{MIXED_PRECISION} with quant_format QOperator: such operators have one type; use QuantFormat.QDQ"
        )


def _check_targets(settings: Mapping[str, Any]) -> None:
    if "Top1AccTarget" in settings and "EvaluateFunction" not in settings:
        raise InvalidValueError(f"{OPTION}.Top1AccTarget without EvaluateFunction: give the function that it is about")
    if "EvaluateFunction" in settings and "Top1AccTarget" not in settings and not settings.get("UsePlan"):
        raise InvalidValueError(f"{OPTION}.EvaluateFunction without Top1AccTarget: say what it may lose, such as 0.01")
    if "MetricTarget" in settings and "Metric" not in settings:
        raise InvalidValueError(f"{OPTION}.MetricTarget without Metric: say which measure, such as 'cosine'")
    if "BitsTarget" in settings and "BitOperationsTarget" in settings:
        raise InvalidValueError(f"{OPTION}: BitsTarget and BitOperationsTarget are two budgets: give one")
    if settings.get("NumTarget") and ("BitsTarget" in settings or "BitOperationsTarget" in settings):
        raise InvalidValueError(f"{OPTION}: a budget says how much is lowered; leave NumTarget out")
    if settings.get("UsePlan") and "PlanFile" not in settings:
        raise InvalidValueError(f"{OPTION}.UsePlan without PlanFile: say which plan")


def _targets(settings: Mapping[str, Any], draft: Draft) -> dict[str, Any]:
    """The fields of the options that say how far to go, with a remark on what is not used."""
    given = [name for name in _TARGETS if name in settings]
    if settings.get("UsePlan"):
        unused = [*given, *(name for name in ("EvaluateFunction", "NumTarget", "Method") if settings.get(name))]
        draft.remarks += [f"{OPTION}.{name}: UsePlan takes the choices of PlanFile as they are" for name in unused]
        return {"is_plan_given": True}
    if "Method" in settings and not ("BitsTarget" in settings or "BitOperationsTarget" in settings):
        draft.remarks.append(f"{OPTION}.Method: it is about budgets, and there is no BitsTarget or BitOperationsTarget")
    if not given and not settings.get("NumTarget"):
        draft.remarks.append(f"{OPTION} names no target: SQNRTarget {DEFAULT_SQNR_DB:g} (dB) was taken")
        return {"sqnr_db": DEFAULT_SQNR_DB}
    if "Metric" in settings and "MetricTarget" not in settings:
        draft.remarks.append(
            f"{OPTION}.Metric without MetricTarget: {DEFAULT_MEASURE_DROP:g} was taken, {DEFAULT_MEASURE_DROP:.0%} of "
            "the float network's value"
        )
    measure = Measure.of(settings["Metric"]) if "Metric" in settings else None
    return {
        "measure": measure,
        "measure_drop": None if measure is None else settings.get("MetricTarget", DEFAULT_MEASURE_DROP),
        "accuracy_drop": settings.get("Top1AccTarget"),
        "evaluate": settings.get("EvaluateFunction"),
        "l2": settings.get("L2Target"),
        "sqnr_db": settings.get("SQNRTarget"),
        "weight_bits": settings.get("BitsTarget"),
        "bit_operations": settings.get("BitOperationsTarget"),
        "layer_limit": settings.get("NumTarget") or None,
    }
