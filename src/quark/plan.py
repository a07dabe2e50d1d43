"""The quantization plan: which tensor gets which numbers, where, and why. The joint of the whole design.

Everything before the plan decides, everything after it executes. A plan is frozen, printable, and survives JSON without
loss, so that it can be read, compared, edited by hand, and handed to another flow.

    TensorChoice       one tensor, how it is quantized, and which readers see it quantized
    Reader             an input of a node, or an output of the graph
    SkippedNode        a node that stays in float, and the reason

How a tensor is quantized is one of

    AffineChoice       integers with a scale and a zero point; for channels of an axis, or groups along it
    BlockChoice        blocks along an axis that share a scale
    FloatChoice        float16, bfloat16, or an 8-bit float, with a scale if it needs one
    DynamicChoice      integers whose scale is found at run time
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from quark.errors import InvalidValueError
from quark.files.foreign import REPORT, Fields, parse_json, short
from quark.files.indented import indented_json
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import FORMATS, get_format
from quark.formats.spec import BlockFormat, FloatFormat, IntFormat, NonFinite, Rounding, ScaleRule, Specials, SubBlocks

PLAN_VERSION = 1
EIGHT_BIT_FLOATS = ("fp8_e4m3", "fp8_e5m2")
_MOST_LISTED = 4096  # the longest list that is written as numbers, for people to read
_FLOAT_KINDS, _INTEGER_KINDS = ("<f4", "<f8"), ("|i1", "|u1", "<i2", "<u2", "<i4", "<i8")

# Limits on what a plan read from a file may say, so that computations based on it stay bounded.
_MOST_INPUTS = 1 << 31
_MOST_RANK = 64
_MOST_BLOCK = 1 << 20
_MOST_BITS, _MOST_EXPONENT_BITS = 32, 8
_FLOAT_SCALE_FIELDS = ("scale", "has_tensor_scale")


class Role(str, Enum):
    """The role of a tensor for the nodes that read it."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    BIAS = "bias"


@dataclass(frozen=True)
class Reader:
    """One place where a tensor is read: input number `index` of `node`, or output number `index` of the graph where
    `node` is empty."""

    node: str
    index: int

    @property
    def is_graph_output(self) -> bool:
        return not self.node


@dataclass(frozen=True)
class AffineChoice:
    """Integer codes of `format` with one scale and zero point, or one for each channel of `axis`, or for each group of
    `group_size` neighbours along it (then in the order of the groups' array, flattened)."""

    format: str
    scale: tuple[float, ...]
    zero_point: tuple[int, ...]
    axis: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        fmt = get_format(self.format)
        if not isinstance(fmt, IntFormat):
            raise InvalidValueError(f"format '{self.format}': affine codes are integers, such as int8")
        if len(self.scale) != len(self.zero_point) or not self.scale:
            raise InvalidValueError(f"{len(self.scale)} scales with {len(self.zero_point)} zero points")
        if self.axis is None and len(self.scale) != 1:
            raise InvalidValueError(f"{len(self.scale)} scales without an axis")

    def __str__(self) -> str:
        what = self.format if self.axis is None else f"{self.format} per channel"
        return what if self.group_size is None else f"{self.format} per group of {self.group_size}"


@dataclass(frozen=True)
class BlockChoice:
    """Blocks along `axis`, by `quantizer`; `to_bfloat16_first` rounds to bfloat16 before."""

    quantizer: BlockQuantizer
    axis: int
    to_bfloat16_first: bool = False

    @property
    def format(self) -> str:
        return str(self.quantizer.format)

    def __str__(self) -> str:
        return self.format


@dataclass(frozen=True)
class FloatChoice:
    """A small float type applied to the value divided by its scale. There is one scale for the tensor, or one for each
    channel of `axis`. Values beyond the range saturate if `is_saturating`, else become Inf. 8-bit floats always
    saturate, Inf included; NaN stays NaN."""

    format: str
    is_saturating: bool = False
    scale: tuple[float, ...] = (1.0,)
    axis: int | None = None

    def __post_init__(self) -> None:
        if not self.scale or (self.axis is None and len(self.scale) != 1):
            raise InvalidValueError(f"{len(self.scale)} scales of {self.format} without an axis")

    @property
    def is_eight_bits(self) -> bool:
        """True for E4M3 and E5M2, which the standard QuantizeLinear supports."""
        return self.format in EIGHT_BIT_FLOATS

    @property
    def is_scaled(self) -> bool:
        """True if any scale is not 1."""
        return self.scale != (1.0,)

    def __str__(self) -> str:
        return self.format if self.axis is None else f"{self.format} per channel"


