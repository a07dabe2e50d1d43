"""The NPU's constants are the published numbers, and those that its search finds."""

from __future__ import annotations

import math

import pytest

from quark.errors import InvalidValueError
from quark.npu import (
    HARD_SIGMOID_FACTOR,
    average_pool_factor,
    clip_bound,
    is_npu_hard_sigmoid,
    leaky_relu_alpha,
    mean_factor,
)


def searched(count):
    """The search in floating point, written out: of all shifts the first with the least error."""
    shifts = range(7 + math.ceil(math.log2(count)))
    multipliers = [round(2**shift / count) for shift in shifts]
    errors = [abs(k / 2**shift - 1 / count) for shift, k in zip(shifts, multipliers, strict=True)]
    best = errors.index(min(errors))
    return multipliers[best] / 2**best * count


@pytest.mark.parametrize(("side", "factor"), [
    (3, 9 * 7 / 64), (5, 25 * 10 / 256), (6, 36 * 7 / 256), (7, 49 * 21 / 1024), (14, 196 * 21 / 4096),
    (1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0), (128, 1.0), (256, 1.0), (300, 1.0),
])  # fmt: skip
def test_fixed_windows(side, factor):
    assert average_pool_factor(side, side) == factor


@pytest.mark.parametrize("side", [9, 10, 11, 12, 13, 15, 28, 56, 112, 255])
def test_other_windows_are_searched_for(side):
    assert average_pool_factor(side, side) == searched(side * side)


def test_a_side_beyond_255_is_not_computed_there():
    assert average_pool_factor(3, 256) == 1.0
    assert average_pool_factor(3, 255) == searched(765)


@pytest.mark.parametrize("count", [*range(1, 400), 1000, 4095, 4097, 50176, 65025, 1 << 20])
def test_the_search(count):
    assert mean_factor(count) == searched(count)
    assert abs(mean_factor(count) - 1) < 1 / 64


def test_slopes_and_bounds():
    assert leaky_relu_alpha(0.1) == 26 / 256
    assert leaky_relu_alpha(0.01) == 3 / 256
    assert leaky_relu_alpha(0.25) == 0.25
    assert HARD_SIGMOID_FACTOR == 2731 / 16384 * 6
    assert [clip_bound(x) for x in (6.0, 0.4, -0.6, 300.0, -1e38, math.inf)] == [6, 0, -1, 127, -128, 127]


def test_the_npus_hard_sigmoid():
    assert is_npu_hard_sigmoid(0.16666667163372040, 0.5)  # as float32 has it
    assert not is_npu_hard_sigmoid(0.2, 0.5)
    assert not is_npu_hard_sigmoid(1 / 6, 0.4)


def test_nothing_has_no_mean():
    for call in (lambda: mean_factor(0), lambda: average_pool_factor(0, 3)):
        with pytest.raises(InvalidValueError, match="0"):
            call()
