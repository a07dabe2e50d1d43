"""Values of options that are little languages of their own: shapes as text, overrides of tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError, unknown_name
from quark.files.foreign import short
from quark.onnx.choose.options import TensorOverride
from quark.onnx.insert.options import NBitsOptions
from quark.onnx.quantization.config.data_type import BLOCK_OPERATORS
from quark.onnx.quantization.config.option_kinds import BOOL, QUANT_TYPE, Kind, integer, is_integer, is_number
from quark.onnx.quantization.config.quant_types import format_of_type

MOST_SIZE = 1 << 40  # of a dimension
_MOST_FLOAT = 3.4028234663852886e38  # of float32, which scales are stored in


def fixed_shapes(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """'input_1:[1,3,224,224];input_2:[1,10]' as pairs; a lone shape, for every input, has the name ''.

    >>> fixed_shapes("x:[1,3,224,224]; mask:[1, 10]")
    (('x', (1, 3, 224, 224)), ('mask', (1, 10)))
    """
    return tuple(_named_shape(item.strip()) for item in text.split(";") if item.strip())


def _named_shape(item: str) -> tuple[str, tuple[int, ...]]:
    name, _, shape = item.rpartition(":")
    try:
        if not (shape.strip().startswith("[") and shape.strip().endswith("]")):
            raise ValueError
        sizes = tuple(int(size) for size in shape.strip()[1:-1].split(","))
    except ValueError:
        expected = "NAME:[SIZE,SIZE,...] like input:[1,3,224,224], several with ; between"
        raise InvalidValueError(f"option 'FixShapes': {short(item)}, expected {expected}") from None
    if not all(1 <= size < MOST_SIZE for size in sizes):
        raise InvalidValueError(f"option 'FixShapes': {short(item)}, sizes are at least 1 and below {MOST_SIZE}")
    return name.strip(), sizes


def channel_axes(value: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """{'MatMul': 1} or ONNX Runtime's {'MatMul': {'axis': 1}} as pairs."""
    return tuple((op_type, each["axis"] if isinstance(each, Mapping) else each) for op_type, each in value.items())


NBITS_KEYS = {
    "GroupSize": Kind("16, 32, 64, 128 or 256", is_integer, lambda value: value in (16, 32, 64, 128, 256)),
    "Symmetric": BOOL,
    "Bits": Kind("4 or 8", is_integer, lambda value: value in (4, 8)),
    "AccuracyLevel": integer(0, 4),
}


def nbits_options(value: Mapping[str, Any]) -> NBitsOptions:
    defaults = NBitsOptions()
    return NBitsOptions(
        value.get("Bits", defaults.bits),
        value.get("GroupSize", defaults.group_size),
        value.get("Symmetric", defaults.is_symmetric),
        value.get("AccuracyLevel", defaults.accuracy_level),
    )


def _is_one_number(value: Any) -> bool:
    numbers = _listed(value)
    return len(numbers) == 1 and is_number(numbers[0])


def _listed(value: Any) -> list[Any]:
    """The numbers of a number, a list or an array."""
    plain = value.tolist() if callable(getattr(value, "tolist", None)) else value
    return list(plain) if isinstance(plain, (list, tuple)) else [plain]


_NUMBER = Kind("a number", _is_one_number, lambda value: isfinite(_listed(value)[0]))
_NUMBERS = Kind(
    "a number, or a list of numbers",
    lambda value: all(map(is_number, _listed(value))),
    lambda value: all(isfinite(each) and abs(each) <= _MOST_FLOAT for each in _listed(value)),
)
_INTEGERS = Kind(
    "an integer, or a list of integers",
    lambda value: all(map(is_number, _listed(value))),
    lambda value: all(isfinite(each) and abs(each) < MOST_SIZE for each in _listed(value)),
)
OVERRIDE_KEYS = {
    "quant_type": QUANT_TYPE,
    "symmetric": BOOL,
    "reduce_range": BOOL,
    "rmin": _NUMBER,
    "rmax": _NUMBER,
    "scale": _NUMBERS,
    "zero_point": _INTEGERS,
    "axis": integer(),
}


