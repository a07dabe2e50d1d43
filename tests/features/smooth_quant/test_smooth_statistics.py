"""What is measured before smoothing, against numpy over all samples at once."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from quark.errors import InvalidValueError
from quark.features.smooth_quant.smoothing import FRESH, ChannelMoments

SHAPE = (2, 5, 3, 4)


def samples(count=6, seed=0):
    random = np.random.default_rng(seed)
    return [random.laplace(random.uniform(-1, 1), 2, SHAPE).astype(np.float32) for _ in range(count)]


def observed(arrays, axis, statistic=None):
    found = statistic or ChannelMoments(axis)
    for array in arrays:
        for piece in np.split(array, 2):  # a batch may come in pieces
            found.observe(piece)
        found.end_of_sample()
    return found


def by_channel(array, axis):
    return np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1).astype(np.float64)


@pytest.mark.parametrize("axis", [1, 2, -1, -3])
def test_moments_are_those_of_all_values(axis):
    arrays = samples()
    found = observed(arrays, axis).statistics
    lines = np.concatenate([by_channel(array, axis) for array in arrays], axis=1)
    np.testing.assert_array_equal(found.lowest, lines.min(1).astype(np.float32))
    np.testing.assert_array_equal(found.highest, lines.max(1).astype(np.float32))
    np.testing.assert_allclose(found.mean_square, np.square(lines).mean(1), rtol=1e-5)
    assert found.count == lines.shape[1]


def test_the_excess_is_by_how_much_the_largest_sample_exceeds_the_others():
    arrays = samples()
    reaches = np.sort([np.abs(by_channel(array, 1)).max(1) for array in arrays], axis=0)
    squares = np.square(reaches[-1] - reaches[-2]).sum() / np.square(reaches[-1]).sum()
    assert observed(arrays, 1).statistics.excess == pytest.approx(np.sqrt(squares / 2), rel=1e-5)


def test_a_sample_of_many_values_tells_little_more_than_one_of_a_few():
    few, many = (observed([np.ones((2, length, 3), np.float32)] * 5, -1).statistics for length in (6, 1500))
    assert (few.count, few.fresh_count) == (60, 60)
    assert (many.count, many.fresh_count) == (15000, 10 * FRESH)
    batches = observed([np.ones((8, 1500, 3), np.float32)] * 5, -1).statistics
    assert batches.fresh_count == 4 * many.fresh_count
    assert many.with_other(many).fresh_count == 2 * many.fresh_count


def test_one_sample_is_taken_for_an_exponential_law():
    found = observed(samples(1), 1).statistics
    assert found.excess == pytest.approx(1 / np.log(found.count))


def test_the_excess_predicts_what_is_met_later():
    """Of an exponential law with scale b the largest of n values is about b log(n), and the excess b."""
    random = np.random.default_rng(0)
    draws = random.exponential(1.0, (200, 50, 64)).astype(np.float32)
    found = observed(draws[:100], -1).statistics
    assert found.excess * found.reach.mean() == pytest.approx(1.0, rel=0.35)
    beyond = np.maximum(draws[100:] - found.highest, 0)
    expected = 2 * np.square(found.excess * found.reach).mean() / found.count
    assert np.square(beyond).mean() == pytest.approx(expected, rel=0.5)


@pytest.mark.parametrize("cut", [0, 1, 3, 6])
def test_halves_merge_into_the_whole(cut):
    arrays = samples()
    whole, empty = observed(arrays, 1).statistics, ChannelMoments(1)
    parts = [observed(part, 1, copy.deepcopy(empty)) for part in (arrays[:cut], arrays[cut:])]
    parts[0].merge(parts[1])
    for name in ("lowest", "highest", "mean_square", "count", "excess", "fresh_count"):
        np.testing.assert_allclose(getattr(parts[0].statistics, name), getattr(whole, name), rtol=1e-6)


def test_nothing_observed_is_nothing_known():
    moments = ChannelMoments(1)
    moments.observe(np.zeros((0, 5, 2), np.float32))
    moments.end_of_sample()
    assert moments.statistics.count == moments.statistics.reach.size == 0


def test_silent_channels_exceed_nothing():
    assert observed([np.zeros(SHAPE, np.float32)] * 3, 1).statistics.excess == 0


def test_half_precision_is_squared_in_single():
    array = np.full(SHAPE, 1000.0, np.float16)  # whose square it has no number for
    np.testing.assert_allclose(observed([array], 1).statistics.mean_square, 1e6)


def test_what_is_not_finite_is_refused():
    array = samples(1)[0]
    array[0, 0, 0, 0] = np.nan
    with pytest.raises(InvalidValueError, match="NaN or Inf"):
        observed([array], 1)


def test_quiet_channels_of_an_input_with_spikes_count_as_wide():
    """Two of 100 channels are loud in one sample only: others may be in the next one."""
    arrays = [np.full((1, 3, 100), 0.1, np.float32) for _ in range(5)]
    for array in arrays:
        array[..., 0] = 0
        array[..., 1:11] = 2.0
    arrays[2][0, 1, 50:52] = 1.9
    found = observed([np.repeat(array, 2, axis=0) for array in arrays], -1).statistics
    assert found.spikes == pytest.approx(2 / 99)
    assert found.usable_reach.tolist() == [0.0] + [2.0] * 99
    steady = observed([np.repeat(arrays[0], 2, axis=0)] * 5, -1).statistics
    assert steady.spikes == 0
    np.testing.assert_array_equal(steady.usable_reach, steady.reach)
