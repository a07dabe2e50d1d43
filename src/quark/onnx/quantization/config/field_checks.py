"""The fields of a QuantizationConfig: what each may be, and what this version refuses, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError
from quark.onnx.quantization.config.config import QuantizationConfig
from quark.onnx.quantization.config.layers import RunFields
from quark.onnx.quantization.config.option_kinds import (
    BOOL,
    CALIBRATION_METHOD,
    NAMES,
    QUANT_FORMAT,
    QUANT_TYPE,
    Kind,
    integer,
    is_subgraph,
    optional,
)
from quark.onnx.quantization.config.quant_types import VitisQuantFormat
from quark.onnx.quantization.presets import PRESETS

SUBGRAPHS = Kind(
    "a list of pairs of lists of names, like [(['first'], ['last'])]",
    lambda value: isinstance(value, (list, tuple)) and all(map(is_subgraph, value)),
)

_SPECIAL_KINDS: Mapping[str, Kind] = {
    "calibrate_method": CALIBRATION_METHOD,
    "quant_format": QUANT_FORMAT,
    "activation_type": QUANT_TYPE,
    "weight_type": QUANT_TYPE,
    "subgraphs_to_exclude": optional(SUBGRAPHS),
    "log_severity_level": optional(integer()),
    "extra_options": Kind("a dictionary", lambda value: isinstance(value, Mapping)),
}


def _kind(name: str) -> Kind:
    is_list = isinstance(getattr(QuantizationConfig(), name), list)
    return _SPECIAL_KINDS.get(name, optional(NAMES) if is_list else BOOL)


FIELD_KINDS: Mapping[str, Kind] = {each.name: _kind(each.name) for each in fields(QuantizationConfig)}

REFUSED_FIELDS: Mapping[str, str] = {
    "include_rotation": "rotation is not in this version yet",
    "crypto_mode": "models are not encrypted in this version",
    "convert_nchw_to_nhwc": "layouts are kept as they are in this version",
}


def check_fields(config: QuantizationConfig | RunFields) -> None:
    """Raise an error that names the first field with an impossible value."""
    try:
        for each in fields(config):
            FIELD_KINDS[each.name].check(each.name, getattr(config, each.name))
    except (UnsupportedTypeError, InvalidValueError) as error:
        raise type(error)(str(error).replace("option ", "field ", 1)) from None


def refuse_fields(config: RunFields) -> None:
    """Raise an error for a field that asks for what this version does not have, with what to do instead."""
    for name, reason in REFUSED_FIELDS.items():
        if getattr(config, name):
            raise UnsupportedOptionError(f"field '{name}' = True: {reason}; leave it out")
    if isinstance(config.quant_format, VitisQuantFormat) and config.quant_format is not VitisQuantFormat.QDQ:
        raise UnsupportedOptionError(
            f"field 'quant_format' = VitisQuantFormat.{config.quant_format}: FixNeuron nodes run nowhere but in tools "
            "long superseded; use QuantFormat.QDQ"
        )
    if config.enable_npu_cnn and config.enable_npu_transformer:
        raise InvalidValueError("enable_npu_cnn and enable_npu_transformer exclude each other: set one")


def preset_of(config: QuantizationConfig) -> str | None:
    """The preset that this config is, unchanged."""
    # options first: to compare them makes no config
    alike = (name for name, row in PRESETS.items() if row.options == config.extra_options and row.config() == config)
    return next(alike, None)
