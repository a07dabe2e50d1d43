"""Convert configs to plain values for JSON and YAML, and back.

Enums are written by name, as in Python: `calibrate_method: PowerOfTwoMethod.MinMSE`. Functions cannot be written.
Files come from anybody: `quark.files.foreign` reads them, and an error about a value names its field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError, unknown_name
from quark.files.foreign import SETTINGS, key_path, read_json, read_yaml, short
from quark.files.output import complete
from quark.onnx.quantization.config.quant_types import CALIBRATION_METHODS, QUANT_FORMATS, QUANT_TYPES
from quark.onnx.quantization.config.spec import QLayerConfig

_Made = TypeVar("_Made")

_ENUMS = {cls.__name__: cls for cls in (*CALIBRATION_METHODS, *QUANT_TYPES, *QUANT_FORMATS)}

# Options, and settings inside of options, whose values are tuples, which files hold as lists.
_OPTIONS_OF_PAIRS = ("RemoveQDQBetweenOps",)
_SETTINGS_OF_PAIRS = ("LRAdjust",)

_EVALUATION = ("EvalDataReader",)  # an object
_FILES = (
    *("SaveAndRestore", "TensorsRangeFile", "SaveTensorHistFig", "UserCustomOpLibPath"),
    *("ShapeShifterYaml", "PreprocessYAML", "PreprocessedModelPath"),
)

# Folders and files that belong to one machine
_PLACES = frozenset({"CacheDir", "CalibCacheDir", "DistillationFolder", "TmpDir", *_EVALUATION, *_FILES})
# In `algo_config`, where the value is text; the config of a layer that has such a name is not.
_PLACES_OF_ENTRIES = frozenset({"cache_dir", "folder"})


# ---------------------------------------------------------------- values
def refuse_function(name: str) -> Any:
    """Raise the error for a function in a config that is to be written."""
    raise InvalidValueError(
        f"'{name}' is a function or an object, which a file cannot hold: set it in Python after loading"
    )


def plain(value: Any, name: str = "", on_function: Callable[[str], Any] = refuse_function) -> Any:
    """Return the value as JSON can hold it. `on_function` replaces a function, by the name of its option."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if name in _EVALUATION:
        return on_function(name)
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, Mapping):
        return {str(plain(k)): plain(v, str(k), on_function) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        return [plain(item, name, on_function) for item in items]
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, QLayerConfig):
        return value.to_dict()
    if callable(getattr(value, "tolist", None)):  # numbers and arrays of numpy
        return value.tolist()
    if callable(value):
        return on_function(name)
    raise UnsupportedTypeError(f"'{name}' has type {type(value).__name__}, which a file cannot hold")


def restored(value: Any) -> Any:
    """Undo `plain`, except that tuples stay lists."""
    if isinstance(value, str):
        return _enum_of(value)
    if isinstance(value, Mapping):
        return {_enum_of(str(key)): restored(item) for key, item in value.items()}
    return [restored(item) for item in value] if isinstance(value, list) else value


def _enum_of(text: str) -> Any:
    """The enum member that the text names, or the text itself."""
    cls_name, dot, member = text.partition(".")
    if not dot or cls_name not in _ENUMS:
        return text
    members = _ENUMS[cls_name].__members__
    if member not in members:
        raise unknown_name(f"member of {cls_name}", member, members)
    return members[member]


def restored_options(content: Any) -> dict[str, Any]:
    """The extra options of a file."""
    if not isinstance(content, Mapping):
        raise UnsupportedTypeError(f"extra_options: expected a mapping, got {short(content)}")
    options: dict[str, Any] = restored(content)
    for name in _OPTIONS_OF_PAIRS:
        options |= {name: tuples(options[name])} if name in options else {}
    for option in options.values():
        for name in _SETTINGS_OF_PAIRS:
            if isinstance(option, dict) and isinstance(option.get(name), list):
                option[name] = tuple(option[name])
    return options


def tuples(value: Any) -> Any:
    """A list with its inner lists as tuples; any other value as it is."""
    return [tuple(item) if isinstance(item, list) else item for item in value] if isinstance(value, list) else value


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return base with the changes, key by key, also inside dictionaries that both have."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def without_places(content: Any) -> Any:
    """Return the content without temporary and cache folders: they do not affect the bytes of the result."""
    if isinstance(content, Mapping):
        return {name: without_places(item) for name, item in content.items() if not _is_place(name, item)}
    return [without_places(item) for item in content] if isinstance(content, (list, tuple)) else content


def _is_place(name: str, value: Any) -> bool:
    return name in _PLACES or (name in _PLACES_OF_ENTRIES and isinstance(value, (str, PathLike, type(None))))


def refuse_infinite(content: Any, keys: tuple[Any, ...] = ()) -> None:
    """Raise an error for a number that JSON cannot hold, since the config becomes part of the quantized file."""
    if isinstance(content, float) and not isfinite(content):
        raise InvalidValueError(
            f"'{key_path(keys)}' is {content}: expected a finite number; where it is a limit, leave it out"
        )
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, (Mapping, list)):
        items = content.items() if isinstance(content, Mapping) else enumerate(content)
    for key, item in items:
        refuse_infinite(item, (*keys, key))


# ---------------------------------------------------------------- files
def naming(field: str, make: Callable[[Any], _Made], content: Any) -> _Made:
    """Return `make(content)`; errors name the field."""
    try:
        return make(content)
    except (InvalidValueError, UnsupportedTypeError, UnsupportedOptionError) as error:
        raise type(error)(f"{field}: {error}") from error


def write(content: Mapping[str, Any], path: str | PathLike[str]) -> Path:
    """Write content to a JSON or YAML file, according to its suffix."""
    target = Path(path)
    if target.suffix.lower() == ".json":
        text = json.dumps(content, indent=1)
    elif target.suffix.lower() in (".yaml", ".yml"):
        import yaml  # late: it costs 20 ms, and only saving needs it

        text = yaml.safe_dump(dict(content), sort_keys=False)
    else:
        raise InvalidValueError(f"{str(target)!r}: expected a name that ends in .yaml, .yml or .json")
    with complete(target) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return target


def read_as(make: Callable[[Any], _Made], path: str | PathLike[str]) -> _Made:
    """Return what `make` builds from the content of a JSON or YAML file; errors name the file."""
    label = f"config file {str(path)!r}"
    read = read_json if Path(path).suffix.lower() == ".json" else read_yaml
    return naming(label, make, read(path, label, SETTINGS))
