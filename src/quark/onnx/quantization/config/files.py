"""Configs as YAML and JSON.

A file holds the fields of a QuantizationConfig, or of a QConfig, which is known by its `global_config`. Enums are
written by name, as in Python: `calibrate_method: PowerOfTwoMethod.MinMSE`. A file may start from a preset and say only
what differs; extra options are merged key by key:

    preset: XINT8
    extra_options:
      CalibDataSize: 100

A key that is not known is an error. Functions cannot be written. Files come from anybody: `quark.files.foreign` reads
them, and what is of the wrong type is an error that names the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from enum import Enum
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError, unknown_name
from quark.files.foreign import SETTINGS, key_path, read_json, read_yaml, short
from quark.onnx.quantization.config.algorithm import AlgoConfig
from quark.onnx.quantization.config.config import QConfig, QuantizationConfig
from quark.onnx.quantization.config.quant_types import CALIBRATION_METHODS, QUANT_FORMATS, QUANT_TYPES
from quark.onnx.quantization.config.spec import QLayerConfig

_Made = TypeVar("_Made")

_ENUMS = {cls.__name__: cls for cls in (*CALIBRATION_METHODS, *QUANT_TYPES, *QUANT_FORMATS)}

# Options whose values are pairs: files know lists only, so that these become tuples again.
_OPTIONS_OF_PAIRS = ("RemoveQDQBetweenOps",)
_SETTINGS_OF_PAIRS = ("LRAdjust",)

# Folders that the result does not depend on; the last name is that of an entry of `algo_config`.
_PLACES = frozenset({"CacheDir", "CalibCacheDir", "TmpDir", "cache_dir"})


def refuse_function(name: str) -> Any:
    """For files, which cannot hold one."""
    raise InvalidValueError(f"'{name}' is a function, which a file cannot hold: set it in Python after loading")


def plain(value: Any, name: str = "", on_function: Callable[[str], Any] = refuse_function) -> Any:
    """value as JSON can hold it; `on_function` says what becomes of a function, by the name of its option."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, Mapping):
        return {str(plain(k)): plain(v, str(k), on_function) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        return [plain(each, name, on_function) for each in items]
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, (QLayerConfig, AlgoConfig)):
        return value.to_dict()
    if callable(getattr(value, "tolist", None)):  # numbers and arrays of numpy
        return value.tolist()
    if callable(value):
        return on_function(name)
    raise UnsupportedTypeError(f"'{name}' has type {type(value).__name__}, which a file cannot hold")


def without_places(content: Any) -> Any:
    """Settings without the folders that something is kept in meanwhile: the bytes of a file follow from what was made,
    not from where."""
    if isinstance(content, Mapping):
        return {name: without_places(each) for name, each in content.items() if name not in _PLACES}
    return [without_places(each) for each in content] if isinstance(content, (list, tuple)) else content


def refuse_infinite(content: Any, keys: tuple[Any, ...] = ()) -> None:
    """Raise an error for a number that JSON cannot hold: the config is written into the file that is made by it."""
    if isinstance(content, float) and not isfinite(content):
        raise InvalidValueError(
            f"'{key_path(keys)}' is {content}: expected a finite number; where it is a limit, leave it out"
        )
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, (Mapping, list)):
        items = content.items() if isinstance(content, Mapping) else enumerate(content)
    for key, each in items:
        refuse_infinite(each, (*keys, key))


def restored(value: Any) -> Any:
    """What `plain` was made of, but for tuples."""
    if isinstance(value, str):
        return _enum_of(value)
    if isinstance(value, Mapping):
        return {_enum_of(str(key)): restored(each) for key, each in value.items()}
    return [restored(each) for each in value] if isinstance(value, list) else value


def _enum_of(text: str) -> Any:
    """The member that text names, or the text itself where it names no enum of ours."""
    cls_name, dot, member = text.partition(".")
    if not dot or cls_name not in _ENUMS:
        return text
    members = _ENUMS[cls_name].__members__
    if member not in members:
        raise unknown_name(f"member of {cls_name}", member, members)
    return members[member]


def _options(content: Any) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise UnsupportedTypeError(f"extra_options: expected a mapping, got {short(content)}")
    options: dict[str, Any] = restored(content)
    for name in _OPTIONS_OF_PAIRS:
        if isinstance(options.get(name), list):
            options[name] = [tuple(each) if isinstance(each, list) else each for each in options[name]]
    for each in options.values():
        for name in _SETTINGS_OF_PAIRS:
            if isinstance(each, dict) and isinstance(each.get(name), list):
                each[name] = tuple(each[name])
    return options


def quantization_config_to_dict(config: QuantizationConfig) -> dict[str, Any]:
    return {each.name: plain(getattr(config, each.name), each.name) for each in fields(config)}


