"""--config and --set: a config from a name or a file, and changes to it.

KEY of --set is a field (per_channel), an extra option (Percentile), or a part of one after a dot
(MXAttributes.scale_rule). VALUE is YAML: true, 99.99, [Conv, Gemm], QuantType.QInt8.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.errors import InvalidValueError

if TYPE_CHECKING:
    from quark.onnx.quantization.config.config import QConfig, QuantizationConfig

DEFAULT_CONFIG = "XINT8"
FILE_SUFFIXES = (".yaml", ".yml", ".json")
Change = tuple[str, Any]


def parse_changes(ctx: click.Context, _: click.Parameter, texts: tuple[str, ...]) -> tuple[Change, ...]:
    """KEY=VALUE as a key and a value, for click; anything else is a mistake in the command line."""
    from quark.files.foreign import parse_yaml, short

    changes = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise click.BadParameter(f"{short(text)}: expected KEY=VALUE", ctx)
        try:
            changes.append((key, parse_yaml(value, "the value")))
        except InvalidValueError as error:
            raise click.BadParameter(f"{short(text)}: {error}", ctx) from error
    return tuple(changes)


def is_file_name(name: str) -> bool:
    return name.lower().endswith(FILE_SUFFIXES)


def read_config(name: str, changes: tuple[Change, ...]) -> QuantizationConfig | QConfig:
    """The preset of that name or the config in that file, with the changes made."""
    from quark.onnx.quantization.config.changes import changed
    from quark.onnx.quantization.config.files import load_config
    from quark.onnx.quantization.presets import get_default_config

    config = load_config(Path(name)) if is_file_name(name) else get_default_config(name)
    return changed(config, changes) if changes else config
