"""The damping of a language model's layers is chosen on rows that the weights were not moved by."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from quark.features.compensation.on_language import DAMPING_FACTORS, chosen_damping
from quark.features.compensation.options import LanguageCompensationOptions
from quark.torch.language.input_sums import Array, InputSums

COLUMNS, HELD = 32, 64
OPTIONS = LanguageCompensationOptions(float_share=1.0)


def sums_of(rows: int) -> tuple[InputSums, Array, Array]:
    """Inputs x, and z, which is x with some noise; the last rows are held."""
    random = np.random.default_rng(0)
    exact = random.standard_normal((rows + HELD, COLUMNS))
    seen = exact + 0.5 * random.standard_normal(exact.shape)
    count = len(seen)
    held = (exact[rows:].astype(np.float32), seen[rows:].astype(np.float32))
    inner, cross = seen.T @ seen / count, exact.T @ seen / count
    return InputSums(inner, cross, np.abs(seen).mean(0), np.abs(seen).max(0), count, held), exact, seen


def test_few_rows_are_damped_more_than_many() -> None:
    weight = np.random.default_rng(1).standard_normal((16, COLUMNS))
    few, many = (chosen_damping(weight, sums_of(rows)[0], OPTIONS) for rows in (40, 20_000))
    assert few == DAMPING_FACTORS[-1] * OPTIONS.damping
    assert many < few


def test_without_held_rows_the_damping_is_that_of_the_options() -> None:
    sums, _, _ = sums_of(40)
    alone = InputSums(sums.inner, sums.cross, sums.magnitudes, sums.largest, sums.count)
    assert alone.without_held() is alone
    assert chosen_damping(np.eye(COLUMNS), alone, OPTIONS) == OPTIONS.damping


def test_held_rows_leave_the_sums_of_the_others() -> None:
    sums, exact, seen = sums_of(100)
    rest = sums.without_held()
    assert (rest.count, rest.held) == (100, None)
    np.testing.assert_allclose(rest.inner, seen[:100].T @ seen[:100] / 100, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rest.cross, exact[:100].T @ seen[:100] / 100, rtol=1e-5, atol=1e-5)
