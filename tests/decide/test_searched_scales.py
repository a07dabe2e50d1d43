"""Searched scales of groups: never worse than ONNX Runtime's rule, and right for the outputs if inputs are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quark.decide.scales import ChannelAxis, choice_of_weight
from quark.decide.searched_scales import (
    gram_blocks,
    has_searchable_blocks,
    searched,
    searched_parameters,
    searched_powers,
)
from quark.decide.specs import AffineSpec, GroupRule
from quark.decide.view import ArrayConstant
from quark.formats.affine import integer_format
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import BLOCK_FORMATS
from quark.formats.quantize import quantize_dequantize
from quark.formats.spec import ScaleRule
from quark.plan import BlockChoice
from quark.rounded import rounded

WEIGHT = np.random.default_rng(5).standard_t(4, (200, 24)).astype(np.float32)
GROUPS = ChannelAxis(0, 32)
FORMATS = ["int2", "int4", "int8", "uint2", "uint4", "uint8"]


def chosen(fmt: str, rule: GroupRule, channels=GROUPS, weight=WEIGHT):
    spec = AffineSpec(fmt, is_symmetric=not fmt.startswith("u"), group_size=channels.group_size, group_rule=rule)
    return choice_of_weight(spec, ArrayConstant(weight), channels)


def squares(choice, weight=WEIGHT) -> np.ndarray:
    """Squared errors of groups of 32 along axis 0."""
    errors = np.square(rounded(weight, choice).astype(np.float64) - weight)
    return np.add.reduceat(errors, range(0, len(weight), 32), axis=0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_group_gets_worse_and_most_get_better(fmt):
    before, after = squares(chosen(fmt, GroupRule.LOWEST_CODE)), squares(chosen(fmt, GroupRule.SEARCHED))
    assert (after <= before * (1 + 1e-5)).all()
    assert (after < before).mean() > 0.8
    assert after.sum() < {"2": 0.8, "4": 0.95, "8": 0.99}[fmt[-1]] * before.sum()


def test_channels_are_searched_too():
    plain, better = (chosen("int4", rule, ChannelAxis(1)) for rule in (GroupRule.LOWEST_CODE, GroupRule.SEARCHED))
    assert (better.axis, better.group_size, len(better.scale)) == (1, None, 24)
    assert squares(better).sum() < 0.9 * squares(plain).sum()


@pytest.mark.parametrize("fmt", ["int2", "int4"])
def test_long_channels_are_clipped_as_far_as_few_bits_need(fmt):
    weight = np.random.default_rng(3).standard_normal((1536, 8)).astype(np.float32)
    plain, better = (chosen(fmt, rule, ChannelAxis(1), weight) for rule in (GroupRule.LOWEST_CODE, GroupRule.SEARCHED))
    shares = np.linspace(0.2, 1, 81)
    clipped = [replace(plain, scale=tuple(share * np.array(plain.scale))) for share in shares]
    least = np.min([np.square(rounded(weight, each) - weight).sum(axis=0) for each in clipped], axis=0)
    assert (np.square(rounded(weight, better) - weight).sum(axis=0) <= 1.02 * least).all()


def test_a_group_of_zeros_and_an_exact_one():
    weight = np.zeros((64, 2), np.float32)
    weight[:32, 1] = np.resize(np.arange(-8, 8), 32) * 0.25
    choice = chosen("int4", GroupRule.SEARCHED, weight=weight)
    np.testing.assert_array_equal(rounded(weight, choice), weight)


def test_the_inputs_decide():
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((500, 6)) @ rng.standard_normal((6, 200)) * np.exp(rng.standard_normal(200))
    gram = (inputs.T @ inputs).astype(np.float64)
    plain = chosen("int4", GroupRule.SEARCHED)
    known = searched(chosen("int4", GroupRule.LOWEST_CODE), WEIGHT, gram)
    blocks = gram_blocks(gram, 32)

    def by_outputs(choice) -> float:
        error = np.pad(rounded(WEIGHT, choice) - WEIGHT, [(0, 24), (0, 0)]).T.reshape(24, 7, 32).astype(np.float64)
        return float(np.einsum("lgs,gst,lgt->", error, blocks, error))

    assert by_outputs(known) < 0.85 * by_outputs(plain)


@pytest.mark.parametrize("fmt", ["int4", "uint4"])
def test_parameters_are_those_of_the_same_numbers_in_a_weight(fmt):
    weight = WEIGHT[:192]
    groups = weight.T.reshape(24, 6, 32)
    scale, zero_point = searched_parameters(fmt, groups, None, is_symmetric=integer_format(fmt).signed)
    choice = chosen(fmt, GroupRule.SEARCHED, weight=weight)
    np.testing.assert_allclose(scale.T.ravel(), choice.scale, rtol=1e-4)
    np.testing.assert_array_equal(zero_point.T.ravel(), choice.zero_point)


BLOCKS = [each for each in BLOCK_FORMATS if has_searchable_blocks(each) and each.element.bits < 8]


@pytest.mark.parametrize("fmt", BLOCKS, ids=str)
@pytest.mark.parametrize("rule", [ScaleRule.FLOOR, ScaleRule.EVEN])
def test_blocks_count_errors_by_importance_and_keep_their_numbers(fmt, rule):
    lines = np.random.default_rng(8).standard_t(3, (40, 3 * fmt.block_size + 5))
    importance = np.random.default_rng(9).lognormal(0, 2, lines.shape[1])
    choice = BlockChoice(BlockQuantizer(fmt, rule), 1)
    scale = searched_powers(lines, importance, choice.quantizer)
    steps = quantize_dequantize((lines / scale).astype(np.float32), fmt.element)
    better = (steps * scale).astype(np.float32)
    np.testing.assert_array_equal(rounded(better, choice), better)
    plain = rounded(lines.astype(np.float32), choice)
    before, after = (np.square(each - lines) * importance for each in (plain, better))
    starts = range(0, lines.shape[1], fmt.block_size)
    before, after = (np.add.reduceat(each, starts, axis=1) for each in (before, after))
    assert (after <= before * (1 + 1e-6)).all()
    assert after.sum() <= before.sum()
