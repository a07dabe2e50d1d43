"""What the value of an option may be: a kind says it to people and checks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from os import PathLike
from typing import Any

from quark.errors import InvalidValueError, UnsupportedTypeError, unknown_name
from quark.files.foreign import short
from quark.onnx.quantization.config.quant_types import CALIBRATION_METHODS, QUANT_FORMATS, QUANT_TYPES

MOST_COUNTED = 1 << 63  # no integer of an option is as large


@dataclass(frozen=True)
class Kind:
    """`has_type` sorts out values of the wrong type, `is_legal` those of the right type that are impossible.
    `keys`: for dictionaries, the kinds of their values by key; others are errors."""

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
            self._check_keys(self.keys, name, value)

    @staticmethod
    def _check_keys(keys: Mapping[str, Kind], name: str, value: Mapping[str, Any]) -> None:
        for key, each in value.items():
            if key not in keys:
                raise unknown_name(f"key of option '{name}'", key, keys)
            keys[key].check(f"{name}.{key}", each)


def is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_names(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(each, str) for each in value)


def is_subgraph(value: Any) -> bool:
    """True if value is a pair of lists of names: the first nodes and the last."""
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_names, value))


def integer(lowest: int | None = None, highest: int | None = None) -> Kind:
    bounds = "" if lowest is None else f" of at least {lowest}" if highest is None else f" from {lowest} to {highest}"

    def is_within(value: int) -> bool:
        is_counted = abs(value) < MOST_COUNTED
        return is_counted and (lowest is None or value >= lowest) and (highest is None or value <= highest)

    return Kind(f"an integer{bounds}", is_integer, is_within)


def number(above: float | None = None, highest: float | None = None) -> Kind:
    bounds = "" if above is None else f" above {above:g}" + ("" if highest is None else f", at most {highest:g}")

    def is_within(value: float) -> bool:
        return (above is None or value > above) and (highest is None or value <= highest)

    return Kind(f"a number{bounds}", is_number, is_within)


def number_from(lowest: float, highest: float = inf) -> Kind:
    bounds = f"of at least {lowest:g}" if highest == inf else f"from {lowest:g} to {highest:g}"
    return Kind(f"a number {bounds}", is_number, lambda value: lowest <= value <= highest)


def number_or(word: str, kind: Kind) -> Kind:
    """A number of that kind, or the word."""
    return Kind(
        f"{kind.expected}, or '{word}'",
        lambda value: isinstance(value, str) or kind.has_type(value),
        lambda value: value == word if isinstance(value, str) else kind.is_legal(value),
    )


def one_of(*choices: str) -> Kind:
    return Kind("one of " + ", ".join(choices), lambda value: isinstance(value, str), lambda value: value in choices)


def optional(kind: Kind) -> Kind:
    """None, or a value of that kind."""
    return Kind(
        f"{kind.expected}, or None",
        lambda value: value is None or kind.has_type(value),
        lambda value: value is None or kind.is_legal(value),
    )


def mapping(expected: str, keys: Mapping[str, Kind] | None = None) -> Kind:
    return Kind(expected, lambda value: isinstance(value, Mapping), keys=keys)


def _is_pair_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(each, (list, tuple)) and len(each) == 2 and all(isinstance(name, str) for name in each)
        for each in value
    )


def member_of(classes: tuple[Any, ...], example: str) -> Kind:
    names = ", ".join(cls.__name__ for cls in classes)
    return Kind(f"a member of {names}, like {example}", lambda value: isinstance(value, classes))


BOOL = Kind("True or False", lambda value: isinstance(value, bool))
TEXT = Kind("a string", lambda value: isinstance(value, str))
PATH = Kind("a path", lambda value: isinstance(value, (str, PathLike)), lambda value: "\0" not in str(value))
NAMES = Kind("a list of strings", is_names)
PAIRS = Kind("a list of pairs of operator types", _is_pair_list)
FUNCTION = Kind("a function", callable)
TWO_NUMBERS = Kind(
    "two numbers",
    lambda value: isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_number, value)),
)
PERCENTILES = Kind(
    "a list of numbers above 50, at most 100",
    lambda value: isinstance(value, (list, tuple)) and all(map(is_number, value)),
    lambda value: bool(value) and all(50 < each <= 100 for each in value),
)
AXES = Kind(
    "a dictionary from operator type to an axis, or to {'axis': AXIS}",
    lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
    lambda value: all(is_integer(each.get("axis") if isinstance(each, Mapping) else each) for each in value.values()),
)
QUANT_TYPE = member_of(QUANT_TYPES, "QuantType.QInt8")
QUANT_FORMAT = member_of(QUANT_FORMATS, "QuantFormat.QDQ")
CALIBRATION_METHOD = member_of(CALIBRATION_METHODS, "CalibrationMethod.MinMax")
