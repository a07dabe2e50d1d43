"""The algebra of compensation: what is left after a column is rounded is the least squares solution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quark.features.compensation import rounding
from quark.features.compensation.rounding import (
    Grid,
    Root,
    compensated,
    compensated_power,
    descended,
    fitted_scales,
    squared_error,
)

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


def rounded_for(weights: np.ndarray, inner: np.ndarray, grid: Grid, damping: float) -> np.ndarray:
    return compensated(weights, Root.of(inner, grid.order, damping), grid)


def test_what_need_not_be_rounded_stays():
    weights = np.random.default_rng(1).normal(size=(2, 3, 10))
    inner = gram(inputs(10, groups=2))
    for is_joint in (False, True):
        found = rounded_for(weights, inner, Grid(lambda values, of: values, apart(10), is_joint=is_joint), TINY)
        np.testing.assert_allclose(found, weights, atol=1e-9)


@pytest.mark.parametrize("first", [1, 3])
def test_the_columns_that_are_left_are_the_least_squares_solution(first):
    x = inputs(8)[0]
    weights = np.random.default_rng(2).normal(size=(1, 2, 8))

    def rounded_at_first(values, of):
        return np.where(of < first, np.round(values), values)

    found = rounded_for(weights, gram(x[None]), Grid(rounded_at_first, apart(8), is_joint=False), TINY)[0]
    np.testing.assert_array_equal(found[:, :first], np.round(found[:, :first]))
    np.testing.assert_array_equal(found[:, 0], np.round(weights[0, :, 0]))
    target = x @ weights[0].T - x[:, :first] @ found[:, :first].T
    solution = np.linalg.lstsq(x[:, first:], target, rcond=None)[0].T
    np.testing.assert_allclose(found[:, first:], solution, atol=1e-6)


def test_units_are_a_matter_of_speed_where_columns_round_by_themselves():
    weights = np.random.default_rng(3).normal(size=(3, 4, 11))
    inner = gram(inputs(11, groups=3))
    found = [
        rounded_for(weights, inner, Grid(to_tenths, apart(11, size), is_joint=is_joint), 0.01)
        for size, is_joint in ((1, False), (4, False), (11, False), (4, True))
    ]
    for each in found[1:]:
        np.testing.assert_allclose(each, found[0], atol=1e-9)


def test_the_error_falls_and_inputs_that_do_not_vary_together_change_nothing():
    weights = np.random.default_rng(4).normal(size=(1, 16, 24))
    inner = gram(inputs(24))
    found = rounded_for(weights, inner, Grid(to_tenths, apart(24), is_joint=False), 0.01)
    before = squared_error(weights - np.round(weights, 1), inner)
    assert squared_error(weights - found, inner).sum() < 0.6 * before.sum()
    alone = rounded_for(weights, np.eye(24)[None], Grid(to_tenths, apart(24), is_joint=False), 0.01)
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

    found = rounded_for(weights, gram(x[None]), Grid(by_largest, apart(12), is_joint=True), TINY)[0]
    target = x @ weights[0].T - x[:, :4] @ found[:, :4].T
    solution = np.linalg.lstsq(x[:, 4:], target, rcond=None)[0].T
    np.testing.assert_allclose(found[:, 4:], solution, atol=1e-6)


def test_an_input_that_is_always_zero_does_no_harm():
    x = inputs(6)
    x[:, :, 2] = 0
    weights = np.random.default_rng(6).normal(size=(1, 3, 6))
    found = rounded_for(weights, gram(x), Grid(to_tenths, apart(6), is_joint=False), 0.01)
    np.testing.assert_array_equal(found[:, :, 2], np.round(weights[:, :, 2], 1))
    assert np.isfinite(rounded_for(weights, np.zeros((1, 6, 6)), Grid(to_tenths, apart(6), is_joint=False), 0.01)).all()


def test_the_best_weights_undo_what_rounding_did_to_the_inputs():
    x = inputs(5)
    seen = 1.25 * x  # rounded inputs that are too large by a quarter
    weights = np.random.default_rng(7).normal(size=(1, 2, 5))
    order = np.random.default_rng(1).permutation(seen.shape[-1])
    found = Root.of(gram(seen), order, 1e-12).best_weights(weights, x.swapaxes(1, 2) @ seen)
    np.testing.assert_allclose(found, weights / 1.25, rtol=1e-6)
    np.testing.assert_allclose(Root.of(gram(x), order, 0.1).best_weights(weights, gram(x)), weights, rtol=1e-9)


def test_going_down_column_by_column_ends_where_no_single_change_helps() -> None:
    rng = np.random.default_rng(7)
    weights, x = rng.standard_normal((1, 3, 20)), rng.standard_normal((1, 60, 20)) @ rng.standard_normal((20, 20))
    inner = gram(x)
    start = to_tenths(weights, np.arange(20))
    found = descended(weights, start, inner, to_tenths, sweeps=50)
    least = squared_error(weights - found, inner)
    assert (least < squared_error(weights - start, inner)).all()
    for column in range(20):
        for step in (-0.1, 0.1):
            other = found.copy()
            other[:, :, column] += step
            assert (squared_error(weights - other, inner) >= least - 1e-12).all()


def test_fitted_scales_are_the_least_squares_solution() -> None:
    rng = np.random.default_rng(8)
    x = rng.standard_normal((40, 10)) @ rng.standard_normal((10, 10))
    codes = rng.integers(-7, 8, (3, 10)).astype(float)
    scales = rng.random((3, 3)) + 0.5
    weights = codes * np.repeat(scales, 4, axis=1)[:, :10]
    assert np.allclose(fitted_scales(weights, codes, x.T @ x, 4), scales)
    codes[1, 4:8] = 0
    assert np.isnan(fitted_scales(weights, codes, x.T @ x, 4)[1, 1])


def test_what_a_single_error_costs_when_others_make_up_for_it() -> None:
    x = np.random.default_rng(9).standard_normal((30, 6))
    inner = gram(x[None])
    others = np.arange(1, 6)
    left = x[:, 0] - x[:, others] @ np.linalg.lstsq(x[:, others], x[:, 0], rcond=None)[0]
    assert np.isclose(compensated_power(inner)[0, 0], left @ left * inner[0, 0, 0] / (x[:, 0] @ x[:, 0]))


def test_float32_gives_nearly_what_float64_gives() -> None:
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(600, 90)) @ rng.normal(size=(90, 90)) + 1
    inner = (rows.T @ rows)[None]
    exact, found = (Root.of(value, np.arange(90), 0.01).upper for value in (inner, inner.astype(np.float32)))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, atol=2e-3 * np.abs(exact).max())


def test_a_matrix_that_float32_is_too_coarse_for_has_a_root() -> None:
    rows = np.random.default_rng(5).integers(-9, 10, size=(5, 300)).astype(np.float32)
    inner = (rows.T @ rows)[None]  # exact, of rank 5
    with pytest.raises(np.linalg.LinAlgError):
        np.linalg.cholesky(inner + np.float32(1e-6) * np.eye(300, dtype=np.float32))
    upper = Root.of(inner, np.arange(300), 1e-6).upper
    assert upper.dtype == np.float32
    assert np.isfinite(upper).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("columns", [33, 64, 90])
def test_large_matrices_are_factored_by_halves(monkeypatch: pytest.MonkeyPatch, columns: int, dtype: Any) -> None:
    rng = np.random.default_rng(6)
    rows = rng.normal(size=(2, 4 * columns, columns)).astype(dtype)
    inner = rows.swapaxes(1, 2) @ rows
    kept = inner.copy()
    whole = Root.of(inner, np.arange(columns), 0.01).upper
    monkeypatch.setattr(rounding, "WHOLE", 16)
    monkeypatch.setattr(rounding, "COLUMNS_AT_ONCE", 7)
    halves = Root.of(inner, np.arange(columns), 0.01).upper
    np.testing.assert_array_equal(inner, kept)
    np.testing.assert_allclose(halves, whole, atol=1e-5 * np.abs(whole).max() if dtype == np.float32 else 1e-12)
    assert not np.tril(halves, -1).any()


def test_a_large_matrix_without_a_factor_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "WHOLE", 16)
    with pytest.raises(np.linalg.LinAlgError):
        Root.of(-np.eye(40)[None], np.arange(40), 0.01)
