"""Whether a change is kept is decided by scores, with a veto of the divergence; a collapse is never kept."""

from __future__ import annotations

import numpy as np
import pytest

from quark.compare.improvement import FEWEST_SAMPLES, OutputErrors
from quark.compare.measures import mean_divergence

RANDOM = np.random.default_rng(3)
CLASSES = frozenset({"y"})


def errors_of(exact: np.ndarray, scores: np.ndarray) -> OutputErrors:
    errors = OutputErrors()
    for row, other in zip(exact, scores, strict=True):
        errors.add({"y": row[None]}, {"y": other[None]}, CLASSES)
    return errors


def noisy(exact: np.ndarray, size: float) -> np.ndarray:
    return exact + size * RANDOM.standard_normal(exact.shape)


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 8, 16])
def test_a_collapsed_network_is_never_kept(samples: int) -> None:
    """Constant scores, scores of other samples, noise, and one sample that is right among wrong ones."""
    for _ in range(50):
        exact = 3 * RANDOM.standard_normal((samples, 10))
        before = errors_of(exact, noisy(exact, 0.3))
        broken = [np.zeros_like(exact), np.roll(exact, 1, axis=1), noisy(exact, 9.0), exact * 40]
        if samples > 2:
            broken.append(np.concatenate([exact[:1], 60 * exact[1:, ::-1]]))
        assert not any(errors_of(exact, each).is_no_worse_than(before) for each in broken)
        broken[0][0, 0] = np.nan
        assert not errors_of(exact, broken[0]).is_no_worse_than(before)


def test_one_uncertain_sample_does_not_take_back_what_is_better_everywhere() -> None:
    exact = RANDOM.standard_normal((8, 10))
    exact[:, 3] += 16.0  # the others are certain
    exact[0] = 0.0
    exact[0, :2] = 8.0, 8.01  # two classes that are as likely
    error = RANDOM.standard_normal(exact.shape)
    before, after = exact + error, exact + 0.6 * error
    before[0], after[0] = exact[0], exact[0] + np.where(np.arange(10) == 0, 1.0, 0.0)
    first, second = errors_of(exact, before), errors_of(exact, after)
    assert second.mean_divergence > 2 * first.mean_divergence
    assert second.is_no_worse_than(first)
    assert not first.is_no_worse_than(second)


def test_divergence_that_rises_on_all_samples_has_a_veto() -> None:
    before = OutputErrors([0.02] * 8, [0.01, 0.011, 0.009, 0.01] * 2)
    assert not OutputErrors([0.019] * 8, [0.02, 0.021, 0.019, 0.022] * 2).is_no_worse_than(before)
    assert OutputErrors([0.019] * 8, [0.01, 0.012, 0.011, 0.009] * 2).is_no_worse_than(before)
    few = FEWEST_SAMPLES - 1  # too few to know what chance explains
    assert OutputErrors([0.019] * few, [0.02] * few).is_no_worse_than(OutputErrors([0.02] * few, [0.01] * few))


def test_a_small_rise_is_tolerated_if_the_divergence_falls() -> None:
    before = OutputErrors([0.02] * 8, [0.02] * 8)
    assert OutputErrors([0.0205] * 8, [0.015] * 8).is_no_worse_than(before)
    assert not OutputErrors([0.0205] * 8, [0.02] * 8).is_no_worse_than(before)
    assert not OutputErrors([0.025] * 8, [0.001] * 8).is_no_worse_than(before)
    assert not OutputErrors([0.0205] * 3, [0.015] * 3).is_no_worse_than(OutputErrors([0.02] * 3, [0.02] * 3))


def test_errors_of_a_sample() -> None:
    """A shift of all scores is no error, outputs that are not scores count by their squares, and integers do not."""
    errors = OutputErrors()
    y, z = np.array([[1.0, 2.0, 4.0]]), np.array([[2.0, 3.0, 5.0]])
    wanted, found = {"y": y, "v": np.array([3.0, 4.0]), "i": np.array([1])}, {"y": z, "v": np.array([3.0, 3.0])}
    errors.add(wanted, {**found, "i": np.array([2])}, CLASSES)
    assert errors.relative == pytest.approx([0.04 / 3])
    assert errors.divergence == pytest.approx([0.04 / 3])
    errors.add({"y": y}, {"y": 2 * y}, CLASSES)
    assert errors.divergence[1] == pytest.approx(mean_divergence(y, 2 * y))
    assert errors.relative[1] == pytest.approx(1.0)
    assert OutputErrors().mean == 0.0
    assert OutputErrors().is_no_worse_than(OutputErrors())
