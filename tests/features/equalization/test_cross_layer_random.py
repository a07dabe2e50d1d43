"""Networks put together at random keep their function, whatever of them is equalized."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from equalized_networks import UnevenNet, assert_same, equalized, extremes_of
from onnx_models import Net, random_feed

from quark.features.equalization.options import ClipTreatment, CrossLayerOptions

SAME_SHAPE: tuple[Callable[[Net, str, int], str], ...] = (
    lambda net, y, c: net.node("Relu", y),
    lambda net, y, c: net.node("LeakyRelu", y, alpha=0.3),
    lambda net, y, c: net.node("Clip", y, net.constant(0.0), net.constant(float(net.random.choice([0.5, 3, 1000])))),
    lambda net, y, c: net.node("Sigmoid", y),
    lambda net, y, c: net.node("MaxPool", y, kernel_shape=[3, 3], pads=[1] * 4),
    lambda net, y, c: net.node("AveragePool", y, kernel_shape=[3, 3], pads=[1] * 4),
    lambda net, y, c: net.node("Mul", y, net.weight(c, 1, 1)),
    lambda net, y, c: net.node("Add", y, net.weight(1, c, 1, 1)),
    lambda net, y, c: net.node("Min", y, net.weight(1, c, 1, 1)),
    lambda net, y, c: net.conv(y, (c, c), group=c, pads=[1] * 4),
    lambda net, y, c: net.node("Concat", *[net.node("Slice", y, *map(net.integers, ([4], [8], [2])))] * 2, axis=2),
)


def convolution(net: Net, y: str, channels: int) -> tuple[str, int]:
    out = int(net.random.choice([2, 4, 6]))
    group = int(net.random.choice([1, 2]))
    op_type = str(net.random.choice(["Conv", "ConvTranspose"]))
    return net.conv(y, (channels, out), 1, group=group, op_type=op_type, has_bias=bool(net.random.integers(2))), out


def random_network(seed: int) -> onnx.ModelProto:
    """A dozen operators; each reads the last tensor or an earlier one, and some bring two of a shape together."""
    net = UnevenNet(17, seed)
    made = [(net.input("x", (2, 4, 8, 8)), 4)]
    shared = {channels: net.weight(channels, channels, 1, 1) for channels in (2, 4, 6)}
    for _ in range(12):
        y, channels = made[-1] if net.random.random() < 0.7 else made[net.random.integers(len(made))]
        kind = net.random.random()
        if kind < 0.35:
            y, channels = convolution(net, y, channels)
        elif kind < 0.45:
            y = net.node("Conv", y, shared[channels])
        elif kind < 0.6:
            like = [name for name, count in made if count == channels]
            y = net.node(str(net.random.choice(["Add", "Sub", "Max"])), y, str(net.random.choice(like)))
        else:
            y = SAME_SHAPE[net.random.integers(len(SAME_SHAPE))](net, y, channels)
        made.append((y, channels))
    y, channels = made[-1]
    return net.model(net.node("Neg", net.conv(y, (channels, 3), 1), output="y"))


@pytest.mark.parametrize("clip", ClipTreatment)
def test_the_function_stays(clip: ClipTreatment) -> None:
    changed = 0
    for seed in range(40):
        before = random_network(seed)
        feed = random_feed(before)
        options = CrossLayerOptions(
            steps=1 + seed % 3, weight_threshold=0.0, clip=clip, has_bias_absorption=seed % 2 == 0
        )
        after, facts = equalized(before, options, extremes_of(before, options, feed))
        assert_same(before, after, feed)
        changed += len(facts.changed)
    assert changed > 40


def test_equalizing_twice_changes_little_more() -> None:
    options = CrossLayerOptions(steps=-1, weight_threshold=0.0, clip=ClipTreatment.SKIP)
    for seed in range(10):
        once, _ = equalized(random_network(seed), options)
        twice, _ = equalized(once, options)
        for a, b in zip(once.graph.initializer, twice.graph.initializer, strict=True):
            first, second = onnx.numpy_helper.to_array(a), onnx.numpy_helper.to_array(b)
            np.testing.assert_allclose(second, first, rtol=1e-3, atol=1e-6)
