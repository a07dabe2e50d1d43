"""Configs in files, and changes to a config, one key at a time.

A file holds the fields of a QConfig, which is known by its `global_config`, or else those of a QuantizationConfig. The
key of a change is a field (per_channel), an extra option (Percentile), or a part of one after a dot
(MXAttributes.scale_rule).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from os import PathLike
from typing import Any

from quark.errors import InvalidValueError, unknown_name
from quark.files.foreign import SETTINGS, short
from quark.onnx.quantization.config.config import QConfig, QuantizationConfig
from quark.onnx.quantization.config.content import read_as
from quark.onnx.quantization.config.option_table import OPTIONS

Change = tuple[str, Any]


def load_config(path: str | PathLike[str]) -> QuantizationConfig | QConfig:
    """Return the config in a file, whichever kind it is."""
    return read_as(config_from, path)


def config_from(content: Any) -> QuantizationConfig | QConfig:
    """Return the config that `to_dict` wrote, whichever kind it is."""
    kind = QConfig if isinstance(content, Mapping) and "global_config" in content else QuantizationConfig
    return kind.from_dict(content)


def changed(config: QuantizationConfig | QConfig, changes: Iterable[Change]) -> QuantizationConfig | QConfig:
    """Return a new config with the changes. Values are checked when a quantizer is built from it."""
    known = [field.name for field in fields(config)]
    content = config.to_dict()
    for key, value in changes:
        first, *rest = key.split(".")
        if len(rest) > SETTINGS.levels:
            raise InvalidValueError(f"--set {short(key)}: a key of more than {SETTINGS.levels} parts")
        if first not in known and first not in OPTIONS:
            raise unknown_name("field or option", first, [*known, *OPTIONS])
        place = content if first in known else content["extra_options"]
        *outer, last = key.split(".")
        for part in outer:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise InvalidValueError(f"--set {key}: '{part}' is {short(place)}, which has no parts")
        place[last] = value
    return type(config).from_dict(content)
