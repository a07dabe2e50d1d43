"""The types of option values, and values with a syntax of their own: shapes as text, overrides of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf, isfinite
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any

from quark.decide.options import TensorOverride
from quark.decide.specs import GroupRule
from quark.errors import InvalidValueError, UnsupportedTypeError, unknown_name
from quark.files.foreign import short
from quark.onnx.insert.pairs import NBitsOptions, WeightForm
from quark.onnx.quantization.config.config import is_names, is_subgraph
from quark.onnx.quantization.config.quant_types import CALIBRATION_METHODS, QUANT_FORMATS, QUANT_TYPES, format_of_type

MOST_COUNTED = 1 << 63  # every integer of an option is smaller
_LIBRARIES = (".so", ".dll", ".dylib")
MOST_SIZE = 1 << 40  # of a dimension
_MOST_FLOAT = 3.4028234663852886e38  # the largest float32, the type of stored scales


@dataclass(frozen=True)
class Kind:
    """A kind of value. `has_type` rejects values of the wrong type, `is_legal` impossible ones of the right type. For
    dictionaries, `keys` are the kinds of their values by key, and other keys are errors."""

    expected: str
    has_type: Callable[[Any], bool]
    is_legal: Callable[[Any], bool] = lambda value: True
    keys: Mapping[str, Kind] | None = None

    def check(self, name: str, value: Any) -> None:
        """Raise an error that names the option, what came and what is expected."""
        if not self.has_type(value):
            raise UnsupportedTypeError(
                f"option '{name}': {short(value)} has type {type(value).__name__}, expected {self.expected}"
            )
        if not self.is_legal(value):
            raise InvalidValueError(f"option '{name}': {short(value)} is not possible, expected {self.expected}")
        if self.keys is not None:
            for key, item in value.items():
                if key not in self.keys:
                    raise unknown_name(f"key of option '{name}'", key, self.keys)
                self.keys[key].check(f"{name}.{key}", item)


def is_integer(value: Any) -> bool:
    """True for integers, also of numpy, but not for bools."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """True for real numbers, also of numpy, but not for bools."""
    return isinstance(value, Real) and not isinstance(value, bool)


def integer(lowest: int | None = None, highest: int | None = None) -> Kind:
    """An integer within bounds that are included."""
    bounds = "" if lowest is None else f" of at least {lowest}" if highest is None else f" from {lowest} to {highest}"

    def is_within(value: int) -> bool:
        is_counted = abs(value) < MOST_COUNTED
        return is_counted and (lowest is None or value >= lowest) and (highest is None or value <= highest)

    return Kind(f"an integer{bounds}", is_integer, is_within)


def number(above: float | None = None, highest: float | None = None) -> Kind:
    """A number above a bound that is excluded."""
    bounds = "" if above is None else f" above {above:g}" + ("" if highest is None else f", at most {highest:g}")

    def is_within(value: float) -> bool:
        return (above is None or value > above) and (highest is None or value <= highest)

    return Kind(f"a number{bounds}", is_number, is_within)


def number_from(lowest: float, highest: float = inf) -> Kind:
    """A number within bounds that are included."""
    bounds = f"of at least {lowest:g}" if highest == inf else f"from {lowest:g} to {highest:g}"
    return Kind(f"a number {bounds}", is_number, lambda value: lowest <= value <= highest)


def number_or(word: str, kind: Kind) -> Kind:
    """A number of that kind, or a certain word."""
    return Kind(
        f"{kind.expected}, or '{word}'",
        lambda value: isinstance(value, str) or kind.has_type(value),
        lambda value: value == word if isinstance(value, str) else kind.is_legal(value),
    )


def one_of(*choices: str) -> Kind:
    """One of these strings."""
    return Kind("one of " + ", ".join(choices), lambda value: isinstance(value, str), lambda value: value in choices)


def optional(kind: Kind) -> Kind:
    """None, or a value of that kind."""
    return Kind(
        f"{kind.expected}, or None",
        lambda value: value is None or kind.has_type(value),
        lambda value: value is None or kind.is_legal(value),
    )


def kind_of(default: Any) -> Kind:
    """The kind of value that this default is an example of."""
    if isinstance(default, bool):
        return BOOL
    if isinstance(default, Enum):
        return one_of(*(str(member.value) for member in type(default)))
    if isinstance(default, int):
        return integer()
    return number() if isinstance(default, float) else TEXT


def mapping(expected: str, keys: Mapping[str, Kind] | None = None) -> Kind:
    """A dictionary, of these keys if they are given."""
    return Kind(expected, lambda value: isinstance(value, Mapping), keys=keys)


def member_of(classes: tuple[Any, ...], example: str) -> Kind:
    """A member of one of these enums."""
    names = ", ".join(cls.__name__ for cls in classes)
    return Kind(f"a member of {names}, like {example}", lambda value: isinstance(value, classes))


BOOL = Kind("True or False", lambda value: isinstance(value, bool))
TEXT = Kind("a string", lambda value: isinstance(value, str))
PATH = Kind("a path", lambda value: isinstance(value, (str, PathLike)), lambda value: "\0" not in str(value))
DEVICE = Kind(
    "cpu, cuda, cuda:N, hip or hip:N, with the number N of a device",
    lambda value: isinstance(value, str),
    lambda value: re.fullmatch(r"cpu|(cuda|hip)(:\d+)?", value, re.ASCII) is not None,
)
NAMES = Kind("a list of strings", is_names)
PAIRS = Kind(
    "a list of pairs of operator types",
    lambda value: (
        isinstance(value, (list, tuple))
        and all(isinstance(item, (list, tuple)) and len(item) == 2 and is_names(item) for item in value)
    ),
)
FUNCTION = Kind("a function", callable)
TWO_NUMBERS = Kind(
    "two numbers", lambda value: isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_number, value))
)
PERCENTILES = Kind(
    "a list of numbers above 50, at most 100",
    lambda value: isinstance(value, (list, tuple)) and all(map(is_number, value)),
    lambda value: bool(value) and all(50 < percent <= 100 for percent in value),
)
AXES = Kind(
    "a dictionary from operator type to an axis, or to {'axis': AXIS}",
    lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
    lambda value: all(is_integer(axis.get("axis") if isinstance(axis, Mapping) else axis) for axis in value.values()),
)
SHAPES = Kind(
    "a dictionary from input names to shapes, like {'image': [1, 3, 224, 224]}",
    lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
    lambda value: all(
        isinstance(shape, (list, tuple)) and all(is_integer(size) and size < MOST_SIZE for size in shape)
        for shape in value.values()
    ),
)
RANGES = Kind(
    "a dictionary from input names to [lowest, highest]",
    lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
    lambda value: all(
        TWO_NUMBERS.has_type(bounds) and -_MOST_FLOAT <= bounds[0] <= bounds[1] <= _MOST_FLOAT
        for bounds in value.values()
    ),
)
PATHS = Kind(
    "a path, or a list of paths",
    lambda value: all(PATH.has_type(path) for path in _listed(value)),
    lambda value: all(PATH.is_legal(path) for path in _listed(value)),
)
READER = Kind(
    "a data reader with get_next, an iterable of samples, an array, or a folder",
    lambda value: callable(getattr(value, "get_next", None)) or hasattr(value, "__iter__") or PATH.has_type(value),
)
SUBGRAPHS = Kind(
    "a list of pairs of lists of names, like [(['first'], ['last'])]",
    lambda value: isinstance(value, (list, tuple)) and all(map(is_subgraph, value)),
)
QUANT_TYPE = member_of(QUANT_TYPES, "QuantType.QInt8")
QUANT_FORMAT = member_of(QUANT_FORMATS, "QuantFormat.QDQ")
CALIBRATION_METHOD = member_of(CALIBRATION_METHODS, "CalibrationMethod.MinMax")


# ---------------------------------------------------------------- little languages
def fixed_shapes(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """'input_1:[1,3,224,224];output_1:[1,10]' as pairs of the name of an input or output and its shape; a lone shape,
    for every input, has the name ''.

    >>> fixed_shapes("x:[1,3,224,224]; mask:[1, 10]")
    (('x', (1, 3, 224, 224)), ('mask', (1, 10)))
    """
    shapes = []
    for item in filter(None, map(str.strip, text.split(";"))):
        name, _, shape = item.rpartition(":")
        shape = shape.strip()
        try:
            sizes = tuple(map(int, shape[1:-1].split(","))) if shape[:1] == "[" and shape[-1:] == "]" else ()
        except ValueError:
            sizes = ()
        if not sizes:
            expected = "NAME:[SIZE,SIZE,...] like input:[1,3,224,224], several with ; between"
            raise InvalidValueError(f"option 'FixShapes': {short(item)}, expected {expected}")
        if not all(1 <= size < MOST_SIZE for size in sizes):
            raise InvalidValueError(f"option 'FixShapes': {short(item)}, sizes are at least 1 and below {MOST_SIZE}")
        shapes.append((name.strip(), sizes))
    return tuple(shapes)


def shapes_by_name(value: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """{'x': [1, 3]} as pairs."""
    return tuple((name, tuple(int(size) for size in shape)) for name, shape in value.items())


def ranges_by_name(value: Mapping[str, Any] | None) -> tuple[tuple[str, tuple[float, float]], ...] | None:
    """{'x': [0, 255]} as pairs; None for None."""
    return None if value is None else tuple((name, (bounds[0], bounds[1])) for name, bounds in value.items())


def custom_libraries(value: Any) -> tuple[Path, ...]:
    """The libraries of UserCustomOpLibPath: files, or all libraries of a folder."""
    paths: list[Path] = []
    for entry in [] if value is None else _listed(value):
        path = Path(entry)
        inside = sorted(file for file in path.iterdir() if file.suffix in _LIBRARIES) if path.is_dir() else [path]
        if not inside or not all(file.is_file() for file in inside):
            raise InvalidValueError(
                f"option 'UserCustomOpLibPath': '{path}' has no library; expected a file such as libops.so, or a "
                "folder of such files"
            )
        paths += inside
    return tuple(paths)


def channel_axes(value: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """{'MatMul': 1} or ONNX Runtime's {'MatMul': {'axis': 1}} as pairs."""
    return tuple((op_type, axis["axis"] if isinstance(axis, Mapping) else axis) for op_type, axis in value.items())