def quantization_config_from_dict(content: Any) -> QuantizationConfig:
    from quark.onnx.quantization.presets import get_default_config

    if not isinstance(content, Mapping):
        raise UnsupportedTypeError(f"config: expected a mapping of fields, got {short(content)}")
    values = dict(content)
    preset = values.pop("preset", None)
    if preset is not None and not isinstance(preset, str):
        raise UnsupportedTypeError(f"preset is {short(preset)}: expected the name of a preset")
    config = QuantizationConfig() if preset is None else get_default_config(preset)
    known = [each.name for each in fields(config)]
    for name, value in values.items():
        if name not in known:
            raise unknown_name("field of QuantizationConfig", name, [*known, "preset"])
        if name == "extra_options":
            value = merged(config.extra_options, _options({} if value is None else value))
        else:
            value = _subgraphs(value) if name == "subgraphs_to_exclude" else restored(value)
        setattr(config, name, value)
    return config


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """base with the changes, key by key, also inside dictionaries that both have."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def _subgraphs(value: Any) -> Any:
    return [tuple(each) if isinstance(each, list) else each for each in value] if isinstance(value, list) else value


def qconfig_to_dict(config: QConfig, on_function: Callable[[str], Any] = refuse_function) -> dict[str, Any]:
    return {
        "global_config": config.global_config.to_dict(),
        "specific_layer_config": _layers_to_list(config.specific_layer_config),
        "layer_type_config": _layers_to_list(config.layer_type_config),
        "exclude": plain(config.exclude),
        "algo_config": [each.to_dict(on_function) for each in config.algo_config],
        "use_external_data_format": config.use_external_data_format,
        "extra_options": plain(config.extra_options, "", on_function),
    }


def layer_entries(layers: Mapping[Any, Any]) -> list[tuple[QLayerConfig | None, list[str]]]:
    """Both ways of writing per-layer configs as pairs: what is wanted, and for which names."""
    entries: list[tuple[QLayerConfig | None, list[str]]] = []
    for key, value in layers.items():
        if key is None or isinstance(key, QLayerConfig):
            entries.append((key, [value] if isinstance(value, str) else list(value)))
        elif isinstance(key, str) and (value is None or isinstance(value, QLayerConfig)):
            entries.append((value, [key]))
        else:
            raise UnsupportedTypeError(
                f"layer config {key!r}: {value!r}: expected {{QLayerConfig or None: [names]}} or {{name: QLayerConfig}}"
            )
    return entries


def _layers_to_list(layers: Mapping[Any, Any]) -> list[list[Any]]:
    return [[config and config.to_dict(), names] for config, names in layer_entries(layers)]


def _layers_from_list(content: Any, field: str) -> dict[QLayerConfig | None, list[str]]:
    expected = "a list of pairs [CONFIG, [NAMES]], CONFIG being a mapping, or null for what stays in float"
    layers: dict[QLayerConfig | None, list[str]] = {}
    for number, entry in enumerate(_list(content, field, expected)):
        if not isinstance(entry, (list, tuple)) or len(entry) != 2:
            raise InvalidValueError(f"{field}[{number}] is {short(entry)}: expected {expected}")
        config, names = entry
        if not isinstance(names, (list, tuple)) or not all(isinstance(each, str) for each in names):
            raise InvalidValueError(f"{field}[{number}][1] is {short(names)}: expected a list of names")
        key = None if config is None else naming(f"{field}[{number}][0]", QLayerConfig.from_dict, config)
        layers[key] = [*layers.get(key, []), *names]
    return layers


def _list(content: Any, field: str, expected: str) -> list[Any]:
    """A field of a QConfig that is a list, or null for an empty one."""
    if content is not None and not isinstance(content, (list, tuple)):
        raise UnsupportedTypeError(f"{field} is {short(content)}: expected {expected}")
    return list(content or [])


def naming(field: str, make: Callable[[Any], _Made], content: Any) -> _Made:
    """What is made of the content; an error about it names the field."""
    try:
        return make(content)
    except (InvalidValueError, UnsupportedTypeError, UnsupportedOptionError) as error:
        raise type(error)(f"{field}: {error}") from error


def qconfig_from_dict(content: Any) -> QConfig:
    known = [each.name for each in fields(QConfig)]
    if not isinstance(content, Mapping) or "global_config" not in content:
        raise InvalidValueError("not a QConfig: expected a mapping with 'global_config'")
    for name in content:
        if name not in known:
            raise unknown_name("field of QConfig", name, known)
    exclude = content.get("exclude")
    algorithms = _list(content.get("algo_config"), "algo_config", "a list of mappings with the name of an algorithm")
    return QConfig(
        naming("global_config", QLayerConfig.from_dict, content["global_config"]),
        _layers_from_list(content.get("specific_layer_config"), "specific_layer_config"),
        _layers_from_list(content.get("layer_type_config"), "layer_type_config"),
        _subgraphs([exclude] if isinstance(exclude, str) else _list(exclude, "exclude", "a list of names")),
        [naming(f"algo_config[{i}]", AlgoConfig.from_dict, each) for i, each in enumerate(algorithms)],
        content.get("use_external_data_format", False),
        extra_options=_options(content.get("extra_options", {})),
    )


def write(content: Mapping[str, Any], path: str | PathLike[str]) -> Path:
    """Write content to a file of the kind that its suffix says."""
    target = Path(path)
    if target.suffix.lower() == ".json":
        text = json.dumps(content, indent=1)
    elif _is_yaml(target):
        import yaml

        text = yaml.safe_dump(dict(content), sort_keys=False)
    else:
        raise InvalidValueError(f"{str(target)!r}: expected a name that ends in .yaml, .yml or .json")
    from quark.onnx.save import write_text  # here: it brings onnx, which configs do without

    write_text(text, target)
    return target


def _is_yaml(path: Path) -> bool:
    return path.suffix.lower() in (".yaml", ".yml")


def read_as(make: Callable[[Any], _Made], path: str | PathLike[str]) -> _Made:
    """What is made of the content of such a file; every error names it."""
    label = f"config file {str(path)!r}"
    read = read_json if Path(path).suffix.lower() == ".json" else read_yaml
    return naming(label, make, read(path, label, SETTINGS))


def load_config(path: str | PathLike[str]) -> QuantizationConfig | QConfig:
    """The config in a file, whichever kind it is."""

    def make(content: Any) -> QuantizationConfig | QConfig:
        is_by_tensor = isinstance(content, Mapping) and "global_config" in content
        return qconfig_from_dict(content) if is_by_tensor else quantization_config_from_dict(content)

    return read_as(make, path)
