"""Rules for scales: 16-bit integers over a power of two, groups for MatMulNBits, weights that make room for a bias."""

from __future__ import annotations

import numpy as np
import pytest

from quark.decide.half_quadratic import POWER
from quark.decide.scales import ChannelAxis, choice_of_range, choice_of_weight, fit_weight_to_bias, int16_scale
from quark.decide.specs import AffineSpec, GroupRule
from quark.decide.view import ArrayConstant
from quark.plan import AffineChoice
from quark.ranges import TensorRange
from quark.rounded import rounded

# A scale, and what AMD Quark 0.13 makes of it; where it has 0, the smallest that it uses instead.
INT16_SCALES = [
    (0.3, 0.3000030517578125),
    (1 / 3, 0.3333282470703125),
    (0.001, 0.001007080078125),
    (3.1e-05, 3.0517578125e-05),
    (2.0**-17, 2.0**-14),
    (1.0, 1.0),
    (7.25, 7.25),
    (100.1, 100.1015625),
    (32767.0, 32767.0),
    (0.02375369, 0.0237579345703125),
    (1e-06, 2.0**-14),
]


@pytest.mark.parametrize(("scale", "expected"), INT16_SCALES)
def test_scales_of_16_bits(scale, expected):
    assert int16_scale(scale) == expected
    assert int16_scale(scale, is_upward=True) >= min(scale, 2.0**-14)


def test_a_range_with_a_16_bit_scale_keeps_its_zero_point():
    spec = AffineSpec("uint8", is_symmetric=False)
    plain = choice_of_range(spec, TensorRange(-1.0, 3.0))
    short = choice_of_range(AffineSpec("uint8", is_symmetric=False, has_int16_scale=True), TensorRange(-1.0, 3.0))
    assert short.scale == (int16_scale(plain.scale[0]),) != plain.scale
    assert short.zero_point == plain.zero_point


def test_a_bias_saturates_only_if_that_was_asked_for():
    weight, values = AffineChoice("int8", (2.0**-14,), (0,)), np.full((1, 4), 0.01, np.float32)
    bias = np.array([1e5], np.float32)
    raised = fit_weight_to_bias(weight, values, 1e-5, bias)
    assert 2**31 > bias[0] / (1e-5 * raised.scale[0]) > 2**30
    assert fit_weight_to_bias(weight, values, 1e-5, bias, is_raised=False) is weight


def groups(rule: GroupRule, format: str = "int4") -> tuple[np.ndarray, AffineChoice]:
    values = np.random.default_rng(3).standard_normal((100, 6)).astype(np.float32)
    spec = AffineSpec(format, is_symmetric=format == "int4", group_size=32, group_rule=rule)
    return values, choice_of_weight(spec, ArrayConstant(values), ChannelAxis(0, 32))


def test_the_largest_magnitude_of_a_group_has_the_lowest_code():
    values, choice = groups(GroupRule.LOWEST_CODE)
    scale = np.array(choice.scale).reshape(4, 6)
    block = values[:32]
    extreme = block[np.abs(block).argmax(axis=0), np.arange(6)]
    np.testing.assert_array_equal(scale[0].astype(np.float32), extreme / np.float32(-8))
    assert (scale < 0).any()
    squared = [((rounded(values, value) - values) ** 2).sum() for value in (choice, groups(GroupRule.RANGE)[1])]
    assert squared[0] < squared[1]


def test_a_group_of_zeros_has_a_scale():
    spec = AffineSpec("int4", group_size=4, group_rule=GroupRule.LOWEST_CODE)
    assert choice_of_weight(spec, ArrayConstant(np.zeros((4, 1), np.float32)), ChannelAxis(0, 4)).scale == (1.0,)


@pytest.mark.parametrize("format", ["int4", "uint4"])
def test_half_quadratic_refinement_makes_no_group_worse(format):
    values, plain = groups(GroupRule.LOWEST_CODE, format)
    _, refined = groups(GroupRule.HALF_QUADRATIC, format)
    loss = [np.abs(rounded(values, value) - values) ** POWER for value in (plain, refined)]
    before, after = (np.array([each[start : start + 32].sum(axis=0) for start in range(0, 100, 32)]) for each in loss)
    assert (after <= before * (1 + 1e-6)).all()
    assert after.sum() < 0.99 * before.sum()