GROUP_SIZES = (16, 32, 64, 128, 256)
GROUP_SIZE = Kind("16, 32, 64, 128 or 256", is_integer, lambda value: value in GROUP_SIZES)
GPTQ_KEYS = {
    "Bits": integer(2, 16),
    "BlockSize": integer(1),
    "GroupSize": integer(-1),
    "PercDamp": number_from(0.0, 1.0),
    **dict.fromkeys(("ActOrder", "PerChannel", "MSE", "WeightSymmetric"), BOOL),
}
NBITS_KEYS = {
    "GroupSize": Kind(
        "16, 32, 64, 128 or 256, or -1 for one scale per output",
        is_integer,
        lambda value: value in (-1, *GROUP_SIZES),
    ),
    "Symmetric": BOOL,
    "Bits": Kind("2, 4 or 8", is_integer, lambda value: value in (2, 4, 8)),
    "AccuracyLevel": integer(0, 4),
    "Algorithm": one_of("DEFAULT", "RTN", "HQQ", "GPTQ", "AWQ"),
    "Form": one_of(*(form.value for form in WeightForm)),
    "EmbeddingBits": Kind("2, 4 or 8, or 0 for float", is_integer, lambda value: value in (0, 2, 4, 8)),
    "EmbeddingGroupSize": GROUP_SIZE,
}
_NBITS_RULES = {
    **dict.fromkeys(("DEFAULT", "RTN", "GPTQ", "AWQ"), GroupRule.SEARCHED),
    "HQQ": GroupRule.HALF_QUADRATIC,
}
NBITS_FIELDS = {
    "GroupSize": "group_size",
    "Symmetric": "is_symmetric",
    "Bits": "bits",
    "AccuracyLevel": "accuracy_level",
    "Form": "form",
    "EmbeddingBits": "embedding_bits",
    "EmbeddingGroupSize": "embedding_group_size",
}


