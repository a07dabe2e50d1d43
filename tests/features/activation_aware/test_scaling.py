"""The algebra of AWQ: scales and clipped ranges that lower the error of a layer's outputs."""

from __future__ import annotations

import numpy as np
import pytest

from quark.features.activation_aware.scaling import clipped, find_scaling, group_errors

RNG = np.random.default_rng(3)
INPUTS = RNG.standard_normal((600, 64)) * np.exp(RNG.standard_normal(64) * 1.5)
GRAM = INPUTS.T @ INPUTS
WEIGHT = RNG.standard_normal((40, 64))


def by_groups(weight, size=32, highest=7):
    """Round to nearest with the largest magnitude of every group at the highest code."""
    groups = weight.reshape(len(weight), -1, size)
    step = np.abs(groups).max(axis=2, keepdims=True) / highest
    return (np.rint(groups / np.where(step > 0, step, 1)) * step).reshape(weight.shape)


def output_error(weight, rounded):
    return np.square((rounded - weight) @ INPUTS.T).sum()


def test_scales_lower_the_error_that_is_measured_on_the_inputs():
    scaling = find_scaling([WEIGHT], np.abs(INPUTS).mean(axis=0), GRAM, by_groups)
    before = output_error(WEIGHT, by_groups(WEIGHT))
    after = output_error(WEIGHT, by_groups(WEIGHT * scaling.scales) / scaling.scales)
    assert after < 0.8 * before
    assert after / before == pytest.approx(scaling.error / scaling.error_before, rel=1e-9)
    assert np.log(scaling.scales).mean() == pytest.approx(0, abs=1e-9)


def test_layers_that_share_an_input_share_scales():
    layers = [WEIGHT, RNG.standard_normal((20, 64)) * 100]
    together = find_scaling(layers, np.abs(INPUTS).mean(axis=0), GRAM, [by_groups, by_groups])
    alone = [find_scaling([layer], np.abs(INPUTS).mean(axis=0), GRAM, by_groups) for layer in layers]
    assert together.error_before == pytest.approx(np.mean([each.error_before for each in alone]))
    assert together.error < together.error_before


def test_nothing_changes_where_nothing_is_gained():
    scaling = find_scaling([WEIGHT], np.ones(64), np.eye(64), lambda weight: weight)
    assert (scaling.scales == 1).all()
    assert (scaling.exponent, scaling.error) == (0.0, 0.0)


def test_inputs_that_are_always_zero():
    gram, magnitudes = GRAM.copy(), np.abs(INPUTS).mean(axis=0)
    gram[:, :8], gram[:8], magnitudes[:8] = 0, 0, 0
    scaling = find_scaling([WEIGHT], magnitudes, gram, by_groups)
    assert np.isfinite(scaling.scales).all()
    assert (scaling.scales > 0).all()


def test_clipping_lowers_the_error_of_every_group():
    outliers = WEIGHT.copy()
    outliers[:, ::32] *= 6
    found = clipped(outliers, GRAM, by_groups, 32)
    blocks = np.stack([GRAM[:32, :32], GRAM[32:, 32:]])
    before, after = (group_errors(by_groups(value) - outliers, blocks) for value in (outliers, found))
    assert (after <= before * (1 + 1e-9)).all()
    assert after.sum() < 0.9 * before.sum()
    assert (np.abs(found) <= np.abs(outliers)).all()
