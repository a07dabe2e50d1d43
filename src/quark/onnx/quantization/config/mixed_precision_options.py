"""Mixed precision as a config asks for it: the extra option AutoMixprecision, or an AutoMixprecisionConfig.

Types that are not given are those of the config. `MXAttributes` and `BFPAttributes` define QMX and QBFP for the higher
and the lower types alike; if both are of one family, `TargetMXAttributes` and `TargetBFPAttributes` define the lower
ones.

In an entry, `metric_threshold` is the limit of the metric: a drop of `metric_evaluate_fn`, an L2 distance, or an SQNR
with the other sign; 0 is no limit, so that all layers are lowered.

`dual_quant_nodes` and `shared_param_mode` have no effect: they say how a graph is changed afterwards, and here every
reader has its own quantizer from the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quark.decide.operators import OPERATORS
from quark.decide.options import ChoiceOptions, Target
from quark.decide.specs import AffineSpec, DynamicSpec, LayerSpec, bits_of, words_of
from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError, unknown_name
from quark.features.mixed_precision.options import LAYER_TYPES, Method, MixOptions
from quark.features.mixed_precision.plan import DEFAULT_SQNR_DB
from quark.measures import Measure
from quark.onnx.insert.pairs import NodeStyle
from quark.onnx.quantization.config.algorithm import AutoMixprecisionConfig
from quark.onnx.quantization.config.option_kinds import (
    BOOL,
    FUNCTION,
    NAMES,
    PATH,
    QUANT_TYPE,
    Kind,
    integer,
    is_number,
    mapping,
    number,
    number_from,
    one_of,
    optional,
)
from quark.onnx.quantization.config.option_treatments import Draft
from quark.onnx.quantization.config.run_fields import MIXED_PRECISION, switched_on
from quark.onnx.quantization.config.spec import QLayerConfig, QTensorConfig, QuantGranularity
from quark.onnx.quantization.config.tensor_specs import ATTRIBUTE_OPTIONS, SpecOptions, data_type_of, layer_spec
from quark.onnx.simulate import SimulateOptions

OPTION = "AutoMixprecision"
DEFAULT_MEASURE_DROP = 0.01
_TYPES = ("ActTargetQuantType", "WeightTargetQuantType", "TargetQuantType", "TargetLayerConfig")
_TARGETS = ("Top1AccTarget", "Metric", "MetricTarget", "L2Target", "SQNRTarget", "BitsTarget", "BitOperationsTarget")

MIXED_PRECISION_KEYS: Mapping[str, Kind] = {
    "ActTargetQuantType": QUANT_TYPE,
    "WeightTargetQuantType": QUANT_TYPE,
    "BiasTargetQuantType": QUANT_TYPE,
    "TargetQuantType": QUANT_TYPE,
    **{
        f"Target{name}": mapping(f"a dictionary of the attributes of {operator}")
        for operator, name in ATTRIBUTE_OPTIONS.items()
    },
    "TargetLayerConfig": Kind("a QLayerConfig", lambda value: isinstance(value, (QLayerConfig, Mapping))),
    "OutputIndex": integer(0),
    "Top1AccTarget": optional(number_from(0)),
    "EvaluateFunction": optional(FUNCTION),
    "Metric": optional(
        Kind(
            "a measure: a name such as 'cosine', 'FILE.py:FUNCTION', or a function",
            lambda value: isinstance(value, str) or callable(value),
        )
    ),
    "MetricTarget": optional(number_from(0)),
    "L2Target": optional(number_from(0)),
    "SQNRTarget": optional(Kind("a number", is_number, lambda value: not math.isnan(value))),
    "BitsTarget": optional(number(0)),
    "BitOperationsTarget": optional(number(0, 1)),
    "NumTarget": integer(0),
    "TargetOpType": NAMES,
    "IncludeLayers": NAMES,
    "ExcludeLayers": NAMES,
    "Method": one_of(*(each.value for each in Method)),
    "PlanFile": optional(PATH),
    "UsePlan": BOOL,
    "SampleLimit": integer(1),
}

# What an entry may not change, with the reason.
_REFUSED: Mapping[str, str] = {
    "subgraph_json": "layers are mixed one by one, not by subgraphs; leave it out",
    "metric_distance_fn": "use metric_evaluate_fn, or metric_default 'l2' or 'sqnr'",
    "metric_optimize_object": "layers go from the higher types to the lower ones, which is 'speed'; for the best "
    "quality within a size give the extra option AutoMixprecision with BitsTarget",
    "worker_num": "layers are measured one after another, each by all processors; leave it out",
    "no_input_qdq_shared": "every reader has its own quantizer, so that none is shared; leave it out",
}


def mixed_precision_settings(entry: AutoMixprecisionConfig) -> dict[str, Any]:
    """The settings of an entry of `algo_config`, by the keys of AutoMixprecision."""
    usual, given = vars(AutoMixprecisionConfig()), vars(entry)
    for name, reason in _REFUSED.items():
        if given[name] != usual[name]:
            raise UnsupportedOptionError(f"AutoMixprecisionConfig.{name} = {given[name]!r}: {reason}")
    if not isinstance(entry.target_layer_config, QLayerConfig):
        raise UnsupportedTypeError(
            f"AutoMixprecisionConfig.target_layer_config: expected a QLayerConfig with the lower types, got "
            f"{entry.target_layer_config!r}"
        )
    threshold = entry.metric_threshold
    if threshold is None:
        raise UnsupportedOptionError(
            "AutoMixprecisionConfig.metric_threshold = None: to see sensitivities alone, give sensitivity_cache_file "
            "and read that file; the model is mixed in any case"
        )
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise UnsupportedTypeError(f"AutoMixprecisionConfig.metric_threshold {threshold!r}: expected a number")
    if entry.metric_evaluate_fn is None and entry.metric_default not in ("l2", "sqnr"):
        raise InvalidValueError(
            f"AutoMixprecisionConfig.metric_default {entry.metric_default!r}: expected l2 or sqnr, or give a function "
            "as metric_evaluate_fn"
        )
    if entry.metric_evaluate_fn is not None:
        target = {"EvaluateFunction": entry.metric_evaluate_fn, "Top1AccTarget": threshold or math.inf}
    elif entry.metric_default == "l2":
        target = {"L2Target": threshold or math.inf}
    else:
        target = {"SQNRTarget": -threshold or -math.inf}
    optional_settings = {
        "IncludeLayers": list(entry.include_layers),
        "ExcludeLayers": list(entry.exclude_layers),
        "SampleLimit": entry.data_size,
        "PlanFile": entry.sensitivity_cache_file,
    }
    return {
        "TargetLayerConfig": entry.target_layer_config,
        "TargetOpType": list(entry.target_op_type),
        "OutputIndex": entry.metric_output_index,
        **target,
        **{name: value for name, value in optional_settings.items() if value},
    }


def draft_low_spec(draft: Draft, base: QLayerConfig, options: SpecOptions, high: LayerSpec) -> None:
    """Put the lower spec into the draft if mixed precision is on. `base` is what `high` was made of."""
    if MIXED_PRECISION not in switched_on(draft.run):
        return
    settings = _settings(draft)
    if isinstance(high.activation, DynamicSpec):
        raise UnsupportedOptionError(
            f"{MIXED_PRECISION} with use_dynamic_quant: there are no lower types; leave one out"
        )
    if isinstance(high.weight, AffineSpec) and high.weight.group_size is not None:
        raise UnsupportedOptionError(f"{MIXED_PRECISION} with UseMatMulNBits: there is one type only; leave one out")
    layer = settings.get("TargetLayerConfig")
    if isinstance(layer, Mapping):  # from a file
        layer = QLayerConfig.from_dict(dict(layer))
    layer = layer or _lowered(base, settings)
    own = {
        operator: dict(settings[f"Target{name}"])
        for operator, name in ATTRIBUTE_OPTIONS.items()
        if f"Target{name}" in settings
    }
    low = layer_spec(layer, replace(options, attributes=options.attributes | own), high)
    if layer.bias is None and isinstance(low.weight, AffineSpec) and isinstance(high.weight, AffineSpec):
        low = replace(low, bias=high.bias)  # a bias is small, and 8 bits of its own would be coarse
    if (high.activation, high.weight) == (low.activation, low.weight):
        raise InvalidValueError(
            f"{OPTION}: the target types are those of the config ({words_of(high)}): give lower ones"
        )
    for place, upper, lower in zip(("activations", "weights"), bits_of(high), bits_of(low), strict=True):
        if lower > upper:
            raise InvalidValueError(
                f"{OPTION}: {place} of {lower:g} bits as the target and {upper:g} in the config ({words_of(low)}; "
                f"{words_of(high)}): the target is to have no more bits, so exchange the two"
            )
    draft.put("mix", "low", low)


def _lowered(base: QLayerConfig, settings: Mapping[str, Any]) -> QLayerConfig:
    """The base with the target types in place of its own."""

    def with_type(tensor: QTensorConfig | None, quant_type: Any) -> QTensorConfig | None:
        if tensor is None or quant_type is None:
            return tensor
        return replace(tensor, data_type=data_type_of(quant_type))

    both = settings.get("TargetQuantType")
    bias = base.bias
    if "BiasTargetQuantType" in settings:
        assert base.weight is not None  # the higher spec could not have been made without
        whole = replace(base.weight, symmetric=True, quant_granularity=QuantGranularity.Tensor)
        bias = with_type(whole, settings["BiasTargetQuantType"])
    return QLayerConfig(
        activation=with_type(base.inputs, settings.get("ActTargetQuantType", both)),
        weight=with_type(base.weight, settings.get("WeightTargetQuantType", both)),
        bias=bias,
        output_tensors=with_type(base.output_tensors, settings.get("ActTargetQuantType", both)),
    )


def mix_options(draft: Draft, choose: ChoiceOptions, simulate: SimulateOptions, style: NodeStyle) -> MixOptions | None:
    """The typed options; None if mixed precision is off."""
    if MIXED_PRECISION not in switched_on(draft.run):
        return None
    if choose.target is Target.NPU_CNN or choose.positions is not None or simulate.substitutions:
        raise UnsupportedOptionError(
            f"{MIXED_PRECISION} with the limits of an NPU (enable_npu_cnn, NPULimitationCheck, SimulateDPU): its "
            "convolutions have one type; leave one out"
        )
    if style is NodeStyle.QOPERATOR:
        raise UnsupportedOptionError(
            f"{MIXED_PRECISION} with quant_format QOperator: such operators have one type; use QuantFormat.QDQ"
        )
    settings = _settings(draft)
    targets = _targets(settings, draft)
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
        **targets,
    )


def _settings(draft: Draft) -> Mapping[str, Any]:
    """The settings that are not None."""
    settings = {name: value for name, value in draft.of("mix").get("settings", {}).items() if value is not None}
    if not any(name in settings for name in _TYPES):
        raise InvalidValueError(
            f"{MIXED_PRECISION}=True without target types: give the extra option {OPTION} with ActTargetQuantType, "
            f"WeightTargetQuantType or both, such as QuantType.QInt8"
        )
    return settings


def _targets(settings: Mapping[str, Any], draft: Draft) -> dict[str, Any]:
    """The fields that say how far to go. Settings that are not used are remarked on."""
    has_budget = "BitsTarget" in settings or "BitOperationsTarget" in settings
    is_planned, has_function = bool(settings.get("UsePlan")), "EvaluateFunction" in settings
    mistakes = {
        ".Top1AccTarget without EvaluateFunction: give the function that it is about": (
            "Top1AccTarget" in settings and not has_function
        ),
        ".EvaluateFunction without Top1AccTarget: say what it may lose, such as 0.01": (
            has_function and "Top1AccTarget" not in settings and not is_planned
        ),
        ".MetricTarget without Metric: say which measure, such as 'cosine'": (
            "MetricTarget" in settings and "Metric" not in settings
        ),
        ": BitsTarget and BitOperationsTarget are two budgets: give one": (
            "BitsTarget" in settings and "BitOperationsTarget" in settings
        ),
        ": a budget says how much is lowered; leave NumTarget out": has_budget and bool(settings.get("NumTarget")),
        ".UsePlan without PlanFile: say which plan": is_planned and "PlanFile" not in settings,
    }
    for text, is_made in mistakes.items():
        if is_made:
            raise InvalidValueError(f"{OPTION}{text}")
    given = [name for name in _TARGETS if name in settings]
    if is_planned:
        unused = [*given, *(name for name in ("EvaluateFunction", "NumTarget", "Method") if settings.get(name))]
        draft.remarks += [f"{OPTION}.{name}: UsePlan takes the choices of PlanFile as they are" for name in unused]
        return {"is_plan_given": True}
    if "Method" in settings and not has_budget:
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
