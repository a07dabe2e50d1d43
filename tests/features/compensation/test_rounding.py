"""The algebra of compensation: what is left after a column is rounded is the least squares solution."""

from __future__ import annotations

import numpy as np
import pytest

from quark.features.compensation.rounding import best_weights, compensated, squared_error

TINY = 1e-9  # damping


def inputs(columns: int, rows: int = 200, groups: int = 1, seed: int = 0) -> np.ndarray:
    """Rows whose numbers vary together, [groups, rows, columns]."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(groups, columns, columns))
    return rng.normal(size=(groups, rows, columns)) @ mix + 0.5


def gram(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(1, 2) @ x


def to_tenths(values, columns):
    return np.round(values, 1)


def apart(columns: int, size: int = 4) -> list[np.ndarray]:
    return [np.arange(start, min(start + size, columns)) for start in range(0, columns, size)]


def test_what_need_not_be_rounded_stays():
    weights = np.random.default_rng(1).normal(size=(2, 3, 10))
    inner = gram(inputs(10, groups=2))
    for is_joint in (False, True):
        found = compensated(weights, inner, apart(10), lambda values, of: values, TINY, is_joint=is_joint)
        np.testing.assert_allclose(found, weights, atol=1e-9)


@pytest.mark.parametrize("first", [1, 3])
def test_the_columns_that_are_left_are_the_least_squares_solution(first):
    x = inputs(8)[0]
    weights = np.random.default_rng(2).normal(size=(1, 2, 8))

    def rounded_at_first(values, of):
        return np.where(of < first, np.round(values), values)

    found = compensated(weights, gram(x[None]), apart(8), rounded_at_first, TINY, is_joint=False)[0]
    np.testing.assert_array_equal(found[:, :first], np.round(found[:, :first]))
    np.testing.assert_array_equal(found[:, 0], np.round(weights[0, :, 0]))
    target = x @ weights[0].T - x[:, :first] @ found[:, :first].T
    solution = np.linalg.lstsq(x[:, first:], target, rcond=None)[0].T
    np.testing.assert_allclose(found[:, first:], solution, atol=1e-6)


def test_units_are_a_matter_of_speed_where_columns_round_by_themselves():
    weights = np.random.default_rng(3).normal(size=(3, 4, 11))
    inner = gram(inputs(11, groups=3))
    found = [
        compensated(weights, inner, apart(11, size), to_tenths, 0.01, is_joint=is_joint)
        for size, is_joint in ((1, False), (4, False), (11, False), (4, True))
    ]
    for each in found[1:]:
        np.testing.assert_allclose(each, found[0], atol=1e-9)


def test_the_error_falls_and_inputs_that_do_not_vary_together_change_nothing():
    weights = np.random.default_rng(4).normal(size=(1, 16, 24))
    inner = gram(inputs(24))
    found = compensated(weights, inner, apart(24), to_tenths, 0.01, is_joint=False)
    before = squared_error(weights - np.round(weights, 1), inner)
    assert squared_error(weights - found, inner).sum() < 0.6 * before.sum()
    alone = compensated(weights, np.eye(24)[None], apart(24), to_tenths, 0.01, is_joint=False)
    np.testing.assert_array_equal(alone, np.round(weights, 1))


def test_a_block_is_made_up_for_by_the_values_that_it_ends_with():
    """A rounding whose step depends on the whole block: columns behind it see what was stored."""
    weights = np.random.default_rng(5).normal(size=(1, 5, 12))
    x = inputs(12)[0]

    def by_largest(values, of):
        if of[0] >= 4:
            return values  # only the first block is rounded
        step = 2.0 ** np.floor(np.log2(np.abs(values).max(axis=2, keepdims=True))) / 4
        return np.round(values / step) * step

    found = compensated(weights, gram(x[None]), apart(12), by_largest, TINY, is_joint=True)[0]
    target = x @ weights[0].T - x[:, :4] @ found[:, :4].T
    solution = np.linalg.lstsq(x[:, 4:], target, rcond=None)[0].T
    np.testing.assert_allclose(found[:, 4:], solution, atol=1e-6)


def test_an_input_that_is_always_zero_does_no_harm():
    x = inputs(6)
    x[:, :, 2] = 0
    weights = np.random.default_rng(6).normal(size=(1, 3, 6))
    found = compensated(weights, gram(x), apart(6), to_tenths, 0.01, is_joint=False)
    np.testing.assert_array_equal(found[:, :, 2], np.round(weights[:, :, 2], 1))
    assert np.isfinite(compensated(weights, np.zeros((1, 6, 6)), apart(6), to_tenths, 0.01, is_joint=False)).all()


def test_the_best_weights_undo_what_rounding_did_to_the_inputs():
    x = inputs(5)
    seen = 1.25 * x  # rounded inputs that are too large by a quarter
    weights = np.random.default_rng(7).normal(size=(1, 2, 5))
    found = best_weights(weights, gram(seen), x.swapaxes(1, 2) @ seen, 1e-12)
    np.testing.assert_allclose(found, weights / 1.25, rtol=1e-6)
    np.testing.assert_allclose(best_weights(weights, gram(x), gram(x), 0.1), weights, rtol=1e-9)
