"""The valid values of a config's fields, the fields that turn algorithms on, and those that this version rejects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.features.order import FEATURES
from quark.onnx.quantization.config.config import QuantizationConfig
from quark.onnx.quantization.config.option_kinds import (
    BOOL,
    CALIBRATION_METHOD,
    NAMES,
    QUANT_FORMAT,
    QUANT_TYPE,
    SUBGRAPHS,
    Kind,
    integer,
    mapping,
    optional,
)
from quark.onnx.quantization.config.quant_types import ExtendedQuantFormat, ExtendedQuantType, VitisQuantFormat

# The fields and the option that turn algorithms on.
CROSS_LAYER, SMOOTH, BIAS_CORRECTION = "include_cle", "include_sq", "BiasCorrection"
COMPENSATION, GPTQ = "Compensation", "UseGPTQ"  # two names of one switch
DISTILLATION = "Distillation"
AWQ = "AWQ"
MIXED_PRECISION, FINETUNE, ROTATION = "include_auto_mp", "include_fast_ft", "include_rotation"

FIELD_KINDS: Mapping[str, Kind] = {
    **{
        name: optional(NAMES) if isinstance(value, list) else BOOL for name, value in vars(QuantizationConfig()).items()
    },
    "calibrate_method": CALIBRATION_METHOD,
    "quant_format": QUANT_FORMAT,
    "activation_type": QUANT_TYPE,
    "weight_type": QUANT_TYPE,
    "subgraphs_to_exclude": optional(SUBGRAPHS),
    "log_severity_level": optional(integer()),
    "extra_options": mapping("a dictionary"),
}


def switched_on(config: QuantizationConfig) -> frozenset[str]:
    """The fields and extra options that turn an algorithm on."""
    algorithms = [name for name in (CROSS_LAYER, SMOOTH, MIXED_PRECISION, FINETUNE, ROTATION) if getattr(config, name)]
    given = config.extra_options
    options = [name for name in (BIAS_CORRECTION, *(feature.switch for feature in FEATURES)) if given.get(name)]
    nbits = given.get("MatMulNBitsParams") if given.get("UseMatMulNBits") else None
    algorithm = nbits.get("Algorithm") if isinstance(nbits, Mapping) else None
    options += [COMPENSATION] if given.get(GPTQ) or algorithm == "GPTQ" else []
    options += [AWQ] if algorithm == "AWQ" else []
    return frozenset([*algorithms, *options])


def check_fields(config: QuantizationConfig) -> None:
    """Raise an error that names the first field with an impossible value."""
    try:
        for field in fields(config):
            FIELD_KINDS[field.name].check(field.name, getattr(config, field.name))
    except (UnsupportedTypeError, InvalidValueError) as error:
        raise type(error)(str(error).replace("option ", "field ", 1)) from None


def without_fix_neurons(config: QuantizationConfig) -> QuantizationConfig:
    """The config with a pair of nodes for each quantizer, where it asks for the single nodes of earlier tools. Two of
    these formats also say the types."""
    if not isinstance(config.quant_format, VitisQuantFormat) or config.quant_format is VitisQuantFormat.QDQ:
        return config
    types = {VitisQuantFormat.BFPFixNeuron: ExtendedQuantType.QBFP, VitisQuantFormat.MXFixNeuron: ExtendedQuantType.QMX}
    changed = replace(config, quant_format=ExtendedQuantFormat.QDQ)
    if config.quant_format in types:
        changed.activation_type = changed.weight_type = types[config.quant_format]
    return changed


def refuse_fields(run: QuantizationConfig) -> None:
    """Raise an error for fields that contradict each other."""
    if run.enable_npu_cnn and run.enable_npu_transformer:
        raise InvalidValueError("enable_npu_cnn and enable_npu_transformer exclude each other: set one")