def tensor_overrides(value: Mapping[str, Any]) -> tuple[TensorOverride, ...]:
    """ONNX Runtime's TensorQuantOverrides: {tensor: [one dictionary, or one for each channel]}."""
    return tuple(_override(tensor, entries) for tensor, entries in value.items())


def _override(tensor: str, entries: Any) -> TensorOverride:
    subject = f"TensorQuantOverrides.{tensor}"
    is_list = isinstance(entries, (list, tuple)) and all(isinstance(each, Mapping) for each in entries)
    if not is_list or not entries:
        raise UnsupportedTypeError(
            f"option '{subject}': {short(entries)}, expected a list of one dictionary for the tensor, "
            "or one for each channel"
        )
    for entry in entries:
        _check_override(subject, entry)
    first = entries[0]
    if len(entries) > 1 and "axis" not in first:
        raise InvalidValueError(f"option '{subject}': {len(entries)} entries and no 'axis' in the first")
    return TensorOverride(
        tensor,
        _override_format(subject, first),
        first.get("symmetric"),
        _override_range(subject, entries),
        _gathered(subject, entries, "scale", float),
        _gathered(subject, entries, "zero_point", int),
        first.get("axis"),
        first.get("reduce_range"),
    )


def _check_override(subject: str, entry: Mapping[str, Any]) -> None:
    if "convert" in entry:
        raise UnsupportedOptionError(
            f"option '{subject}.convert': a tensor of two types at once is not available this way; "
            "give the layers that read it a config of their own (QConfig.specific_layer_config)"
        )
    for key, value in entry.items():
        if key not in OVERRIDE_KEYS:
            raise unknown_name(f"key of option '{subject}'", key, [*OVERRIDE_KEYS, "convert"])
        OVERRIDE_KEYS[key].check(f"{subject}.{key}", value)
    if ("scale" in entry) != ("zero_point" in entry):
        raise InvalidValueError(f"option '{subject}': scale and zero_point come together")
    if "scale" in entry and not {"symmetric", "reduce_range", "rmin", "rmax"}.isdisjoint(entry):
        raise InvalidValueError(
            f"option '{subject}': with scale and zero_point given, nothing else of the range can be"
        )


def _override_format(subject: str, entry: Mapping[str, Any]) -> str | None:
    if "quant_type" not in entry:
        return None
    wanted = format_of_type(entry["quant_type"])
    if wanted in BLOCK_OPERATORS:
        raise UnsupportedOptionError(
            f"option '{subject}.quant_type' = {wanted}: block formats for single tensors are not available this "
            "way; give their layer a config of its own (QConfig.specific_layer_config)"
        )
    return wanted


def _override_range(subject: str, entries: Any) -> tuple[float, float] | None:
    first = entries[0]
    if "rmin" not in first and "rmax" not in first:
        return None
    if len(entries) > 1 or "rmin" not in first or "rmax" not in first:
        raise InvalidValueError(
            f"option '{subject}': rmin and rmax come together, and for a whole tensor; for channels give "
            "scale and zero_point"
        )
    lowest, highest = (float(_listed(first[key])[0]) for key in ("rmin", "rmax"))
    if not lowest <= highest:
        raise InvalidValueError(f"option '{subject}': rmin {lowest:g} above rmax {highest:g}")
    return lowest, highest


def _gathered(subject: str, entries: Any, key: str, number_type: type) -> Any:
    """The numbers under key of all entries, each a number or an array of numbers."""
    if key not in entries[0]:
        return None
    if any(key not in entry for entry in entries):
        raise InvalidValueError(f"option '{subject}': '{key}' is in some entries and not in others")
    return tuple(number_type(number) for entry in entries for number in _listed(entry[key]))
