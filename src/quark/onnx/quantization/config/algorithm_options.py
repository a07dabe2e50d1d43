"""Accuracy algorithms as a config asks for them: fields and extra options, or the entries of `QConfig.algo_config`.

    include_cle       CLEConfig              cross-layer equalization      CLE...
    include_sq        SmoothQuantConfig      SmoothQuant                   SmoothAlpha
    include_auto_mp   AutoMixprecisionConfig mixed precision               AutoMixprecision
    include_fast_ft   AdaRoundConfig         finetuning                    FastFinetune
                      AdaQuantConfig
    BiasCorrection    BiasCorrectionConfig   bias correction               BiasCorrection...

An entry of `algo_config` is another way to write the field and the options. An extra option overrides a setting that
the entry leaves at its default; two that contradict each other are an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.features.bias_correction.options import BiasCorrectionOptions
from quark.features.equalization.options import CrossLayerOptions
from quark.features.smooth_quant.options import SmoothOptions
from quark.onnx.quantization.config.algorithm import (
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
    AutoMixprecisionConfig,
    BiasCorrectionConfig,
    CLEConfig,
    SmoothQuantConfig,
)
from quark.onnx.quantization.config.finetune_options import finetune_options, finetune_settings
from quark.onnx.quantization.config.mixed_precision_options import mixed_precision_settings
from quark.onnx.quantization.config.option_treatments import Draft
from quark.onnx.quantization.config.run_fields import (
    BIAS_CORRECTION,
    CROSS_LAYER,
    FINETUNE,
    MIXED_PRECISION,
    SMOOTH,
    switched_on,
)
from quark.onnx.settings import EqualizeOptions, RefineOptions

# The field or option that each entry turns on, and the options that say the same as its settings.
_SWITCHES: Mapping[type[AlgoConfig], str] = {
    CLEConfig: CROSS_LAYER,
    SmoothQuantConfig: SMOOTH,
    BiasCorrectionConfig: BIAS_CORRECTION,
    AutoMixprecisionConfig: MIXED_PRECISION,
    AdaRoundConfig: FINETUNE,
    AdaQuantConfig: FINETUNE,
}
_OPTIONS: Mapping[str, str] = {
    "cle_balance_method": "CLEBalanceMethod",
    "cle_steps": "CLESteps",
    "cle_weight_threshold": "CLEWeightThreshold",
    "cle_scale_append_bias": "CLEScaleAppendBias",
    "cle_scale_use_threshold": "CLEScaleUseThreshold",
    "cle_total_layer_diff_threshold": "CLETotalLayerDiffThreshold",
    "alpha": "SmoothAlpha",
}


def fields_and_options(
    algorithms: Sequence[AlgoConfig], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that entries of `algo_config` turn on, and all extra options: those given, and the entries' own."""
    if not isinstance(algorithms, (list, tuple)) or not all(isinstance(each, AlgoConfig) for each in algorithms):
        raise UnsupportedTypeError(f"algo_config {algorithms!r}: expected a list such as [CLEConfig()]")
    names = [type(each).__name__ for each in algorithms]
    unknown = [type(each).__name__ for each in algorithms if type(each) not in _SWITCHES]
    if unknown:
        available = ", ".join(cls.__name__ for cls in _SWITCHES)
        raise UnsupportedTypeError(f"algo_config has {', '.join(unknown)}: expected {available}")
    for name in names:
        if names.count(name) > 1:
            raise InvalidValueError(f"algo_config has {name} more than once: leave one of them")
    if AdaRoundConfig.__name__ in names and AdaQuantConfig.__name__ in names:
        raise InvalidValueError("algo_config has AdaRoundConfig and AdaQuantConfig: weights are trained by one of them")
    switches = [_SWITCHES[type(each)] for each in algorithms]
    options = dict(given)
    for entry in algorithms:
        if isinstance(entry, AutoMixprecisionConfig):
            settings: dict[str, Any] = {"AutoMixprecision": mixed_precision_settings(entry)}
        elif isinstance(entry, AdaRoundConfig):
            settings = {"FastFinetune": finetune_settings(entry)}
        elif isinstance(entry, BiasCorrectionConfig):
            settings = {BIAS_CORRECTION: True}
        else:
            usual = vars(type(entry)())
            settings = {_OPTIONS[name]: value for name, value in vars(entry).items() if value != usual[name]}
        for option, value in settings.items():
            if options.setdefault(option, value) != value:
                raise InvalidValueError(
                    f"option '{option}' = {options[option]!r} and {type(entry).__name__} ({value!r}) say different "
                    "things: leave one out"
                )
    return {name: True for name in switches if name != BIAS_CORRECTION}, options


def equalize_options(draft: Draft) -> EqualizeOptions:
    """The typed options of equalization and SmoothQuant."""
    algorithms, cross_layer = switched_on(draft.run), dict(draft.of("cross_layer"))
    if CROSS_LAYER in algorithms and not cross_layer.pop("has_threshold", True):
        if "weight_threshold" in cross_layer:
            draft.remarks.append("CLEWeightThreshold: CLEScaleUseThreshold is False, so that it is not used")
        cross_layer["weight_threshold"] = 0.0
    return EqualizeOptions(
        CrossLayerOptions(**cross_layer) if CROSS_LAYER in algorithms else None,
        SmoothOptions(**draft.of("smooth")) if SMOOTH in algorithms else None,
    )


def refine_options(draft: Draft) -> RefineOptions:
    """The typed options of bias correction and finetuning."""
    algorithms = switched_on(draft.run)
    return RefineOptions(
        BiasCorrectionOptions(**draft.of("bias_correction")) if BIAS_CORRECTION in algorithms else None,
        finetune_options(draft) if FINETUNE in algorithms else None,
    )
