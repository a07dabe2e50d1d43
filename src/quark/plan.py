"""The quantization plan: which tensor gets which numbers, where, and why. The joint of the whole design.

Everything before the plan decides, everything after it executes. A plan is frozen, printable, and survives JSON without
loss, so that it can be read, compared, edited by hand, and handed to another flow.

    TensorChoice       one tensor, how it is quantized, and which readers see it quantized
    Reader             an input of a node, or an output of the graph
    SkippedNode        a node that stays in float, and the reason

How a tensor is quantized is one of

    AffineChoice       integers with a scale and a zero point; for channels of an axis, or groups along it
    BlockChoice        blocks along an axis that share a power-of-two scale
    FloatChoice        float16 or bfloat16
    DynamicChoice      integers whose scale is found at run time
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from quark.errors import InvalidValueError
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import FORMATS, get_format
from quark.formats.spec import BlockFormat, FloatFormat, IntFormat, NonFinite, Rounding, ScaleRule, Specials, SubBlocks

PLAN_VERSION = 1
_MOST_LISTED = 4096  # numbers that a person might still look at


class Role(str, Enum):
    """What a tensor is to the nodes that read it."""

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
    """float16 or bfloat16 of the value divided by `scale`; what is beyond its range saturates where `is_saturating`,
    else becomes Inf."""

    format: str
    is_saturating: bool = False
    scale: float = 1.0

    def __str__(self) -> str:
        return self.format


@dataclass(frozen=True)
class DynamicChoice:
    """Integers whose scale and zero point are found from the data at run time, for the whole tensor."""

    format: str

    def __str__(self) -> str:
        return f"{self.format} dynamic"


Choice: TypeAlias = AffineChoice | BlockChoice | FloatChoice | DynamicChoice


@dataclass(frozen=True)
class TensorChoice:
    """How one tensor is quantized for these readers, and the rule that decided it."""

    tensor: str
    role: Role
    choice: Choice
    readers: tuple[Reader, ...]
    reason: str = ""


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
        """The choices for that tensor; several where readers want it differently."""
        return tuple(choice for choice in self.tensors if choice.tensor == tensor)

    def to_json(self) -> str:
        """The plan as text; `from_json` gives an equal plan back.

        >>> plan = QuantizationPlan((TensorChoice("x", Role.ACTIVATION, FloatChoice("bfloat16"), (Reader("c", 0),)),))
        >>> QuantizationPlan.from_json(plan.to_json()) == plan
        True
        """
        content = {
            "version": PLAN_VERSION,
            "tensors": [_tensor_to_dict(each) for each in self.tensors],
            "skipped": [asdict(each) for each in self.skipped],
        }
        return json.dumps(content, indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> QuantizationPlan:
        try:
            content = json.loads(text)
            if content["version"] != PLAN_VERSION:
                raise InvalidValueError(f"plan of version {content['version']}: expected {PLAN_VERSION}")
            tensors = tuple(_tensor_from_dict(each) for each in content["tensors"])
            return QuantizationPlan(tensors, tuple(SkippedNode(**each) for each in content["skipped"]))
        except InvalidValueError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InvalidValueError(f"not a quantization plan: {type(error).__name__}: {error}") from error

    @property
    def digest(self) -> str:
        """A hash of everything the plan says."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def _tensor_to_dict(each: TensorChoice) -> dict[str, Any]:
    return {
        "tensor": each.tensor,
        "role": each.role.value,
        "choice": _choice_to_dict(each.choice),
        "readers": [[reader.node, reader.index] for reader in each.readers],
        "reason": each.reason,
    }


def _tensor_from_dict(content: Mapping[str, Any]) -> TensorChoice:
    readers = tuple(Reader(str(node), int(index)) for node, index in content["readers"])
    choice = _choice_from_dict(content["choice"])
    return TensorChoice(str(content["tensor"]), Role(content["role"]), choice, readers, str(content["reason"]))


_PLAIN_KINDS: Mapping[str, type[AffineChoice] | type[FloatChoice] | type[DynamicChoice]] = {
    "affine": AffineChoice,
    "float": FloatChoice,
    "dynamic": DynamicChoice,
}


