"""The algebra of cross-layer equalization, against the formulas as published."""

from __future__ import annotations

import numpy as np
import pytest

from quark.features.equalization.scales import ChannelMagnitudes, combine, relative_to, scales_towards_mean

RANDOM = np.random.default_rng(0)


def ranges(count: int = 7) -> np.ndarray:
    return np.exp(RANDOM.normal(0, 2, count))


def test_a_pair_gets_the_geometric_mean_on_both_sides() -> None:
    r1, r2 = ranges(), ranges()
    scales = scales_towards_mean(r1, [r2])
    np.testing.assert_allclose(scales, np.sqrt(r1 * r2) / r2)
    np.testing.assert_allclose(r1 / scales, np.sqrt(r1 * r2))
    np.testing.assert_allclose(r2 * scales, np.sqrt(r1 * r2))


def test_a_triple_gets_the_cube_root() -> None:
    r1, r2, r3 = ranges(), ranges(), ranges()
    root = np.cbrt(r1 * r2 * r3)
    first = scales_towards_mean(r1, [r2, r3])
    second = scales_towards_mean(r2 * first, [r3])
    np.testing.assert_allclose(first, r1 / root)
    np.testing.assert_allclose(second, root / r3)


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_a_dead_channel_stays(bad: float) -> None:
    r1, r2 = np.array([bad, 2.0, 1.0]), np.array([3.0, bad, 4.0])
    assert scales_towards_mean(r1, [r2]).tolist() == [1.0, 1.0, 0.5]


def test_one_tensor_alone_keeps_its_ranges() -> None:
    only = ranges()
    np.testing.assert_array_equal(combine([only]), only)
    np.testing.assert_array_equal(combine([only, np.zeros_like(only)]), only)
    assert not combine([np.zeros(3), np.zeros(3)]).any()


def test_tensors_count_alike_whatever_their_level() -> None:
    a, b = ranges(), ranges()
    together, scaled = combine([a, b]), combine([100 * a, b])
    np.testing.assert_allclose(scaled, 10 * together)
    np.testing.assert_allclose(together / together.max(), np.maximum(a / a.max(), b / b.max()))


def test_ranges_are_taken_beside_what_is_held() -> None:
    found = np.array([1.0, 8.0, 4.0])
    assert relative_to(np.array([True, False, True]), found).tolist() == [0.25, 2.0, 1.0]
    assert relative_to(np.zeros(3, bool), found) is found


def test_magnitudes_follow_the_weight_as_it_is_scaled() -> None:
    weight = RANDOM.normal(size=(2, 3, 4))
    divisors, factors = ranges(6), ranges(8)
    magnitudes = ChannelMagnitudes(np.abs(weight))
    magnitudes.multiply_inputs(factors)
    magnitudes.divide_outputs(divisors)
    scaled = np.abs(weight * magnitudes.multiplied.reshape(2, 1, 4) / magnitudes.divided.reshape(2, 3, 1))
    np.testing.assert_allclose(magnitudes.of_outputs(), scaled.max(axis=2).reshape(-1))
    np.testing.assert_allclose(magnitudes.of_inputs(), scaled.max(axis=1).reshape(-1))
