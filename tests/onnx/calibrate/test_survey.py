"""Statistics of channels over the samples, against numpy."""

from __future__ import annotations

import time

import numpy as np
import onnx_ir as ir
import pytest
from onnx_models import Net

from quark.errors import InvalidValueError
from quark.onnx.calibrate import ChannelExtremes, FloatRunner, survey, survey_together
from quark.onnx.data import input_infos, open_samples

DATA = np.random.default_rng(2).standard_normal((9, 1, 3, 4, 4)).astype(np.float32)


def relu_model() -> ir.Model:
    net = Net()
    x = net.input("x", (1, 3, 4, 4))
    return ir.serde.deserialize_model(net.model(net.node("Relu", x, output="y")))


@pytest.mark.parametrize("limit", [None, 1, 3, 8, 100])
def test_extremes_are_those_of_the_samples_that_are_looked_at(limit: int | None) -> None:
    model = relu_model()
    samples = open_samples(list(DATA), input_infos(model), count=8)
    seen = [i * 8 // min(limit or 8, 8) for i in range(min(limit or 8, 8))]
    with FloatRunner(model, ["x", "y"]) as runner:
        found = survey(runner, {"x": ChannelExtremes(1), "y": ChannelExtremes(-3)}, samples, sample_limit=limit)
    for name, values in (("x", DATA[seen]), ("y", np.maximum(DATA[seen], 0))):
        np.testing.assert_array_equal(found[name].lowest, values.min(axis=(0, 1, 3, 4)))
        np.testing.assert_array_equal(found[name].highest, values.max(axis=(0, 1, 3, 4)))
        np.testing.assert_array_equal(found[name].reach, np.abs(values).max(axis=(0, 1, 3, 4)))


class Seen:
    """The arrays of every sample, in the order in which they were shown."""

    is_mergeable = False

    def __init__(self) -> None:
        self.samples: list[list[np.ndarray]] = [[]]

    def observe(self, x: np.ndarray) -> None:
        time.sleep(0.001 * (len(self.samples) % 3))  # so that workers overtake each other if nothing holds them back
        self.samples[-1].append(np.array(x))

    def end_of_sample(self) -> None:
        self.samples.append([])

    def merge(self, other: Seen) -> None:
        raise AssertionError("a shared statistic is not merged")


@pytest.mark.parametrize("rows", [1, 3], ids=["whole samples", "samples in pieces"])
def test_sets_of_statistics_see_their_own_samples_in_order(rows: int) -> None:
    net = Net()
    x = net.input("x", ("rows", 3, 4, 4))
    model = ir.serde.deserialize_model(net.model(net.node("Relu", x, output="y")))
    data = np.random.default_rng(3).standard_normal((9, rows, 3, 4, 4)).astype(np.float32)
    samples = open_samples(list(data), input_infos(model))
    kept = [sample["x"] for sample in samples]
    few, all_of_x, all_of_y, extremes = Seen(), Seen(), Seen(), ChannelExtremes(1)
    with FloatRunner(model, ["x", "y"]) as runner:
        sets = [({"x": few, "y": extremes}, 3 * rows), ({"x": all_of_x}, None), ({"y": all_of_y}, None)]
        survey_together(runner, sets, samples)
    some = [kept[i * len(kept) // 3] for i in range(3)]
    for value, expected in ((few, some), (all_of_x, kept), (all_of_y, [np.maximum(each, 0) for each in kept])):
        assert len(value.samples) == len(expected) + 1
        for pieces, sample in zip(value.samples, expected, strict=False):
            np.testing.assert_array_equal(np.concatenate(pieces), sample)
    np.testing.assert_array_equal(extremes.highest, np.maximum(np.concatenate(some), 0).max(axis=(0, 2, 3)))


def test_two_halves_make_a_whole() -> None:
    whole, first, second = (ChannelExtremes(2) for _ in range(3))
    whole.observe(DATA)
    first.observe(DATA[:4])
    second.observe(DATA[4:])
    first.merge(second)
    np.testing.assert_array_equal(first.lowest, whole.lowest)
    np.testing.assert_array_equal(first.highest, whole.highest)


def test_nothing_is_seen_in_an_empty_tensor() -> None:
    extremes = ChannelExtremes(1)
    extremes.observe(np.zeros((1, 3, 0, 4), np.float32))
    assert not extremes.lowest.size


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(InvalidValueError, match="NaN or Inf"):
        ChannelExtremes(1).observe(np.array([[1.0, value]], np.float32))


def test_a_channel_axis_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="axis 4"):
        ChannelExtremes(4).observe(np.zeros((1, 2), np.float32))