def nbits_options(value: Mapping[str, Any]) -> NBitsOptions:
    """MatMulNBitsParams as typed options."""
    given = {NBITS_FIELDS[key]: item for key, item in value.items() if key in NBITS_FIELDS}
    if given.get("group_size") == -1:
        given["group_size"] = None
    if "form" in given:
        given["form"] = WeightForm(given["form"])
    if given.get("embedding_bits") == 0:
        given["embedding_bits"] = None
    if given.get("form") is WeightForm.DEQUANTIZE_LINEAR and given.get("bits") == 2:
        raise InvalidValueError(
            "MatMulNBitsParams: Bits 2 with Form 'dequantize_linear': ONNX Runtime dequantizes blocks of 4 and 8 bits; "
            "use Form 'matmul_nbits'"
        )
    if given.get("form") is WeightForm.DEQUANTIZE_LINEAR and given.get("accuracy_level", 0) > 1:
        raise InvalidValueError(
            f"MatMulNBitsParams: AccuracyLevel {given['accuracy_level']} with Form 'dequantize_linear', which has no "
            "place for it: set ONNX Runtime's session option 'session.qdq_matmulnbits_accuracy_level'"
        )
    return NBitsOptions(**given, group_rule=_NBITS_RULES[value.get("Algorithm", "DEFAULT")])


