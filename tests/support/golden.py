"""The golden vectors: inputs and exact expected outputs for every quantizer, made with integer arithmetic."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quark.formats.block import BlockQuantizer
from quark.formats.catalog import BLOCK_FORMATS
from quark.formats.spec import BlockFormat, NonFinite, Rounding, ScaleRule

Array = np.ndarray[Any, Any]

FILE = Path(__file__).resolve().parents[1] / "data" / "golden.npz"

# The file names OCP formats by their elements.
FORMAT_OF = {str(fmt.element): fmt for fmt in BLOCK_FORMATS if fmt.name.startswith(("mxfp", "mxint"))} | {
    str(fmt): fmt for fmt in BLOCK_FORMATS if not fmt.name.startswith(("mxfp", "mxint"))
}
ROUNDING_OF = {"r0": Rounding.HALF_AWAY, "r1": Rounding.HALF_UP}


@dataclass(frozen=True)
class Case:
    """One input with its expected output; outside the cases with NaN, values beyond float32 are free."""

    name: str
    axis: int
    x: Array
    expected: Array
    has_nan: bool

    def mismatches(self, actual: Array) -> Array:
        is_free = np.zeros(self.x.shape, bool) if self.has_nan else np.isinf(self.expected)
        return ~(same(actual, self.expected) | is_free)


def same(a: Array, b: Array) -> Array:
    """Equal values; NaN is equal to NaN and the sign of zero is free."""
    return (a == b) | (np.isnan(a) & np.isnan(b))


@functools.cache
def load() -> dict[str, Array]:
    with np.load(FILE) as file:
        return dict(file)


@functools.cache
def meta() -> dict[str, Any]:
    return json.loads(load()["meta_json"].tobytes())


def quantizer_names() -> list[str]:
    return sorted({key.split("__")[1] for key in load() if key.startswith("out__")})


def quantizer(name: str) -> BlockQuantizer:
    """The quantizer that a name such as `int8.r1` or `fp4_e2m1.rceil` stands for."""
    base, *options = name.split(".")
    fmt: BlockFormat = FORMAT_OF[base]
    rule, rounding, policy = ScaleRule.FLOOR, Rounding.HALF_EVEN, fmt.default_nonfinite
    for option in options:
        if option in ROUNDING_OF:
            rounding = ROUNDING_OF[option]
        elif option in {member.value for member in NonFinite}:
            policy = NonFinite(option)
        else:
            rule = ScaleRule(option)
    return BlockQuantizer(fmt, rule, rounding, policy)


def cases(name: str) -> list[Case]:
    """All cases that the file holds for a quantizer."""
    found = []
    for key, expected in load().items():
        if key.startswith(f"out__{name}__"):
            case = key.split("__")[2]
            has_nan = case in meta()["nan_cases"]
            axis = (meta()["nan_cases"] if has_nan else meta()["cases"])[case]["axis"]
            found.append(Case(case, axis, load()[f"in__{case}"], expected, has_nan))
    return found
