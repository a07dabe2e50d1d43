"""What each field of a config may be, which of them turn algorithms on, and what this version refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError
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
from quark.onnx.quantization.config.quant_types import VitisQuantFormat

# The fields and the option that turn algorithms on.
CROSS_LAYER, SMOOTH, BIAS_CORRECTION = "include_cle", "include_sq", "BiasCorrection"
MIXED_PRECISION, FINETUNE = "include_auto_mp", "include_fast_ft"

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

REFUSED_FIELDS: Mapping[str, str] = {
    "include_rotation": "rotation is not in this version yet",
    "crypto_mode": "models are not encrypted in this version",
    "convert_nchw_to_nhwc": "layouts are kept as they are in this version",
}


def switched_on(config: QuantizationConfig) -> frozenset[str]:
    """The fields and extra options that turn an algorithm on."""
    algorithms = [name for name in (CROSS_LAYER, SMOOTH, MIXED_PRECISION, FINETUNE) if getattr(config, name)]
    options = [BIAS_CORRECTION, *(each.switch for each in FEATURES)]
    return frozenset([*algorithms, *(name for name in options if config.extra_options.get(name))])


def check_fields(config: QuantizationConfig) -> None:
    """Raise an error that names the first field with an impossible value."""
    try:
        for each in fields(config):
            FIELD_KINDS[each.name].check(each.name, getattr(config, each.name))
    except (UnsupportedTypeError, InvalidValueError) as error:
        raise type(error)(str(error).replace("option ", "field ", 1)) from None


def refuse_fields(run: QuantizationConfig) -> None:
    """Raise an error for a field that asks for what this version does not have, with what to do instead."""
    for name, reason in REFUSED_FIELDS.items():
        if getattr(run, name):
            raise UnsupportedOptionError(f"field '{name}' = True: {reason}; leave it out")
    if isinstance(run.quant_format, VitisQuantFormat) and run.quant_format is not VitisQuantFormat.QDQ:
        raise UnsupportedOptionError(
            f"field 'quant_format' = VitisQuantFormat.{run.quant_format}: FixNeuron nodes run nowhere but in tools "
            "long superseded; use QuantFormat.QDQ"
        )
    if run.enable_npu_cnn and run.enable_npu_transformer:
        raise InvalidValueError("enable_npu_cnn and enable_npu_transformer exclude each other: set one")
