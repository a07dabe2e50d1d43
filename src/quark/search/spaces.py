"""Spaces of configurations: what may be set to which values, and all combinations of them.

Two ways of writing a space, both of AMD Quark:

    SearchSpace            {field: [values], "extra_options": {option: [values], "FastFinetune": {setting: [values]}}},
                           fields and options of a QuantizationConfig
    generate_all_configs   {name: [values], name: {"only_if": condition, setting: [values]}}, parts of a QConfig;
                           `parameters` also has ranges of numbers, for samplers
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.onnx.quantization.config.config import QuantizationConfig
from quark.onnx.quantization.config.finetune_options import FINETUNE_KEYS
from quark.onnx.quantization.config.option_table import OPTIONS
from quark.onnx.quantization.config.quant_types import CalibrationMethod
from quark.text import get_logger

_LOG = get_logger(__name__)

Config = dict[str, Any]
OPTIONS_KEY, FINETUNE_KEY, ONLY_IF = "extra_options", "FastFinetune", "only_if"
JOINT_KEY = "NumIterLR"  # pairs of NumIterations and LearningRate


def split_config_levels(input_config: Mapping[str, Any]) -> tuple[Config, Config, Config]:
    """Return fields, extra options and settings of finetuning of a config or a space, as copies."""
    fields = copy.deepcopy(dict(input_config))
    options = fields.pop(OPTIONS_KEY, {}) or {}
    finetuning = options.pop(FINETUNE_KEY, {}) or {}
    return fields, options, finetuning


def joined_levels(fields: Config, options: Config, finetuning: Config) -> Config:
    """Return the config of which these are the levels; empty ones are left out."""
    extra = {**options, **({FINETUNE_KEY: finetuning} if finetuning else {})}
    return {**fields, **({OPTIONS_KEY: extra} if extra else {})}


class ConfigGrid(Sequence[Config]):
    """All combinations of a space in order, each made when it is asked for: there may be millions. `+` makes a list."""

    def __init__(self, fields: Config, options: Config, finetuning: Config) -> None:
        self._levels = (fields, options, finetuning)
        for level in self._levels:
            for key, values in level.items():
                if not isinstance(values, (list, tuple)):
                    raise UnsupportedTypeError(f"search space, '{key}': {values!r}, expected a list of values to try")
        self._sizes = [len(values) for level in self._levels for values in level.values()]
        self._length = math.prod(self._sizes) if self._sizes else 0

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Config: ...
    @overload
    def __getitem__(self, index: slice) -> list[Config]: ...
    def __getitem__(self, index: int | slice) -> Config | list[Config]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        rest, places = index % len(self), []
        for size in reversed(self._sizes):
            rest, place = divmod(rest, size)
            places.append(place)
        fields, options, finetuning = (
            {key: copy.deepcopy(values[places.pop()]) for key, values in level.items()} for level in self._levels
        )
        return joined_levels(fields, options, finetuning)

    def __add__(self, other: Sequence[Config]) -> list[Config]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Config]) -> list[Config]:
        return [*other, *self]


class SearchSpace:
    """A space of fields, extra options and settings of finetuning; `get_all_configs` has its combinations."""

    def __init__(self, conf: Mapping[str, Any], logger: logging.Logger | None = None) -> None:
        self.raw_search_space = dict(conf)
        self.logger = logger or _LOG
        self.all_configs: Sequence[Config] = []
        levels = self.level1_space_config, self.level2_space_config, self.level3_space_config = split_config_levels(
            conf
        )
        known = (
            ("field of QuantizationConfig", set(QuantizationConfig.__dataclass_fields__)),
            ("extra option", set(OPTIONS)),
            ("setting of FastFinetune", {*FINETUNE_KEYS, JOINT_KEY}),
        )
        for level, (what, names) in zip(levels, known, strict=True):
            for key in level:
                if key not in names:
                    self.logger.warning(
                        "search space: there is no %s '%s', so that quantizing with it fails", what, key
                    )

    def get_all_configs(self) -> Sequence[Config]:
        """Return all combinations."""
        self.all_configs = ConfigGrid(self.level1_space_config, self.level2_space_config, self.level3_space_config)
        if not len(self.all_configs):
            raise InvalidValueError("search space: there is nothing in it, or a list of values is empty")
        return self.all_configs

    def remove_invalid_configs(self, input_all_configs: Sequence[Config]) -> list[Config]:
        """Return the configs without settings that cannot matter in them, each only once.

        A moving average is of MinMax, a percentile of Percentile, SmoothAlpha of include_sq, and FastFinetune of
        include_fast_ft. The weight of a moving average goes with the moving average.
        """
        configs: list[Config] = []
        seen: set[str] = set()
        for config in input_all_configs:
            fields, options, finetuning = split_config_levels(config)
            method = fields.get("calibrate_method")
            if method is not CalibrationMethod.MinMax:
                options.pop("CalibMovingAverage", None)
            if method is not CalibrationMethod.MinMax or not options.get("CalibMovingAverage", True):
                options.pop("CalibMovingAverageConstant", None)
            if method is not CalibrationMethod.Percentile:
                options.pop("Percentile", None)
            if not fields.get("include_sq"):
                options.pop("SmoothAlpha", None)
            valid = joined_levels(fields, options, finetuning if fields.get("include_fast_ft") else {})
            if repr(valid) not in seen:
                seen.add(repr(valid))
                configs.append(valid)
        dropped = len(input_all_configs) - len(configs)
        self.logger.info("%d of %d configs repeat others", dropped, len(input_all_configs))
        return configs


# ---- spaces with conditions ----


@dataclass(frozen=True)
class Parameter:
    """One choice: among `values`, or a number from `low` to `high`. `group` is the conditional part that it is in."""

    name: str
    group: str = ""
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0  # step of integers
    is_log: bool = False

    @property
    def label(self) -> str:
        """Its name among all parameters."""
        return f"{self.group}_{self.name}" if self.group else self.name

    @property
    def is_choice(self) -> bool:
        return bool(self.values)


@dataclass(frozen=True)
class Space:
    """Parameters without a condition, and groups of others with theirs, in order."""

    plain: tuple[Parameter, ...]
    groups: tuple[tuple[str, Any, tuple[Parameter, ...]], ...]

    @property
    def is_discrete(self) -> bool:
        return all(
            parameter.is_choice
            for parameter in (*self.plain, *(parameter for _, _, inner in self.groups for parameter in inner))
        )


def is_met(config: Mapping[str, Any], condition: Any) -> bool:
    """True if a config meets a condition: a name that it has a value for, or values by name."""
    if isinstance(condition, str):
        return config.get(condition) is not None
    if isinstance(condition, Mapping):
        return all(config.get(name) == value for name, value in condition.items())
    raise UnsupportedTypeError(
        f"search space, 'only_if': {condition!r}, expected a name or a mapping of names to values"
    )


def space_of(search_space: Mapping[str, Any]) -> Space:
    """Return a space, checked."""
    if not isinstance(search_space, Mapping) or not search_space:
        raise UnsupportedTypeError(f"search_space: {search_space!r}, expected a mapping of names to lists of values")
    plain, groups = [], []
    for name, value in search_space.items():
        if isinstance(value, Mapping) and ONLY_IF in value:
            inner = tuple(_parameter(key, name, values) for key, values in value.items() if key != ONLY_IF)
            groups.append((name, value[ONLY_IF], inner))
        elif isinstance(value, Mapping) and "type" not in value:
            raise InvalidValueError(f"search space, '{name}': a mapping of settings needs '{ONLY_IF}', its condition")
        else:
            plain.append(_parameter(name, "", value))
    return Space(tuple(plain), tuple(groups))


def _parameter(name: str, group: str, value: Any) -> Parameter:
    where = f"search space, '{group}.{name}'" if group else f"search space, '{name}'"
    if isinstance(value, (list, tuple)):
        if not value:
            raise InvalidValueError(f"{where}: expected at least one value")
        return Parameter(name, group, tuple(value))
    if not isinstance(value, Mapping) or value.get("type") not in ("int", "float"):
        raise UnsupportedTypeError(
            f"{where}: {value!r}, expected a list of values or a range such as "
            "{'type': 'float', 'low': 1e-6, 'high': 1e-3, 'log': True}"
        )
    try:
        low, high = float(value["low"]), float(value["high"])
        is_log, step = bool(value.get("log", False)), float(value.get("step", 1))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValueError(f"{where}: {dict(value)!r}, expected numbers 'low' and 'high'") from error
    if not low <= high or (is_log and low <= 0) or step <= 0:
        raise InvalidValueError(
            f"{where}: {dict(value)!r}, expected low <= high, a positive step, and low > 0 with 'log'"
        )
    return Parameter(name, group, (), low, high, step if value["type"] == "int" else 0.0, is_log)


def generate_all_configs(search_space: Mapping[str, Any]) -> list[Config]:
    """Return all combinations of a space without ranges. Settings whose condition is not met are left out.

    >>> generate_all_configs({"algorithms": ["cle", None], "cle_params": {"steps": [1, 2], "only_if": "algorithms"}})
    ... # doctest: +NORMALIZE_WHITESPACE
    [{'algorithms': 'cle', 'cle_params': {'steps': 1}}, {'algorithms': 'cle', 'cle_params': {'steps': 2}},
     {'algorithms': None}]
    """
    space = space_of(search_space)
    if not space.is_discrete:
        ranges = [parameter.label for group in space.groups for parameter in group[2] if not parameter.is_choice]
        ranges += [parameter.label for parameter in space.plain if not parameter.is_choice]
        raise InvalidValueError(
            f"search space: {', '.join(ranges)} must be a list of values for all combinations, not a range; use a "
            "sampler such as 'TPE' for ranges"
        )
    combinations: list[Config] = []
    for values in itertools.product(*(parameter.values for parameter in space.plain)):
        configs: list[Config] = [dict(zip((parameter.name for parameter in space.plain), values, strict=True))]
        for name, condition, inner in space.groups:
            configs = [extended for config in configs for extended in _extended(config, name, condition, inner)]
        combinations += copy.deepcopy(configs)
    return combinations


def _extended(config: Config, name: str, condition: Any, inner: Sequence[Parameter]) -> Iterator[Config]:
    if not is_met(config, condition) or not inner:
        yield config
        return
    for values in itertools.product(*(parameter.values for parameter in inner)):
        yield {**config, name: dict(zip((parameter.name for parameter in inner), values, strict=True))}
