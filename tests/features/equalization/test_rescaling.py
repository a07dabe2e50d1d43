"""What equalizing knows without a graph: sets of channels, clips, and where rearranging takes channels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quark.features.equalization.regions import CannotScaleError, Channels, through_permutation, through_shapes
from quark.features.equalization.scales import (
    ChannelMagnitudes,
    Ranges,
    Rescaling,
    chains_of,
    largest_of_pairs,
    limits_of_clip,
    share_at_work,
    sweep,
)

Array = np.ndarray[Any, Any]


def weight(seed: int, outputs: int, inputs: int) -> ChannelMagnitudes:
    rng = np.random.default_rng(seed)
    magnitudes = np.abs(rng.standard_normal((1, outputs, inputs)))
    return ChannelMagnitudes(magnitudes * np.exp(rng.normal(size=(1, outputs, 1))))


def test_a_sweep_gives_both_sides_of_a_set_the_same_ranges() -> None:
    first, second = weight(0, 6, 4), weight(1, 3, 6)
    one = Rescaling(6, Ranges([(first, None)], {second: 1}))
    assert sweep([[one]], weight_threshold=0.0) > 0
    np.testing.assert_allclose(first.of_outputs(), second.of_inputs())
    np.testing.assert_allclose(first.divided, one.scales)
    np.testing.assert_allclose(second.multiplied, one.scales)
    assert sweep([[one]], weight_threshold=0.0) == pytest.approx(0, abs=1e-9)


def test_a_chain_through_a_depthwise_layer_is_solved_at_once() -> None:
    first, last = weight(2, 5, 3), weight(3, 4, 5)
    middle = ChannelMagnitudes(np.abs(np.random.default_rng(4).standard_normal((5, 1, 1))))
    before = Rescaling(5, Ranges([(first, None)], {middle: 1}))
    behind = Rescaling(5, Ranges([(middle, None)], {last: 1}))
    chains = chains_of([before, behind], {before: behind})
    assert chains == [[before, behind]]
    sweep(chains, weight_threshold=0.0)
    np.testing.assert_allclose(first.of_outputs(), middle.of_outputs())
    np.testing.assert_allclose(middle.of_outputs(), last.of_inputs())


def test_a_ring_of_sets_has_no_start_and_loses_none() -> None:
    one, other = (Rescaling(2, Ranges([(weight(seed, 2, 2), None)], {weight(seed + 1, 2, 2): 1})) for seed in (0, 2))
    chains = chains_of([one, other], {one: other, other: one})
    assert chains == [[one], [other]]


def test_scales_stay_within_their_limits_and_held_channels_where_they_are() -> None:
    first, second = weight(5, 6, 4), weight(6, 3, 6)
    one = Rescaling(6, Ranges([(first, None)], {second: 1}))
    one.limit(np.array([1.0, 0.9, 0.9, 0.9, 0.9, 0.9]), np.array([1.0, 1.1, 1.1, 1.1, 1.1, 1.1]))
    sweep([[one]], weight_threshold=0.0)
    assert one.scales[0] == 1
    assert ((one.scales >= 0.9) & (one.scales <= 1.1)).all()


def test_a_type_of_few_bits_leaves_little_room() -> None:
    ranges = Ranges([(weight(7, 2, 2), None)], {weight(8, 2, 2): 1}, type_name="float16", largest=65504.0)
    one = Rescaling(2, ranges)
    one.scale(np.array([1e9, 1e-9]))
    np.testing.assert_allclose(one.scales, [32, 1 / 32])


def test_small_channels_are_left_below_the_threshold() -> None:
    one = Rescaling(2, Ranges([(ChannelMagnitudes(np.array([[[0.1], [4.0]]])), None)], {weight(9, 2, 2): 1}))
    behind = one.sink_ranges()
    sweep([[one]], weight_threshold=float(behind[0]) + 0.2)
    assert one.scales[0] == 1
    assert one.scales[1] != 1


@pytest.mark.parametrize("rest", [1, 5])
def test_the_largest_of_each_pair(rest: int) -> None:
    array = np.random.default_rng(1).standard_normal((2, 3, 4, rest))
    np.testing.assert_array_equal(largest_of_pairs(array), np.abs(array).max(axis=3))


def test_a_clip_holds_what_reaches_it_and_keeps_the_rest_below() -> None:
    bottom, top = np.array([-1.0, -1.0, -4.0]), np.array([6.0, 3.0, -1.0])
    lowest, highest = limits_of_clip(bottom, top, 6.0)
    assert (lowest[0], highest[0]) == (1, 1)
    assert lowest[1] == pytest.approx((3 + 0.4) / 6)  # and a tenth of its range to spare
    assert lowest[2] == 0
    assert np.isinf(highest[1:]).all()
    assert share_at_work(top, 6.0) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("before", "after", "width"),
    [([None, 6, 4, 4], [None, 6, 16], 1), ([None, 6, 4, 4], [None, 96], 16), ([2, 6, 1, 1], [2, 6], 1)],
)
def test_channels_through_a_reshape_and_back(before: list[int | None], after: list[int | None], width: int) -> None:
    ends = through_shapes(before, after, Channels(1), True, "Reshape")
    assert ends == (Channels(1), Channels(1, width))
    assert through_shapes(before, after, ends[1], False, "Reshape") == ends


@pytest.mark.parametrize(
    ("before", "after", "axis"),
    [
        ([None, 6, 4], [None, 8, 3], 1),
        ([None, 6, 4], [None, 24], 2),
        ([None, 6, None], [None, 24], 1),
        (None, [1, 2], 1),
    ],
)
def test_a_reshape_that_mixes_channels_is_refused(before: Any, after: Any, axis: int) -> None:
    with pytest.raises(CannotScaleError, match="Reshape mixes"):
        through_shapes(before, after, Channels(axis), True, "Reshape")


def test_channels_through_a_permutation_and_back() -> None:
    assert through_permutation([0, 2, 3, 1], Channels(1), True, "Transpose") == (Channels(1), Channels(3))
    assert through_permutation([0, 2, 3, 1], Channels(3), False, "Transpose") == (Channels(1), Channels(3))
    with pytest.raises(CannotScaleError, match="unknown rank"):
        through_permutation([], Channels(1), True, "Transpose")
