"""`quantize_dequantize`: the values that a format keeps of an array."""

from __future__ import annotations

import operator
from enum import Enum
from typing import Any, TypeVar

from quark.errors import InvalidValueError, UnsupportedTypeError, unknown_name
from quark.formats.arrays import ArrayKind, array_kind
from quark.formats.block import BlockQuantizer, quantize_dequantize_blocks
from quark.formats.catalog import get_format
from quark.formats.elementwise import quantize_dequantize_elements
from quark.formats.native import quantize_dequantize_native
from quark.formats.spec import BlockFormat, ElementFormat, Format, NonFinite, Rounding, ScaleRule

Choice = TypeVar("Choice", bound=Enum)


def quantize_dequantize(
    x: Any,
    format: str | Format,
    axis: int = -1,
    *,
    block_size: int | None = None,
    scale_rule: str | ScaleRule = ScaleRule.FLOOR,
    rounding: str | Rounding = Rounding.HALF_EVEN,
    nonfinite: str | NonFinite | None = None,
) -> Any:
    """Quantize x to a format and give back the values it stands for, as the same kind of array.

    x is a numpy array or a torch tensor (CPU or GPU) of float32, float16, bfloat16 or float64, and is not written to.
    Blocks run along `axis`. `nonfinite=None` is the format's own policy. Values beyond the range saturate; float16
    and bfloat16 are computed in float32 and rounded back, so a result beyond float16's range is Inf there. No gradient
    flows through: `quark.ops.fake_quantize` has the functions to train with.

    >>> import numpy as np
    >>> quantize_dequantize(np.array([0.1, -0.7, 3.3, 6.1], np.float32), "mxfp4_e2m1")
    array([ 0. , -0.5,  3. ,  6. ], dtype=float32)
    """
    fmt = get_format(format)
    kind = array_kind(x)
    kind.precision(x)
    x = kind.detach(x)
    position = normalize_axis(axis, len(x.shape))
    if isinstance(fmt, BlockFormat):
        quantizer = choose_quantizer(
            fmt, block_size=block_size, scale_rule=scale_rule, rounding=rounding, nonfinite=nonfinite
        )
        return _along_blocks(kind, x, position, quantizer)
    refuse_block_options(fmt, block_size, parse_choice(ScaleRule, scale_rule, "scale rule"))
    mode = parse_choice(Rounding, rounding, "rounding mode")
    return quantize_dequantize_elements(kind, x, fmt, mode, _policy(fmt, nonfinite))


def choose_quantizer(
    fmt: BlockFormat,
    *,
    block_size: int | None = None,
    scale_rule: str | ScaleRule = ScaleRule.FLOOR,
    rounding: str | Rounding = Rounding.HALF_EVEN,
    nonfinite: str | NonFinite | None = None,
) -> BlockQuantizer:
    """A block format with the options of `quantize_dequantize`."""
    if block_size is not None:
        fmt = fmt.with_block_size(as_index("block_size", block_size))
    rule = parse_choice(ScaleRule, scale_rule, "scale rule")
    return BlockQuantizer(fmt, rule, parse_choice(Rounding, rounding, "rounding mode"), _policy(fmt, nonfinite))


def _policy(fmt: Format, nonfinite: str | NonFinite | None) -> NonFinite:
    if nonfinite is None:
        return fmt.default_nonfinite
    return parse_choice(NonFinite, nonfinite, "non-finite policy")


def _along_blocks(kind: ArrayKind, x: Any, axis: int, quantizer: BlockQuantizer) -> Any:
    """By the native code where it is there and takes x, else by array operations; the values are the same."""
    result = quantize_dequantize_native(x, axis, quantizer)
    return quantize_dequantize_blocks(kind, x, axis, quantizer) if result is None else result


def parse_choice(choices: type[Choice], value: str | Choice, what: str) -> Choice:
    """The member of that value; an unknown one is an error with the nearest names.

    >>> parse_choice(ScaleRule, "rceil", "scale rule")
    <ScaleRule.RCEIL: 'rceil'>
    """
    try:
        return choices(value)
    except ValueError:
        raise unknown_name(what, value, [str(choice.value) for choice in choices]) from None


def normalize_axis(axis: int, rank: int) -> int:
    """The axis counted from the front; a scalar counts as one element along axis 0."""
    axis = as_index("axis", axis)
    dims = max(rank, 1)
    if not -dims <= axis < dims:
        raise InvalidValueError(
            f"axis {axis} is out of range for an array of rank {rank}: expected {-dims}..{dims - 1}"
        )
    return axis % dims


def as_index(name: str, value: object) -> int:
    """value as a Python integer; floats and bools are refused rather than truncated."""
    if isinstance(value, bool):
        raise UnsupportedTypeError(f"{name}: expected an integer, got {value!r}")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UnsupportedTypeError(f"{name}: expected an integer, got {value!r}") from None


def refuse_block_options(fmt: ElementFormat, block_size: object, rule: ScaleRule) -> None:
    """A plain format has no blocks and no scale: an option that could do nothing is a mistake."""
    if block_size is not None:
        raise InvalidValueError(f"block_size: format '{fmt}' has no blocks; leave it out or choose a block format")
    if rule is not ScaleRule.FLOOR:
        raise InvalidValueError(f"scale_rule '{rule.value}': format '{fmt}' has no scale; leave it out")
