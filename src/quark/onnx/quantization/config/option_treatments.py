"""The effects of extra options: each treatment stores a value in the Draft of the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quark.errors import InvalidValueError, UnsupportedOptionError
from quark.onnx.optimize import REWRITE_OF_OPTION, REWRITES
from quark.onnx.quantization.config.config import QuantizationConfig
from quark.onnx.quantization.config.option_kinds import Kind
from quark.onnx.quantization.config.run_fields import COMPENSATION, FINETUNE, GPTQ, switched_on

DEFAULT_REWRITES = frozenset(rewrite.name for rewrite in REWRITES if rewrite.is_default)


@dataclass
class Draft:
    """The typed options of every step while they are filled in, by the name of their field."""

    run: QuantizationConfig  # for a QConfig, with the fields that are not about specs
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    members: dict[str, set[str]] = field(default_factory=dict)  # fields of ChoiceOptions that are sets
    rewrites: dict[str, bool] = field(default_factory=dict)  # rewrite to on or off, where an option says so
    spec_values: dict[str, Any] = field(default_factory=dict)
    npu_values: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def put(self, step: str, name: str, value: Any) -> None:
        """Set a field; tuples that several options add to are joined."""
        fields = self.steps.setdefault(step, {})
        joined = isinstance(value, tuple) and isinstance(fields.get(name), tuple)
        fields[name] = fields[name] + value if joined else value

    def of(self, step: str) -> dict[str, Any]:
        """The fields of a step that options have set."""
        return self.steps.get(step, {})


Treatment = Callable[[Draft, str, Any], None]


@dataclass(frozen=True)
class Into:
    """A field of a step's typed options."""

    step: str
    field: str
    convert: Callable[[Any], Any] = lambda value: value

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        draft.put(self.step, self.field, self.convert(value))


@dataclass(frozen=True)
class IntoBoth:
    """Fields of two steps, as (step, field)."""

    first: tuple[str, str]
    second: tuple[str, str]

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        for step, field_name in (self.first, self.second):
            draft.put(step, field_name, value)


@dataclass(frozen=True)
class Member:
    """Operator types in or out of a set, which is a field of ChoiceOptions."""

    field: str
    op_types: tuple[str, ...]

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        members = draft.members[self.field]
        members.update(self.op_types) if value else members.difference_update(self.op_types)


@dataclass(frozen=True)
class Rewrite:
    """A graph rewrite on or off."""

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        if name in REWRITE_OF_OPTION:
            draft.rewrites[REWRITE_OF_OPTION[name]] = value
        elif value:
            raise UnsupportedOptionError(f"option '{name}': this version does not have that rewrite; leave it out")


@dataclass(frozen=True)
class CopyRewrite:
    """A rewrite that a list of operator types turns on; `field` of OptimizeOptions holds them."""

    field: str

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        if value is not None:
            draft.rewrites[REWRITE_OF_OPTION[name]] = True
            draft.put("optimize", self.field, tuple(value))


@dataclass(frozen=True)
class ForSpecs:
    """Shapes the specs of tensors, see `tensor_specs`. `alias_of` is the name under which the value is kept; both names
    with different values are an error."""

    alias_of: str = ""

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        key = self.alias_of or name
        if draft.spec_values.setdefault(key, value) != value:
            raise InvalidValueError(f"options '{name}' and '{key}' are the same, with different values: leave one out")


@dataclass(frozen=True)
class ForNpu:
    """Positions and operators as an NPU has them, see `options`."""

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        draft.npu_values[name] = value


@dataclass(frozen=True)
class AlignedRule(Member):
    """A set of operators for every target, and a rule for positions if there are some."""

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        super().__call__(draft, name, value)
        draft.npu_values[name] = value


@dataclass(frozen=True)
class RewriteAndSubstitution(Rewrite):
    """A graph rewrite where it is exact, and a substitution of `simulate` where it is not. Without the option, only the
    rewrite is on."""

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        super().__call__(draft, name, value)
        draft.npu_values[name] = value


@dataclass(frozen=True)
class ImpliedBfloat16:
    """bfloat16 as its compiler takes it; what is left of quantizers are Casts, unless BF16QDQToCast says otherwise."""

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        draft.put("insert", "has_implied_bfloat16", value)
        draft.of("insert").setdefault("has_casts", draft.run.extra_options.get("BF16QDQToCast", value))


