"""What becomes of an extra option.

    Into       a field of some step's typed options
    Member     in or out of a set of operator types
    Rewrite    a graph rewrite on or off (CopyRewrite: for some operator types)
    ForSpecs   shapes the specs of tensors; see `spec_options`
    ForNpu     positions and operators as an NPU has them; see `npu_options` (AlignedRule: and a Member)
    SameAs     another name for a field of QuantizationConfig
    Switch     turns an accuracy algorithm on
    Steers     settings of an accuracy algorithm; where it is off, listed once as unused
    Refused    an error with the reason, for the values that ask for something this version does not have
    Remark     cannot matter here; the reason is listed once

A key without a row is an error that offers the nearest one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from quark.errors import InvalidValueError, UnsupportedOptionError
from quark.onnx.quantization.config.option_kinds import Kind


@dataclass
class Draft:
    """The typed options of every step while they are filled in, by the name of their field."""

    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    members: dict[str, set[str]] = field(default_factory=dict)  # fields of ChoiceOptions that are sets
    rewrites: dict[str, bool] = field(default_factory=dict)  # rewrite to on or off, where an option says so
    spec_values: dict[str, Any] = field(default_factory=dict)
    npu_values: dict[str, Any] = field(default_factory=dict)
    switched_on: frozenset[str] = frozenset()  # the fields and options that turn algorithms on, and do
    fields: dict[str, Any] = field(default_factory=dict)  # of QuantizationConfig
    remarks: list[str] = field(default_factory=list)

    def put(self, step: str, name: str, value: Any) -> None:
        """Set a field; tuples that several options add to are joined."""
        fields = self.steps.setdefault(step, {})
        joined = isinstance(value, tuple) and isinstance(fields.get(name), tuple)
        fields[name] = fields[name] + value if joined else value

    def of(self, step: str) -> dict[str, Any]:
        return self.steps.get(step, {})


class Treatment(Protocol):
    """What becomes of an option."""

    def apply(self, draft: Draft, name: str, value: Any) -> None: ...


@dataclass(frozen=True)
class Into:
    step: str
    field: str
    convert: Callable[[Any], Any] = lambda value: value

    def apply(self, draft: Draft, name: str, value: Any) -> None:
        draft.put(self.step, self.field, self.convert(value))


@dataclass(frozen=True)
class Member:
    field: str
    op_types: tuple[str, ...]

    def apply(self, draft: Draft, name: str, value: Any) -> None:
        members = draft.members[self.field]
        members.update(self.op_types) if value else members.difference_update(self.op_types)


@dataclass(frozen=True)
class Rewrite:
    def apply(self, draft: Draft, name: str, value: Any) -> None:
        rewrite = rewrite_of_option(name)
        if rewrite is not None:
            draft.rewrites[rewrite] = value
        elif value:
            raise UnsupportedOptionError(f"option '{name}': this version does not have that rewrite; leave it out")


@dataclass(frozen=True)
class CopyRewrite:
    """A rewrite that is on where a list of operator types is given; `field` of OptimizeOptions holds them."""

    field: str

    def apply(self, draft: Draft, name: str, value: Any) -> None:
        if value is not None:
            draft.rewrites[str(rewrite_of_option(name))] = True
            draft.put("optimize", self.field, tuple(value))


@dataclass(frozen=True)
class ForSpecs:
    """`alias_of`: the name under which the value is kept. Both names with different values are an error."""

    alias_of: str = ""

    def apply(self, draft: Draft, name: str, value: Any) -> None:
        key = self.alias_of or name
        if draft.spec_values.setdefault(key, value) != value:
            raise InvalidValueError(f"options '{name}' and '{key}' are one, and say different things: leave one out")


@dataclass(frozen=True)
class ForNpu:
    def apply(self, draft: Draft, name: str, value: Any) -> None:
        draft.npu_values[name] = value


@dataclass(frozen=True)
class AlignedRule(Member):
    """A set of operators for every target, and a rule for positions where there are some."""

    def apply(self, draft: Draft, name: str, value: Any) -> None:
        super().apply(draft, name, value)
        draft.npu_values[name] = value


@dataclass(frozen=True)
class SameAs:
    field: str

    def apply(self, draft: Draft, name: str, value: Any) -> None:
        draft.fields[self.field] = list(value) if isinstance(value, (tuple, set, frozenset)) else value


@dataclass(frozen=True)
class Refused:
    """`harmless` are the values that ask for nothing."""

    reason: str
    harmless: tuple[Any, ...] = (False,)

    def apply(self, draft: Draft, name: str, value: Any) -> None:
        if value not in self.harmless:
            raise UnsupportedOptionError(f"option '{name}' = {value!r}: {self.reason}")


@dataclass(frozen=True)
class Remark:
    """`silent` are the values that need no remark, because they ask for what happens anyway."""

    reason: str
    silent: tuple[Any, ...] = ()

    def apply(self, draft: Draft, name: str, value: Any) -> None:
        if value not in self.silent:
            draft.remarks.append(f"{name}: {self.reason}")


@dataclass(frozen=True)
class Switch:
    """Read before all others, since `Steers` depends on it: see `algorithm_options`."""

    def apply(self, draft: Draft, name: str, value: Any) -> None:
        """Nothing is left to do."""


@dataclass(frozen=True)
class Steers:
    """Settings of an algorithm that the field or option `flag` switches on, as a field of its typed options."""

    flag: str
    step: str
    field: str
    convert: Callable[[Any], Any] = lambda value: value

    def apply(self, draft: Draft, name: str, value: Any) -> None:
        if self.flag in draft.switched_on:
            draft.put(self.step, self.field, self.convert(value))
        else:
            draft.remarks.append(f"{name}: {self.flag} is False, so that there is nothing for it to steer")


@dataclass(frozen=True)
class Option:
    """A row of the table."""

    name: str
    kind: Kind
    treatment: Treatment
    doc: str


def rewrite_of_option(name: str) -> str | None:
    """The graph rewrite that an option switches, where there is one."""
    from quark.onnx.optimize import REWRITE_OF_OPTION

    return REWRITE_OF_OPTION.get(name)


def default_rewrites() -> frozenset[str]:
    """The names of the graph rewrites that run where nothing is said."""
    from quark.onnx.optimize import REWRITES

    return frozenset(each.name for each in REWRITES if each.is_default)
