"""The vectorised divergence against the definition, bin by bin."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from quark.formats import get_format
from quark.formats.spec import IntFormat
from quark.ranges import Entropy, range_of
from quark.ranges.histogram_methods import divergences


def naive_divergence(counts: np.ndarray[Any, Any], cut: int, levels: int) -> float:
    p = counts[:cut].astype(float)
    beyond = float(counts[cut:].sum())
    p[-1] += beyond
    q = np.zeros(cut)
    for level in range(levels):
        bins = [i for i in range(level * cut // levels, (level + 1) * cut // levels) if p[i] > 0]
        mass = sum(float(counts[i]) for i in range(level * cut // levels, (level + 1) * cut // levels))
        for i in bins:
            q[i] = (mass or 0.5) / len(bins)
    p, q = p / p.sum(), q / q.sum()
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("levels", [4, 7, 16])
def test_divergences_are_those_of_the_definition(seed: int, levels: int) -> None:
    generator = np.random.default_rng(seed)
    counts = generator.poisson(50 * np.exp(-np.arange(60) / generator.uniform(3, 30))).astype(np.int64)
    counts[generator.integers(0, 60, 10)] = 0
    counts[-1] += 1
    expected = [naive_divergence(counts, cut, levels) for cut in range(levels, len(counts) + 1)]
    np.testing.assert_allclose(divergences(counts, levels), expected, rtol=1e-9, atol=1e-12)


def test_outliers_are_cut_off() -> None:
    fmt = get_format("int8")
    assert isinstance(fmt, IntFormat)
    x = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    x[0] = 100.0
    assert range_of(x, Entropy(), fmt, True).highest < 20


def test_sixteen_bits_are_not_clipped() -> None:
    fmt = get_format("int16")
    assert isinstance(fmt, IntFormat)
    x = np.array([-1.0, 0.1, 0.2, 50.0], np.float32)
    found = range_of(x, Entropy(), fmt, True)
    assert (found.lowest, found.highest) == (-1.0, 50.0)
