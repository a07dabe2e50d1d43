"""Accuracy algorithms as a config asks for them: fields and extra options, or the entries of `QConfig.algo_config`.

    include_cle       CLEConfig              cross-layer equalization      CLE...
    include_sq        SmoothQuantConfig      SmoothQuant                   SmoothAlpha
    include_auto_mp   AutoMixprecisionConfig mixed precision               AutoMixprecision
    include_fast_ft   AdaRoundConfig         finetuning                    FastFinetune
                      AdaQuantConfig
    BiasCorrection    BiasCorrectionConfig   bias correction               BiasCorrection...

An entry of `algo_config` is the field and the options that say the same. An extra option goes before a setting that the
entry leaves at its default; two that contradict each other are an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.onnx.equalize.options import CrossLayerOptions, EqualizeOptions, SmoothOptions
from quark.onnx.quantization.config.algorithm import (
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
    AutoMixprecisionConfig,
    BiasCorrectionConfig,
    CLEConfig,
    SmoothQuantConfig,
)
from quark.onnx.quantization.config.finetune_entry import finetune_settings
from quark.onnx.quantization.config.finetune_options import finetune_options
from quark.onnx.quantization.config.mixed_precision_entry import mixed_precision_settings
from quark.onnx.quantization.config.option_treatments import Draft
from quark.onnx.quantization.config.options_of_algorithms import (
    BIAS_CORRECTION,
    CROSS_LAYER,
    FINETUNE,
    MIXED_PRECISION,
    SMOOTH,
)
from quark.onnx.refine.options import BiasCorrectionOptions, RefineOptions


@dataclass(frozen=True)
class _Entry:
    """How an entry of `algo_config` is said in fields and options: what turns it on, and its settings by their names
    there."""

    fields: Mapping[str, bool] = field(default_factory=dict)
    options: Mapping[str, bool] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


_ENTRIES: Mapping[type[AlgoConfig], _Entry] = {
    CLEConfig: _Entry(
        {CROSS_LAYER: True},
        settings={
            "cle_balance_method": "CLEBalanceMethod",
            "cle_steps": "CLESteps",
            "cle_weight_threshold": "CLEWeightThreshold",
            "cle_scale_append_bias": "CLEScaleAppendBias",
            "cle_scale_use_threshold": "CLEScaleUseThreshold",
            "cle_total_layer_diff_threshold": "CLETotalLayerDiffThreshold",
        },
    ),
    SmoothQuantConfig: _Entry({SMOOTH: True}, settings={"alpha": "SmoothAlpha"}),
    BiasCorrectionConfig: _Entry(options={BIAS_CORRECTION: True}),
    AutoMixprecisionConfig: _Entry({MIXED_PRECISION: True}),
    AdaRoundConfig: _Entry({FINETUNE: True}),
    AdaQuantConfig: _Entry({FINETUNE: True}),
}


def fields_and_options(
    algorithms: Sequence[AlgoConfig], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that entries of `algo_config` turn on, and all extra options: those given, and the entries' own."""
    _check_entries(algorithms)
    fields: dict[str, Any] = {}
    options = dict(given)
    for each in algorithms:
        entry = _ENTRIES[type(each)]
        fields |= entry.fields
        for option, value in (*entry.options.items(), *_settings(each, entry)):
            if options.setdefault(option, value) != value:
                raise InvalidValueError(
                    f"option '{option}' = {options[option]!r} and {type(each).__name__} ({value!r}) say different "
                    "things: leave one out"
                )
    return fields, options


def _check_entries(algorithms: Any) -> None:
    if not isinstance(algorithms, (list, tuple)) or not all(isinstance(each, AlgoConfig) for each in algorithms):
        raise UnsupportedTypeError(f"algo_config {algorithms!r}: expected a list such as [CLEConfig()]")
    names = [type(each).__name__ for each in algorithms]
    unknown = [name for each, name in zip(algorithms, names, strict=True) if type(each) not in _ENTRIES]
    if unknown:
        available = ", ".join(cls.__name__ for cls in _ENTRIES)
        raise UnsupportedTypeError(f"algo_config has {', '.join(unknown)}: expected {available}")
    for name in names:
        if names.count(name) > 1:
            raise InvalidValueError(f"algo_config has {name} more than once: leave one of them")
    if AdaRoundConfig.__name__ in names and AdaQuantConfig.__name__ in names:
        raise InvalidValueError("algo_config has AdaRoundConfig and AdaQuantConfig: weights are trained by one of them")


def _settings(algorithm: AlgoConfig, entry: _Entry) -> list[tuple[str, Any]]:
    """The settings that differ from the defaults, under the names of their options."""
    if isinstance(algorithm, AutoMixprecisionConfig):
        return [("AutoMixprecision", mixed_precision_settings(algorithm))]
    if isinstance(algorithm, AdaRoundConfig):
        return [("FastFinetune", finetune_settings(algorithm))]
    usual = type(algorithm)()
    values = {name: getattr(algorithm, name) for name in entry.settings}
    return [(entry.settings[name], value) for name, value in values.items() if value != getattr(usual, name)]


def equalize_options(draft: Draft) -> EqualizeOptions:
    has_cross_layer, has_smooth = CROSS_LAYER in draft.switched_on, SMOOTH in draft.switched_on
    return EqualizeOptions(
        _cross_layer(draft) if has_cross_layer else None,
        SmoothOptions(**draft.of("smooth")) if has_smooth else None,
    )


def _cross_layer(draft: Draft) -> CrossLayerOptions:
    values = dict(draft.of("cross_layer"))
    if not values.pop("has_threshold", True):
        if "weight_threshold" in values:
            draft.remarks.append("CLEWeightThreshold: CLEScaleUseThreshold is False, so that it is not used")
        values["weight_threshold"] = 0.0
    return CrossLayerOptions(**values)


def refine_options(draft: Draft) -> RefineOptions:
    is_corrected, is_finetuned = BIAS_CORRECTION in draft.switched_on, FINETUNE in draft.switched_on
    return RefineOptions(
        BiasCorrectionOptions(**draft.of("bias_correction")) if is_corrected else None,
        finetune_options(draft) if is_finetuned else None,
    )
