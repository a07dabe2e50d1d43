"""Odd inputs for quantizers to train through, and the definitions to compare compiled code with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from quark.formats.affine import AffineParameters, integer_format
from quark.formats.native import FakeKind, FakeQuantizer
from quark.ops import fake_quantize

KINDS = {"affine": FakeKind.AFFINE, "lsq": FakeKind.STEP, "tqt": FakeKind.THRESHOLD}
SPECIAL = [0.0, -0.0, 1e-45, -3e-39, 1.2e-38, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 2.0**-127, 1e30]


def four_bits(name: str) -> FakeQuantizer:
    return FakeQuantizer(KINDS[name], -8, 7)


def odd_values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Normal numbers of many sizes, with ties, zeros, subnormal and huge ones, Inf and NaN among them."""
    rng = np.random.default_rng(seed)
    x = np.asarray(rng.standard_normal(shape) * np.exp2(rng.integers(-3, 4, shape)))
    flat = x.reshape(-1)
    where = rng.permutation(flat.size)
    eighth = flat.size // 8
    flat[where[:eighth]] = rng.integers(-20, 20, eighth) / 8
    few = min(flat.size // 16, len(SPECIAL))
    flat[where[eighth : eighth + few]] = rng.permutation(SPECIAL)[:few]
    return x.astype(np.float32)


def parameters_of(name: str, shape: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Parameters of that shape, some of them powers of two, and zero points."""
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=shape) if name == "tqt" else rng.choice([0.25, 0.3], shape) + rng.integers(0, 2, shape)
    zero_point = torch.from_numpy(np.asarray(rng.integers(-8, 8, shape))) if name == "affine" else None
    return torch.from_numpy(np.asarray(numbers, np.float32)), zero_point


def composed(
    name: str, axis: int | None, zero_point: torch.Tensor | None, group_size: int | None = None
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The definition with four bits: a function of x and the parameter."""
    if name == "affine":
        fmt = integer_format("int4")
        return lambda x, p: fake_quantize._composed_affine(
            x, AffineParameters(p.detach(), zero_point, fmt, axis, group_size)
        )
    function = {"lsq": fake_quantize._composed_lsq, "tqt": fake_quantize._composed_tqt}[name]
    return lambda x, p: function(x, p, four_bits(name), axis)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal numbers, NaN for NaN; the sign of zero is free."""
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.detach().float().cpu().numpy(), expected.detach().float().cpu().numpy())
