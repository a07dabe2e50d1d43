"""Changes to a configuration, one key at a time.

A key is a field (per_channel), an extra option (Percentile), or a part of one after a dot (MXAttributes.scale_rule).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from quark.errors import InvalidValueError, unknown_name
from quark.files.foreign import SETTINGS, short
from quark.onnx.quantization.config.config import QConfig, QuantizationConfig
from quark.onnx.quantization.config.option_table import OPTIONS

Change = tuple[str, Any]


def changed(config: QuantizationConfig | QConfig, changes: Iterable[Change]) -> QuantizationConfig | QConfig:
    """Return a new config with the changes. Values are checked when the quantizer is built of it."""
    known = [each.name for each in fields(config)]
    content = config.to_dict()
    for key, value in changes:
        first, *rest = key.split(".")
        if len(rest) > SETTINGS.levels:
            raise InvalidValueError(f"--set {short(key)}: a key of more than {SETTINGS.levels} parts")
        if first not in known and first not in OPTIONS:
            raise unknown_name("field or option", first, [*known, *OPTIONS])
        place = content if first in known else content["extra_options"]
        for part in [first, *rest][:-1]:
            place = _inner(place, part, key)
        place[[first, *rest][-1]] = value
    return type(config).from_dict(content)


def _inner(place: dict[str, Any], part: str, key: str) -> dict[str, Any]:
    inner = place.setdefault(part, {})
    if not isinstance(inner, dict):
        raise InvalidValueError(f"--set {key}: '{part}' is {short(inner)}, which has no parts")
    return inner