def _choice_to_dict(choice: Choice) -> dict[str, Any]:
    if isinstance(choice, BlockChoice):
        quantizer = choice.quantizer
        return {
            "kind": "block",
            "format": _format_to_json(quantizer.format),
            "block_size": quantizer.format.block_size,
            "axis": choice.axis,
            "scale_rule": quantizer.scale_rule.value,
            "rounding": quantizer.rounding.value,
            "nonfinite": quantizer.nonfinite.value,
            "to_bfloat16_first": choice.to_bfloat16_first,
        }
    kind = next(name for name, cls in _PLAIN_KINDS.items() if isinstance(choice, cls))
    if isinstance(choice, AffineChoice):
        numbers = {name: _numbers_to_json(getattr(choice, name)) for name in ("scale", "zero_point")}
        return {"kind": kind, "format": choice.format, **numbers, "axis": choice.axis, "group_size": choice.group_size}
    return {"kind": kind, **asdict(choice)}


def _choice_from_dict(content: Mapping[str, Any]) -> Choice:
    fields = dict(content)
    kind = fields.pop("kind")
    if kind == "block":
        fmt = _format_from_json(fields["format"]).with_block_size(int(fields["block_size"]))
        quantizer = BlockQuantizer(
            fmt, ScaleRule(fields["scale_rule"]), Rounding(fields["rounding"]), NonFinite(fields["nonfinite"])
        )
        return BlockChoice(quantizer, int(fields["axis"]), bool(fields["to_bfloat16_first"]))
    if kind not in _PLAIN_KINDS:
        raise InvalidValueError(f"kind {kind!r} of a choice: expected block, {', '.join(_PLAIN_KINDS)}")
    if kind == "affine":
        fields |= {name: _numbers_from_json(fields[name]) for name in ("scale", "zero_point")}
    return _PLAIN_KINDS[kind](**fields)


def _numbers_to_json(numbers: tuple[float, ...] | tuple[int, ...]) -> list[float] | dict[str, str]:
    """A list; where it is long, as for the groups of a large weight, the bytes of an array of the narrowest type."""
    if len(numbers) <= _MOST_LISTED:
        return list(numbers)
    wide = np.array(numbers)
    kinds = ("<f4", "<f8") if wide.dtype.kind == "f" else ("|i1", "|u1", "<i2", "<u2", "<i4", "<i8")
    kind = next(each for each in kinds if (wide.astype(each).astype(wide.dtype) == wide).all())
    return {"type": kind, "base64": base64.b64encode(wide.astype(kind).tobytes()).decode()}


def _numbers_from_json(content: list[Any] | Mapping[str, str]) -> tuple[Any, ...]:
    if isinstance(content, list):
        return tuple(content)
    return tuple(np.frombuffer(base64.b64decode(content["base64"]), content["type"]).tolist())


def _format_to_json(fmt: BlockFormat) -> str | dict[str, Any]:
    """Its name where the catalog has it (but for the block size), else everything that it is."""
    row = FORMATS.get(fmt.name)
    if isinstance(row, BlockFormat) and row.with_block_size(fmt.block_size) == fmt:
        return fmt.name
    return {**asdict(fmt), "element_kind": "float" if isinstance(fmt.element, FloatFormat) else "int"}


def _format_from_json(content: str | Mapping[str, Any]) -> BlockFormat:
    if isinstance(content, str):
        row = get_format(content)
        if not isinstance(row, BlockFormat):
            raise InvalidValueError(f"format '{content}' has no blocks")
        return row
    fields = dict(content)
    element = dict(fields.pop("element"))
    if fields.pop("element_kind") == "float":
        fields["element"] = FloatFormat(**{**element, "specials": Specials(element["specials"])})
    else:
        fields["element"] = IntFormat(**element)
    if fields["sub_blocks"] is not None:
        fields["sub_blocks"] = SubBlocks(**fields["sub_blocks"])
    return BlockFormat(**{**fields, "default_nonfinite": NonFinite(fields["default_nonfinite"])})