@dataclass(frozen=True)
class SameAs:
    """Another name for a field of QuantizationConfig."""

    field: str

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        listed: Any = list(value) if isinstance(value, (tuple, set, frozenset)) else value
        draft.run = replace(draft.run, **{self.field: listed})


@dataclass(frozen=True)
class Refused:
    """An error with the reason, unless the value is a `harmless` one, which has no effect."""

    reason: str
    harmless: tuple[Any, ...] = (False,)

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        if value not in self.harmless:
            raise UnsupportedOptionError(f"option '{name}' = {value!r}: {self.reason}")


@dataclass(frozen=True)
class Remark:
    """Cannot matter here: the report lists the reason, unless the value is a `silent` one, which asks for what happens
    anyway."""

    reason: str
    silent: tuple[Any, ...] = ()

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        if value not in self.silent:
            draft.remarks.append(f"{name}: {self.reason}")


@dataclass(frozen=True)
class Restored:
    """A file that ranges are read from, and written to where it lacks them. If `has_layers`, finished layers of
    finetuning are kept in a folder beside it."""

    has_layers: bool = False

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        if value is None:
            return
        path = Path(value)
        if draft.of("calibrate").get("ranges_file", path) != path:
            raise InvalidValueError(
                "options 'SaveAndRestore' and 'TensorsRangeFile' name different files: leave one out"
            )
        draft.put("calibrate", "ranges_file", path)
        if self.has_layers and FINETUNE in switched_on(draft.run):
            draft.put("finetune", "folder", path.with_name(f"{path.stem}_layers"))


@dataclass(frozen=True)
class EvaluationData:
    """The data of EvalMetrics."""

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        if value is not None and draft.run.extra_options.get("EvalMetrics"):
            draft.put("calibrate", "evaluation_data", value)
        elif value is not None:
            draft.remarks.append(f"{name}: EvalMetrics is not set, so that there is nothing to evaluate")


@dataclass(frozen=True)
class Passes:
    """A file of graph passes: `passes.with_passes` has put other options in its place."""

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        pass


@dataclass(frozen=True)
class Switch:
    """Read before any other treatment is applied: `switched_on` reads what turns algorithms on, and `with_preference`
    the preference."""

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        pass


@dataclass(frozen=True)
class SecondSwitch(Switch):
    """Another name of a switch; both with different values are an error."""

    first: str

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        if draft.run.extra_options.get(self.first, value) != value:
            raise InvalidValueError(f"options '{name}' and '{self.first}' are the same, with different values")


@dataclass(frozen=True)
class Steers:
    """A field of the typed options of an algorithm that the field or option `flag` turns on. If it is off, the report
    lists the option as unused."""

    flag: str
    step: str
    field: str
    convert: Callable[[Any], Any] = lambda value: value

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        if self.flag in switched_on(draft.run):
            draft.put(self.step, self.field, self.convert(value))
        else:
            draft.remarks.append(f"{name}: {self.flag} is False, so that there is nothing for it to steer")


@dataclass(frozen=True)
class GptqSettings:
    """The options of GPTQParams about compensation. The others are about scales, which the weight's spec defines."""

    def __call__(self, draft: Draft, name: str, value: Any) -> None:
        if COMPENSATION not in switched_on(draft.run):
            draft.remarks.append(f"{name}: {GPTQ} is not set")
            return
        for key, field_name in (("PercDamp", "damping"), ("ActOrder", "has_activation_order")):
            if key in value:
                draft.put("compensation", field_name, value[key])
        if "Bits" in value:
            draft.put("gptq", "bits", value["Bits"])
        usual = {"BlockSize": None, "GroupSize": -1, "PerChannel": False, "MSE": False, "WeightSymmetric": True}
        given = [key for key in usual if key in value and value[key] != usual[key]]
        if "BlockSize" in given:
            given.remove("BlockSize")
            draft.remarks.append(f"{name}.BlockSize: it does not change the result")
        if given:
            keys = ", ".join(given)
            draft.remarks.append(f"{name}: weights are rounded to the scales of their spec, which defines {keys}")


@dataclass(frozen=True)
class Option:
    """A row of the table of extra options."""

    name: str
    kind: Kind
    treatment: Treatment
    doc: str
