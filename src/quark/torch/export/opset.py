"""Which version of the standard operators a file is written in.

18 where that will do, which is what torch's exporter writes and what every supported ONNX Runtime takes; 21 where
numbers have 16 or 4 bits or scales for groups, which the standard's QuantizeLinear takes from there on, and for float16
data, whose scales it takes from 19 on.
"""

from __future__ import annotations

from collections.abc import Sequence

from quark.errors import InvalidValueError
from quark.formats.catalog import get_format
from quark.formats.spec import IntFormat
from quark.plan import AffineChoice, Choice

PLAIN = 18
WIDE = 21
NEWEST = 23


def choose_opset(choices: Sequence[Choice], *, is_half: bool, wanted: int | None) -> int:
    """The opset for these choices, or the one that is wanted, if it can be."""
    if wanted is None:
        return WIDE if is_half or any(map(_is_wide, choices)) else PLAIN
    if not PLAIN <= wanted <= NEWEST:
        raise InvalidValueError(f"opset {wanted}: expected {PLAIN} to {NEWEST}, or None for the oldest that will do")
    if wanted < WIDE and any(isinstance(each, AffineChoice) and each.group_size is not None for each in choices):
        raise InvalidValueError(f"opset {wanted}: scales for groups need {WIDE} or newer")
    return wanted


def _is_wide(choice: Choice) -> bool:
    if not isinstance(choice, AffineChoice):
        return False
    fmt = get_format(choice.format)
    assert isinstance(fmt, IntFormat)
    return choice.group_size is not None or fmt.bits in (4, 16)
