"""Positions: the golden ones, and exactness where a logarithm would be wrong."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.formats.power_of_two import (
    NEAREST_SIGNED,
    NEAREST_UNSIGNED,
    NON_OVERFLOW,
    POSITION_RULES,
    find_position,
    min_mse_position,
    non_overflow_position,
    position_of_range,
    scale_of_position,
)

GOLDEN = Path(__file__).parents[1] / "data" / "golden.npz"
COLUMNS = {
    "vitis_nonoverflow": (find_position, NON_OVERFLOW),
    "vitis_minmse": (min_mse_position, NON_OVERFLOW),
    "nearest_int8": (find_position, NEAREST_SIGNED),
    "nearest_int8_minmse": (min_mse_position, NEAREST_SIGNED),
    "nearest_uint8": (find_position, NEAREST_UNSIGNED),
    "nearest_uint8_minmse": (min_mse_position, NEAREST_UNSIGNED),
}
KINDS = {
    "numpy32": lambda x: np.asarray(x, np.float32),
    "numpy64": lambda x: np.asarray(x, np.float64),
    "torch32": lambda x: torch.tensor(np.asarray(x, np.float32)),
    "torch64": lambda x: torch.tensor(np.asarray(x, np.float64)),
}
MAGNITUDES = st.floats(min_value=2.0**-100, max_value=2.0**120)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("column", COLUMNS)
def test_golden_positions(column, kind):
    golden = np.load(GOLDEN)
    index = json.loads(bytes(golden["meta_json"]))["pos_columns"].index(column)
    find, rule = COLUMNS[column]
    found = [find(KINDS[kind](x), 8, rule) for x in golden["pos__x"]]
    assert found == golden["pos__expected"][:, index].tolist()


@pytest.mark.parametrize("bits", [2, 4, 8, 16, 32])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(low=MAGNITUDES, high=MAGNITUDES)
def test_non_overflow_is_the_largest_position_that_fits(bits, low, high):
    half = Fraction(2 ** (bits - 1))

    def fits(p):
        step = Fraction(2) ** p
        return Fraction(high) * step <= half - Fraction(1, 2) and Fraction(low) * step <= half + Fraction(1, 2)

    position = non_overflow_position(np.array([-low, high, 0.0]), bits)
    assert fits(position) or position == -128
    assert position == 127 or not fits(position + 1)


@pytest.mark.parametrize("bits", [2, 8, 16])
@pytest.mark.parametrize("rule", [NEAREST_SIGNED, NEAREST_UNSIGNED], ids=str)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(largest=MAGNITUDES)
def test_nearest_rounds_the_exact_logarithm(rule, bits, largest):
    reach = Fraction(2 ** (bits - 1) - 1) if rule.is_signed else Fraction(2**bits - 1, 2)
    square = (reach / Fraction(largest)) ** 2  # 2^(2 * -log2 scale)
    position = find_position(np.array([-largest]), bits, rule)
    assert Fraction(2) ** (2 * position - 1) < square or position == -127
    assert square < Fraction(2) ** (2 * position + 1) or position == 127


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", POSITION_RULES, ids=str)
def test_one_ulp_about_a_limit(rule, kind):
    for sign, limit in zip((-1, 1), rule.limits(8), strict=True):
        dtype = np.float32 if kind.endswith("32") else np.float64
        inside = dtype(limit)
        if float(inside) > limit:
            inside = np.nextafter(inside, dtype(0))
        outside = np.nextafter(inside, dtype(np.inf))
        assert find_position(KINDS[kind]([sign * inside]), 8, rule) == 0
        assert find_position(KINDS[kind]([sign * outside]), 8, rule) == -1


@pytest.mark.parametrize("rule", POSITION_RULES, ids=str)
def test_limits_are_the_largest_float_below_the_true_ones(rule):
    for bits in range(2, 33):
        reach = Fraction(2 ** (bits - 1) - 1) if rule.is_signed else Fraction(2**bits - 1, 2)
        for limit in rule.limits(bits) if rule.is_nearest else ():
            assert Fraction(limit) ** 2 < 2 * reach**2 < Fraction(math.nextafter(limit, math.inf)) ** 2


def test_nothing_overflows_where_the_nearest_rule_clips():
    x = np.array([1.4], np.float32)
    assert (non_overflow_position(x), find_position(x, 8, NEAREST_SIGNED)) == (6, 7)


def brute_force(x, bits, candidates):
    half = 2 ** (bits - 1)
    errors = {}
    for p in candidates:
        codes = np.clip(np.rint(x.astype(np.float64) * 2.0**p), -half, half - 1)
        errors[p] = sum(Fraction(float(e)) ** 2 for e in (codes * 2.0**-p - x))
    return min(errors, key=lambda p: (errors[p], p))


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", POSITION_RULES, ids=str)
def test_least_error_by_brute_force(rule, kind, bits):
    rng = np.random.default_rng(bits)
    for scale in (0.01, 1.0, 300.0):
        x = (rng.standard_t(3, 65) * scale).astype(np.float32)
        start = find_position(x, bits, rule)
        expected = brute_force(x, bits, [start + step for step in rule.offsets])
        assert min_mse_position(KINDS[kind](x), bits, rule) == expected


def test_of_equal_errors_the_largest_scale_wins():
    x = np.array([64.0, -32.0, 16.0], np.float32)  # exact at several positions
    assert min_mse_position(x) == non_overflow_position(x) == 0
    assert min_mse_position(x, 8, NEAREST_SIGNED) == find_position(x, 8, NEAREST_SIGNED) - 1 == 0


def test_the_candidates_are_part_of_the_rule():
    x = np.full(9, 200.0, np.float32)  # position -1, and exact from -3 to 0
    assert min_mse_position(x, 8, replace(NEAREST_SIGNED, offsets=(-2, -1, 0, 1, 2))) == -3
    assert min_mse_position(x, 8, replace(NEAREST_SIGNED, offsets=(3,))) == find_position(x, 8, NEAREST_SIGNED) + 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, -0.0], [127, 127, 0, -1, 0, -1]),
        ([], [127, 127, 0, -1, 0, -1]),
        ([1e-45], [127, 127, 0, -1, 0, -1]),
        ([-1e-40, 0.0], [127, 127, 0, -1, 0, -1]),
        ([3.4028234663852886e38], [-122, -122, -121, -122, -121, -122]),
        ([-3.4028234663852886e38], [-121, -121, -121, -122, -121, -122]),
    ],
)
def test_edges(values, expected, kind):
    x = KINDS[kind](values)
    assert [find(x, 8, rule) for find, rule in COLUMNS.values()] == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats(dtype):
    x = torch.linspace(-3, 2, 50).to(dtype)
    assert min_mse_position(x) == min_mse_position(x.float())


@pytest.mark.parametrize("module", [np, torch], ids=["numpy", "torch"])
def test_positions_of_channels(module):
    lowest, highest = module.asarray([-1.0, 0.0, 0.0]), module.asarray([1.0, 0.0, 1.4])
    position = position_of_range(lowest, highest)
    assert position.tolist() == [6, 127, 6]
    assert scale_of_position(position).tolist() == [2.0**-6, 2.0**-127, 2.0**-6]


def test_scales_are_exact():
    assert [scale_of_position(p) for p in (0, 7, -3, 127, -128)] == [1.0, 2.0**-7, 8.0, 2.0**-127, 2.0**128]
    every = np.arange(-128, 128)
    assert scale_of_position(every).tolist() == [math.ldexp(1.0, -int(p)) for p in every]


def test_what_is_refused_says_why():
    for bad in (np.array([1.0, np.nan]), torch.tensor([float("inf")])):
        with pytest.raises(InvalidValueError, match="NaN or Inf"):
            non_overflow_position(bad)
    with pytest.raises(InvalidValueError, match="bits 1: expected 2 to 32"):
        non_overflow_position(np.ones(2), 1)
    with pytest.raises(UnsupportedTypeError, match="got int64"):
        non_overflow_position(np.ones(2, np.int64))