@dataclass(frozen=True)
class DynamicChoice:
    """Integers whose scale and zero point are computed from the data at run time, for the whole tensor."""

    format: str

    def __str__(self) -> str:
        return f"{self.format} dynamic"


Choice: TypeAlias = AffineChoice | BlockChoice | FloatChoice | DynamicChoice


@dataclass(frozen=True)
class TensorChoice:
    """How one tensor is quantized for these readers, and the rule that decided it. `first` is an earlier quantization
    of the same tensor, in the types of the layer that computes it; the file then has two quantizers in a row."""

    tensor: str
    role: Role
    choice: Choice
    readers: tuple[Reader, ...]
    reason: str = ""
    first: Choice | None = None


@dataclass(frozen=True)
class SkippedNode:
    """A node that stays in float."""

    node: str
    op_type: str
    reason: str


@dataclass(frozen=True)
class QuantizationPlan:
    """All choices for one model."""

    tensors: tuple[TensorChoice, ...]
    skipped: tuple[SkippedNode, ...] = ()

    def __iter__(self) -> Iterator[TensorChoice]:
        return iter(self.tensors)

    def of(self, tensor: str) -> tuple[TensorChoice, ...]:
        """The choices for that tensor; several if its readers want different ones."""
        return tuple(entry for entry in self.tensors if entry.tensor == tensor)

    def to_json(self) -> str:
        """The plan as text; `from_json` reads it back.

        >>> plan = QuantizationPlan((TensorChoice("x", Role.ACTIVATION, FloatChoice("bfloat16"), (Reader("c", 0),)),))
        >>> QuantizationPlan.from_json(plan.to_json()) == plan
        True
        """
        return indented_json(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The plan as a dictionary for JSON; `from_dict` reads it back."""
        return {
            "version": PLAN_VERSION,
            "tensors": [
                {
                    "tensor": entry.tensor,
                    "role": entry.role.value,
                    "choice": _choice_to_dict(entry.choice),
                    "readers": [[reader.node, reader.index] for reader in entry.readers],
                    "reason": entry.reason,
                    **({} if entry.first is None else {"first": _choice_to_dict(entry.first)}),
                }
                for entry in self.tensors
            ],
            "skipped": [asdict(entry) for entry in self.skipped],
        }

    @staticmethod
    def from_json(text: str, label: str = "quantization plan") -> QuantizationPlan:
        """Read a plan written by `to_json` or by a person. An error names the document, as `label`, and the field."""
        return QuantizationPlan.from_dict(parse_json(text, label, REPORT), label)

    @staticmethod
    def from_dict(content: Any, label: str = "quantization plan") -> QuantizationPlan:
        """Read a plan from parsed JSON."""
        fields = Fields(content, label)
        if fields.value("version") != PLAN_VERSION:
            raise InvalidValueError(f"{label} of version {short(fields.value('version'))}: expected {PLAN_VERSION}")
        tensors, skipped = [], []
        for entry in fields.mappings("tensors"):
            readers = []
            for reader in entry.array("readers"):
                is_pair = isinstance(reader, list) and len(reader) == 2 and isinstance(reader[0], str)
                if not is_pair or type(reader[1]) is not int or not 0 <= reader[1] < _MOST_INPUTS:
                    entry.refuse("readers", "a list of pairs [NODE, NUMBER OF THE INPUT]")
                readers.append(Reader(*reader))
            name = entry.text("tensor")
            try:
                choice = _choice_from(entry.mapping("choice"))
                first = _choice_from(entry.mapping("first")) if entry.has("first") else None
            except InvalidValueError as error:
                text = str(error)
                raise InvalidValueError(text if label in text else f"{label}, tensor '{name}': {text}") from error
            role = Role(entry.text("role", [role.value for role in Role]))
            tensors.append(TensorChoice(name, role, choice, tuple(readers), entry.text("reason"), first))
        for entry in fields.mappings("skipped"):
            entry.refuse_others(SkippedNode.__dataclass_fields__)
            skipped.append(SkippedNode(entry.text("node"), entry.text("op_type"), entry.text("reason")))
        return QuantizationPlan(tuple(tensors), tuple(skipped))

    @functools.cached_property
    def digest(self) -> str:
        """A hash of everything the plan says."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


_PLAIN_KINDS: Mapping[str, type[AffineChoice] | type[FloatChoice] | type[DynamicChoice]] = {
    "affine": AffineChoice,
    "float": FloatChoice,
    "dynamic": DynamicChoice,
}


def _choice_to_dict(choice: Choice) -> dict[str, Any]:
    if isinstance(choice, BlockChoice):
        quantizer, fmt = choice.quantizer, choice.quantizer.format
        row = FORMATS.get(fmt.name)
        # formats of the catalog are written by name (and block size), others in full
        is_known = isinstance(row, BlockFormat) and row.with_block_size(fmt.block_size) == fmt
        kind = "float" if isinstance(fmt.element, FloatFormat) else "int"
        return {
            "kind": "block",
            "format": fmt.name if is_known else {**_format_to_dict(fmt), "element_kind": kind},
            "block_size": fmt.block_size,
            "axis": choice.axis,
            "scale_rule": quantizer.scale_rule.value,
            "rounding": quantizer.rounding.value,
            "nonfinite": quantizer.nonfinite.value,
            "to_bfloat16_first": choice.to_bfloat16_first,
            **({} if quantizer.tensor_scale is None else {"tensor_scale": quantizer.tensor_scale}),
        }
    kind = next(name for name, cls in _PLAIN_KINDS.items() if isinstance(choice, cls))
    if isinstance(choice, AffineChoice):
        numbers = {name: _numbers_to_json(getattr(choice, name)) for name in ("scale", "zero_point")}
        return {"kind": kind, "format": choice.format, **numbers, "axis": choice.axis, "group_size": choice.group_size}
    if isinstance(choice, FloatChoice) and choice.axis is None:
        return {"kind": kind, "format": choice.format, "is_saturating": choice.is_saturating, "scale": choice.scale[0]}
    if isinstance(choice, FloatChoice):
        return {"kind": kind, **asdict(choice), "scale": _numbers_to_json(choice.scale)}
    return {"kind": kind, **asdict(choice)}


def _format_to_dict(fmt: BlockFormat) -> dict[str, Any]:
    """The fields of a format; those about float scales only if it has one."""
    fields = asdict(fmt)
    return fields if fmt.scale is not None else {k: v for k, v in fields.items() if k not in _FLOAT_SCALE_FIELDS}


def _choice_from(fields: Fields) -> Choice:
    kind = fields.text("kind", ["block", *_PLAIN_KINDS])
    if kind == "block":
        quantizer = BlockQuantizer(
            _format_from(fields).with_block_size(fields.integer("block_size", 1, _MOST_BLOCK)),
            ScaleRule(fields.text("scale_rule", [rule.value for rule in ScaleRule])),
            Rounding(fields.text("rounding", [rounding.value for rounding in Rounding])),
            NonFinite(fields.text("nonfinite", [rule.value for rule in NonFinite])),
            fields.number("tensor_scale") if fields.has("tensor_scale") else None,
        )
        return BlockChoice(
            quantizer, fields.integer("axis", -_MOST_RANK, _MOST_RANK), fields.boolean("to_bfloat16_first")
        )
    fields.refuse_others(("kind", *_PLAIN_KINDS[kind].__dataclass_fields__))
    fmt = get_format(fields.text("format"))
    if kind == "dynamic":
        return DynamicChoice(fmt.name)
    if kind == "float":
        axis = fields.integer("axis", -_MOST_RANK, _MOST_RANK) if fields.has("axis") else None
        scale = (fields.number("scale"),) if axis is None else _numbers_from(fields, "scale", (int, float))
        return FloatChoice(fmt.name, fields.boolean("is_saturating"), scale, axis)
    zero_point = _numbers_from(fields, "zero_point", (int,))
    if isinstance(fmt, IntFormat) and not all(fmt.qmin <= code <= fmt.qmax for code in zero_point):
        fields.refuse("zero_point", f"integers from {fmt.qmin} to {fmt.qmax}, as {fmt.name} has them")
    return AffineChoice(
        fmt.name,
        _numbers_from(fields, "scale", (int, float)),
        zero_point,
        fields.integer("axis", -_MOST_RANK, _MOST_RANK) if fields.has("axis") else None,
        fields.integer("group_size", 1) if fields.has("group_size") else None,
    )


def _numbers_to_json(numbers: tuple[float, ...] | tuple[int, ...]) -> list[float] | dict[str, str]:
    """A list of numbers. If it is long, as for the groups of a large weight, base64 of an array of the narrowest exact
    type."""
    if len(numbers) <= _MOST_LISTED:
        return list(numbers)
    wide = np.array(numbers)
    kinds = _FLOAT_KINDS if wide.dtype.kind == "f" else _INTEGER_KINDS
    kind = next(kind for kind in kinds if (wide.astype(kind).astype(wide.dtype) == wide).all())
    return {"type": kind, "base64": base64.b64encode(wide.astype(kind).tobytes()).decode()}


def _numbers_from(fields: Fields, name: str, types: tuple[type, ...]) -> tuple[Any, ...]:
    if isinstance(fields.value(name), list):
        numbers = fields.array(name)
        if any(type(number) not in types for number in numbers):
            fields.refuse(name, "a list of numbers" if float in types else "a list of integers")
        return tuple(numbers)
    packed = fields.mapping(name)
    kind = packed.text("type", (*_INTEGER_KINDS, *(_FLOAT_KINDS if float in types else ())))
    try:
        content = base64.b64decode(packed.text("base64", most=REPORT.text), validate=True)
        unpacked = np.frombuffer(content, kind)
    except ValueError:
        packed.refuse("base64", f"numbers of type {kind} in base64")
    if kind in _FLOAT_KINDS and not np.isfinite(unpacked).all():
        packed.refuse("base64", "finite numbers")
    return tuple(unpacked.tolist())


def _format_from(choice: Fields) -> BlockFormat:
    if isinstance(choice.value("format"), str):
        row = get_format(choice.text("format"))
        if not isinstance(row, BlockFormat):
            choice.refuse("format", "a format with blocks")
        return row
    fields = choice.mapping("format")
    inner = fields.mapping("element")
    element: FloatFormat | IntFormat
    if fields.text("element_kind", ("float", "int")) == "float":
        element = _small_float(inner)
    else:
        element = IntFormat(
            inner.text("name"),
            inner.integer("bits", 1, _MOST_BITS),
            inner.boolean("signed"),
            inner.integer("fraction_bits", 0, _MOST_BITS),
            inner.boolean("symmetric"),
        )
    sub_blocks = None
    if fields.has("sub_blocks"):
        inner = fields.mapping("sub_blocks")
        sub_blocks = SubBlocks(inner.integer("size", 1, _MOST_BLOCK), inner.integer("shift_bits", 0, _MOST_BITS))
    return BlockFormat(
        fields.text("name"),
        element,
        fields.integer("block_size", 1, _MOST_BLOCK),
        sub_blocks,
        fields.boolean("flush_subnormals"),
        fields.boolean("carry"),
        NonFinite(fields.text("default_nonfinite", [rule.value for rule in NonFinite])),
        _small_float(fields.mapping("scale")) if fields.has("scale") else None,
        fields.boolean("has_tensor_scale") if fields.has("has_tensor_scale") else False,
    )


def _small_float(fields: Fields) -> FloatFormat:
    return FloatFormat(
        fields.text("name"),
        fields.integer("exponent_bits", 1, _MOST_EXPONENT_BITS),
        fields.integer("mantissa_bits", 0, _MOST_BITS),
        Specials(fields.text("specials", [special.value for special in Specials])),
    )
