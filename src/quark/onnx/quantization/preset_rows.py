"""How rows of the table of presets are made: by kinds of numbers, and by what goes on top of a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quark.mixed_precision import DEFAULT_SQNR_DB
from quark.onnx.quantization.config.data_type import DataType
from quark.onnx.quantization.config.quant_types import (
    CalibrationMethod,
    ExtendedQuantFormat,
    ExtendedQuantType,
    PowerOfTwoMethod,
    QuantType,
)
from quark.onnx.quantization.preset import Algorithm, Preset

S8, U8 = QuantType.QInt8, QuantType.QUInt8
S16, U16 = ExtendedQuantType.QInt16, ExtendedQuantType.QUInt16
BF16 = ExtendedQuantType.QBFloat16
MIN_MAX, PERCENTILE, MIN_MSE = CalibrationMethod.MinMax, CalibrationMethod.Percentile, PowerOfTwoMethod.MinMSE


# Of the presets that finetune. 'auto' is found for each layer: what fits differs a hundredfold between formats.
ADAROUND_RATE: float | str = "auto"
ADAQUANT_RATE: float | str = "auto"
FINETUNING_BATCH = 4


def _finetuning(learning_rate: float | str, algorithm: str, batch_size: int) -> dict[str, Any]:
    return {
        "DataSize": 1000,
        "FixedSeed": 1705472343,
        "BatchSize": batch_size,
        "NumIterations": 1000,
        "LearningRate": learning_rate,
        "OptimAlgorithm": algorithm,
        "OptimDevice": "cpu",
        "InferDevice": "cpu",
        "EarlyStop": True,
    }


DEFAULT_ADAROUND_PARAMS = _finetuning(0.1, "adaround", 2)  # the parameters that scripts import
DEFAULT_ADAQUANT_PARAMS = _finetuning(1e-5, "adaquant", 2)

_ADAROUND_PARAMETERS = _finetuning(ADAROUND_RATE, "adaround", FINETUNING_BATCH)
_ADAQUANT_PARAMETERS = _finetuning(ADAQUANT_RATE, "adaquant", FINETUNING_BATCH)
ADAROUND = Algorithm("AdaRound", "_ADAROUND", "include_fast_ft", "FastFinetune", _ADAROUND_PARAMETERS)
ADAQUANT = Algorithm("AdaQuant", "_ADAQUANT", "include_fast_ft", "FastFinetune", _ADAQUANT_PARAMETERS)

_EXTENDED = {"quant_format": ExtendedQuantFormat.QDQ}


def integers(name: str, description: str, method: Any, types: tuple[Any, Any], /, **options: Any) -> Preset:
    """Integers of (activation, weight) types, with ranges found by a method. Signed weights have a scale for each
    channel, which costs integer kernels nothing and keeps depthwise layers alive; power-of-two scales have one."""
    is_plain = all(isinstance(each, QuantType) for each in types)
    fields = {"calibrate_method": method, "activation_type": types[0], "weight_type": types[1]}
    if method is not MIN_MSE and types[1] is not U8:
        fields["per_channel"] = True
    return Preset(name, description, fields if is_plain else {**_EXTENDED, **fields}, options)


def floats(name: str, description: str, quant_type: Any, /, **options: Any) -> Preset:
    return Preset(name, description, {**_EXTENDED, "activation_type": quant_type, "weight_type": quant_type}, options)


def blocks(name: str, description: str, *types: DataType | Any) -> Preset:
    """Block types: one for activations and weights, or one each. A quant type without attributes passes as it is."""
    activation, weight = types if len(types) == 2 else types * 2
    quant_types = [each.map_onnx_format if isinstance(each, DataType) else each for each in (activation, weight)]
    fields = {**_EXTENDED, "activation_type": quant_types[0], "weight_type": quant_types[1]}
    return Preset(name, description, fields, _attributes(activation, weight))


def _attributes(*types: DataType | Any) -> dict[str, Any]:
    options = {ExtendedQuantType.QBFP: "BFPAttributes", ExtendedQuantType.QMX: "MXAttributes"}
    return {options[each.map_onnx_format]: dict(each.attributes) for each in types if isinstance(each, DataType)}


def mixed(name: str, description: str, base: Preset, target: Any) -> Preset:
    """Auto mixed precision from the base's types to the target's."""
    target_type = target.map_onnx_format if isinstance(target, DataType) else target
    precision = {"ActTargetQuantType": target_type, "WeightTargetQuantType": target_type, "SQNRTarget": DEFAULT_SQNR_DB}
    options = {**base.options, **_attributes(target), "AutoMixprecision": precision}
    return Preset(name, description, {**base.fields, "include_auto_mp": True}, options)


def accurate(base: Preset, name: str) -> Preset:
    """The base with percentile calibration and AdaRound."""
    options = {key: value for key, value in base.options.items() if key != "CalibMovingAverage"}
    fields = {**base.fields, "calibrate_method": CalibrationMethod.Percentile}
    refined = replace(base, fields=fields, options={"Percentile": 99.9999, **options}).with_algorithm(ADAROUND)
    description = base.description.replace("MinMax", "percentile 99.9999").replace(", moving average", "")
    return replace(refined, name=name, description=f"{description}, refined by AdaRound")
