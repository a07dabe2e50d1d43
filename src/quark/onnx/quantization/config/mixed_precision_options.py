"""Mixed precision as a config asks for it: the extra option AutoMixprecision, or an AutoMixprecisionConfig.

Types that are not given are those of the config. `MXAttributes` and `BFPAttributes` define QMX and QBFP for the higher
and the lower types alike; if both are of one family, `TargetMXAttributes` and `TargetBFPAttributes` define the lower
ones.

There are two ways to say how far to go. L2Target, SQNRTarget, Top1AccTarget, BitsTarget and the like are limits by
themselves. MetricThreshold is the limit of a score, which MetricDefault names or a function computes: 0 is no limit, so
that all layers are mixed, and None ranks layers and mixes none. An AutoMixprecisionConfig counts as the latter, and so
does TargetLayerConfig without any limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quark.decide.operators import OPERATORS
from quark.decide.specs import AffineSpec, DynamicSpec, LayerSpec, bits_of, words_of
from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError, unknown_name
from quark.features.mixed_precision.options import LAYER_TYPES, Method, MixOptions, Score, ScoreKind
from quark.features.mixed_precision.plan import DEFAULT_SQNR_DB
from quark.files.foreign import short
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
    is_integer,
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

OPTION = "AutoMixprecision"
DEFAULT_MEASURE_DROP = 0.01
_TYPES = ("ActTargetQuantType", "WeightTargetQuantType", "TargetQuantType", "TargetLayerConfig")
_TARGETS = ("Top1AccTarget", "Metric", "MetricTarget", "L2Target", "SQNRTarget", "BitsTarget", "BitOperationsTarget")
_SCORE = ("MetricDistanceFn", "MetricEvaluateFn", "MetricDefault", "MetricThreshold")
_NAMED = ("TargetTensors", "TargetIndices", "ExcludeIndices")
_INDICES = Kind(
    "a list of numbers of layers, from 0 on",
    lambda value: isinstance(value, (list, tuple)) and all(map(is_integer, value)),
    lambda value: all(number >= 0 for number in value),
)
_NEEDLESS = {
    "WorkerNum": (1, "layers are measured one after another, each by all processors"),
    "SharedParamMode": ("unshare", "every reader has its own quantizer, so that no scale is shared"),
    "AutoMixUseFastFT": (False, "layers are finetuned after they were mixed, if include_fast_ft is True"),
}

MIXED_PRECISION_KEYS: Mapping[str, Kind] = {
    "ActTargetQuantType": QUANT_TYPE,
    "WeightTargetQuantType": QUANT_TYPE,
    "BiasTargetQuantType": QUANT_TYPE,
    "TargetQuantType": QUANT_TYPE,
    **{
        f"Target{name}": mapping(f"a dictionary of the attributes of {operator}")
        for operator, name in ATTRIBUTE_OPTIONS.items()
    },
    "TargetLayerConfig": Kind(
        "a QLayerConfig, a list of them, or a dictionary from them to names of layers",
        lambda value: isinstance(value, (QLayerConfig, Mapping, list, tuple)),
        bool,
    ),
    "OutputIndex": integer(0),
    "MetricOutputIndex": integer(0),
    "MetricDistanceFn": optional(FUNCTION),
    "MetricEvaluateFn": optional(FUNCTION),
    "MetricDefault": one_of("l2", "kl", "cosine", "sqnr", "psnr"),
    "MetricThreshold": optional(Kind("a number", is_number, lambda value: not math.isnan(value))),
    "MetricOptimizeObject": one_of("speed", "quality"),
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
    "Method": one_of(*(method.value for method in Method)),
    "PlanFile": optional(PATH),
    "UsePlan": BOOL,
    "SampleLimit": integer(1),
    "DataSize": integer(0),
    "TargetTensors": NAMES,
    "TargetIndices": _INDICES,
    "ExcludeIndices": _INDICES,
    "SubgraphJson": optional(PATH),
    "SensitivityCacheFile": optional(PATH),
    "NoInputQDQShared": BOOL,
    "DualQuantNodes": BOOL,
    "WorkerNum": integer(1),
    "SharedParamMode": one_of("propagate", "unshare"),
    "AutoMixUseFastFT": BOOL,
}

_USUAL_L2 = 0.5  # for an entry that names types and no limit


def mixed_precision_settings(entry: AutoMixprecisionConfig) -> dict[str, Any]:
    """The settings of an entry of `algo_config` that are not at their defaults, by the keys of AutoMixprecision."""
    usual, given = vars(AutoMixprecisionConfig()), vars(entry)
    settings = {
        key: list(given[name]) if isinstance(given[name], tuple) else given[name]
        for name, key in entry.option_keys().items()
        if given[name] != usual[name] and not (given[name] is None and name != "metric_threshold")
    }
    if not any(name in settings for name in _TYPES):
        raise UnsupportedTypeError(
            f"AutoMixprecisionConfig.target_layer_config: expected a QLayerConfig with the lower types, got "
            f"{entry.target_layer_config!r}"
        )
    if "TargetLayerConfig" in settings:
        settings.setdefault("MetricThreshold", entry.metric_threshold)
    elif not any(name in settings for name in (*_TARGETS, *_SCORE, *_NAMED, "NumTarget")):
        settings["L2Target"] = _USUAL_L2
    return settings


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
    own = {
        operator: dict(settings[f"Target{name}"])
        for operator, name in ATTRIBUTE_OPTIONS.items()
        if f"Target{name}" in settings
    }
    options = replace(options, attributes=options.attributes | own)

    def spec(layer: QLayerConfig) -> LayerSpec:
        low = layer_spec(layer, options, high)
        if layer.bias is None and isinstance(low.weight, AffineSpec) and isinstance(high.weight, AffineSpec):
            low = replace(low, bias=high.bias)  # a bias is small, and 8 bits would be coarse
        if (high.activation, high.weight) == (low.activation, low.weight):
            raise InvalidValueError(
                f"{OPTION}: the target types are those of the config ({words_of(high)}): give lower ones"
            )
        return low

    targets, by_layer = _target_layers(settings) if "TargetLayerConfig" in settings else ([], {})
    specs = [spec(target) for target in targets or [_lowered(base, settings)]]
    if not targets and settings.get("MetricOptimizeObject", "speed") == "speed":
        _check_bits(high, specs[0])
    draft.put("mix", "low", specs[0])
    draft.steps["mix"]["others"] = tuple(specs[1:])
    draft.steps["mix"]["by_layer"] = tuple((name, spec(layer)) for name, layer in by_layer.items())


def _check_bits(high: LayerSpec, low: LayerSpec) -> None:
    for place, upper, lower in zip(("activations", "weights"), bits_of(high), bits_of(low), strict=True):
        if lower > upper:
            raise InvalidValueError(
                f"{OPTION}: {place} of {lower:g} bits as the target and {upper:g} in the config ({words_of(low)}; "
                f"{words_of(high)}): the target is to have no more bits, so exchange the two, or set "
                "MetricOptimizeObject to 'quality' to go from the lower types to the higher ones"
            )


def _target_layers(settings: Mapping[str, Any]) -> tuple[list[QLayerConfig], dict[str, QLayerConfig]]:
    """The configs that layers choose from, and those of layers by name."""
    given, by_layer = settings["TargetLayerConfig"], {}
    if isinstance(given, Mapping) and all(isinstance(layer, QLayerConfig) for layer in given):
        named = {layer: [names] if isinstance(names, str) else list(names) for layer, names in given.items()}
        by_layer = {name: layer for layer, names in named.items() for name in names}
        given = next((layer for layer, names in named.items() if not names), next(iter(named)))
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    layers = [
        QLayerConfig.from_dict(dict(layer)) if isinstance(layer, Mapping) else layer for layer in listed
    ]  # entries of a file
    for layer_config in layers:
        if not isinstance(layer_config, QLayerConfig):
            raise UnsupportedTypeError(f"{OPTION}.TargetLayerConfig: {short(layer_config)}: expected a QLayerConfig")
    return layers, by_layer


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


def mix_options(draft: Draft, style: NodeStyle) -> MixOptions | None:
    """The typed options; None if mixed precision is off."""
    if MIXED_PRECISION not in switched_on(draft.run):
        return None
    if style is NodeStyle.QOPERATOR:
        raise UnsupportedOptionError(
            f"{MIXED_PRECISION} with quant_format QOperator: such operators have one type; use QuantFormat.QDQ"
        )
    settings = _settings(draft)
    targets = _targets(settings, draft)
    for name, (silent, reason) in _NEEDLESS.items():
        if settings.get(name, silent) != silent:
            draft.remarks.append(f"{OPTION}.{name}: {reason}")
    op_types = settings.get("TargetOpType", LAYER_TYPES)
    for name in op_types:
        if name not in OPERATORS:
            raise unknown_name(f"operator type with a quantized form ({OPTION}.TargetOpType)", name, OPERATORS)
    names = ("PlanFile", "SensitivityCacheFile", "SubgraphJson")
    plan_file, cache_file, subgraphs = (Path(settings[name]) if name in settings else None for name in names)
    mix = draft.of("mix")
    return MixOptions(
        mix["low"],
        others=mix["others"],
        by_layer=mix["by_layer"],
        op_types=frozenset(op_types),
        included=tuple(settings.get("IncludeLayers", ())),
        excluded=tuple(settings.get("ExcludeLayers", ())),
        output_index=settings.get("MetricOutputIndex", settings.get("OutputIndex", 0)),
        method=Method(settings.get("Method", Method.GREEDY)),
        sample_limit=settings.get("SampleLimit", settings.get("DataSize") or None),
        is_upward=settings.get("MetricOptimizeObject") == "quality",
        tensors=tuple(settings.get("TargetTensors", ())),
        indices=tuple(settings.get("TargetIndices", ())),
        excluded_indices=tuple(settings.get("ExcludeIndices", ())),
        skips_shared_inputs=settings.get("NoInputQDQShared", False),
        has_dual_pairs=settings.get("DualQuantNodes", False),
        plan_file=plan_file,
        cache_file=cache_file,
        subgraphs=subgraphs,
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
        ".EvaluateFunction without Top1AccTarget: give the acceptable loss, such as 0.01": (
            has_function and "Top1AccTarget" not in settings and not is_planned
        ),
        ".MetricTarget without Metric: give the measure, such as 'cosine'": (
            "MetricTarget" in settings and "Metric" not in settings
        ),
        ": BitsTarget and BitOperationsTarget are two budgets: give one": (
            "BitsTarget" in settings and "BitOperationsTarget" in settings
        ),
        ": a budget already decides how much is lowered; leave NumTarget out": has_budget
        and bool(settings.get("NumTarget")),
        ": a budget is for single layers and one lower type; leave SubgraphJson out, and name one TargetLayerConfig": (
            has_budget and ("SubgraphJson" in settings or bool(draft.of("mix")["others"]))
        ),
        ": a budget goes from the higher types to the lower ones; leave MetricOptimizeObject out": (
            has_budget and settings.get("MetricOptimizeObject") == "quality"
        ),
        ": MetricDistanceFn and MetricEvaluateFn are two functions for one score: give one": (
            "MetricDistanceFn" in settings and "MetricEvaluateFn" in settings
        ),
        ".UsePlan without PlanFile: give the plan": is_planned and "PlanFile" not in settings,
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
    is_named = any(settings.get(name) for name in _NAMED)
    raw = draft.of("mix").get("settings", {})  # None among these says something
    score = _score(settings, raw, is_alone=not given and not settings.get("NumTarget"))
    if not given and not settings.get("NumTarget") and not is_named and score is None:
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
        "score": score,
        "is_analysis_only": "MetricThreshold" in raw and raw["MetricThreshold"] is None,
    }


def _score(settings: Mapping[str, Any], raw: Mapping[str, Any], is_alone: bool) -> Score | None:
    """The score by which layers are ranked; None if others of the settings say it."""
    if not any(name in raw for name in _SCORE) and not (is_alone and "TargetLayerConfig" in settings):
        return None
    kind, function = ScoreKind(settings.get("MetricDefault", ScoreKind.L2)), None
    if "MetricDistanceFn" in settings:
        kind, function = ScoreKind.DISTANCE, settings["MetricDistanceFn"]
    elif "MetricEvaluateFn" in settings:
        kind, function = ScoreKind.EVALUATION, settings["MetricEvaluateFn"]
    return Score(kind, function, settings.get("MetricThreshold") or None)