def _listed(value: Any) -> list[Any]:
    """The numbers of a number, a list or an array."""
    plain = value.tolist() if callable(getattr(value, "tolist", None)) else value
    return list(plain) if isinstance(plain, (list, tuple)) else [plain]


_NUMBER = Kind(
    "a number",
    lambda value: len(_listed(value)) == 1 and is_number(_listed(value)[0]),
    lambda value: isfinite(_listed(value)[0]),
)
_NUMBERS = Kind(
    "a number, or a list of numbers",
    lambda value: all(map(is_number, _listed(value))),
    lambda value: all(isfinite(number) and abs(number) <= _MOST_FLOAT for number in _listed(value)),
)
_INTEGERS = Kind(
    "an integer, or a list of integers",
    lambda value: all(map(is_number, _listed(value))),
    lambda value: all(isfinite(number) and abs(number) < MOST_SIZE for number in _listed(value)),
)
_NAME_SET = Kind(
    "a set or a list of names of nodes",
    lambda value: isinstance(value, (set, frozenset, list, tuple)) and is_names(list(value)),
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
    "per_tensor": optional(BOOL),  # None counts as True: the key alone says it
    "convert": mapping(
        "a dictionary with quant_type, and recv_nodes that it is for",
        {"quant_type": QUANT_TYPE, "symmetric": BOOL, "reduce_range": BOOL, "recv_nodes": _NAME_SET},
    ),
}


def tensor_overrides(value: Mapping[str, Any]) -> tuple[TensorOverride, ...]:
    """ONNX Runtime's TensorQuantOverrides: {tensor: [one dictionary, or one for each channel]}."""
    overrides = []
    for tensor, entries in value.items():
        subject = f"TensorQuantOverrides.{tensor}"
        is_list = isinstance(entries, (list, tuple)) and all(isinstance(entry, Mapping) for entry in entries)
        if not is_list or not entries:
            raise UnsupportedTypeError(
                f"option '{subject}': {short(entries)}, expected a list of one dictionary for the tensor, "
                "or one for each channel"
            )
        for entry in entries:
            for key, item in entry.items():
                if key not in OVERRIDE_KEYS:
                    raise unknown_name(f"key of option '{subject}'", key, OVERRIDE_KEYS)
                OVERRIDE_KEYS[key].check(f"{subject}.{key}", item)
            if ("scale" in entry) != ("zero_point" in entry):
                raise InvalidValueError(f"option '{subject}': give both scale and zero_point, or neither")
            if "scale" in entry and not {"symmetric", "reduce_range", "rmin", "rmax"}.isdisjoint(entry):
                raise InvalidValueError(f"option '{subject}': scale and zero_point exclude other settings of the range")
        first = entries[0]
        if first.get("per_tensor", False) is not False and "axis" in first:
            raise InvalidValueError(f"option '{subject}': per_tensor and axis exclude each other: give one")
        if len(entries) > 1 and "axis" not in first:
            raise InvalidValueError(f"option '{subject}': {len(entries)} entries and no 'axis' in the first")
        fmt = format_of_type(first["quant_type"]) if "quant_type" in first else None
        overrides.append(
            TensorOverride(
                tensor,
                fmt,
                first.get("symmetric"),
                _override_range(subject, entries),
                _gathered(subject, entries, "scale", float),
                _gathered(subject, entries, "zero_point", int),
                first.get("axis"),
                first.get("reduce_range"),
                has_one_scale=first.get("per_tensor", False) is not False,
                converted=_converted(subject, tensor, entries),
                receivers=tuple(sorted(first.get("convert", {}).get("recv_nodes") or ())),
            )
        )
    return tuple(overrides)


def _converted(subject: str, tensor: str, entries: Any) -> TensorOverride | None:
    """The override for some readers, or None."""
    convert = entries[0].get("convert")
    if convert is None:
        return None
    if len(entries) > 1 or "quant_type" not in convert:
        raise InvalidValueError(f"option '{subject}.convert': expected a quant_type, for a tensor with one scale")
    if "scale" in entries[0]:
        raise InvalidValueError(f"option '{subject}': with convert, both types are calibrated; leave scale out")
    fmt = format_of_type(convert["quant_type"])
    return TensorOverride(tensor, fmt, convert.get("symmetric"), has_reduced_range=convert.get("reduce_range"))


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
