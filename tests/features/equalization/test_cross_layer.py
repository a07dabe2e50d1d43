"""Which scales equalization chooses, what it leaves alone, and what it says about both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from equalized_networks import assert_same, equalized, model_of, of_inputs, of_outputs, weights
from onnx_models import Net, random_feed, with_if

from quark.features.equalization.options import CrossLayerOptions

PLAIN = CrossLayerOptions(weight_threshold=0.0, has_appended_bias=False)

# --- which scales


def pair(net: Net) -> str:
    return net.conv(net.node("Relu", net.conv("x", (4, 6))), (6, 5))


def test_a_pair_meets_at_the_geometric_mean() -> None:
    before = model_of(pair)
    after, _ = equalized(before, PLAIN)
    mean = np.sqrt(of_outputs(weights(before)[0]) * of_inputs(weights(before)[1]))
    np.testing.assert_allclose(of_outputs(weights(after)[0]), mean, rtol=1e-5)
    np.testing.assert_allclose(of_inputs(weights(after)[1]), mean, rtol=1e-5)


def test_a_depthwise_triple_meets_at_the_cube_root_in_one_step() -> None:
    def build(net: Net) -> str:
        y = net.conv(net.node("Relu", net.conv("x", (4, 6))), (6, 6), group=6)
        return net.conv(net.node("Relu", y), (6, 5))

    before = model_of(build)
    after, facts = equalized(before, PLAIN)
    first, depthwise, last = weights(before)
    mean = np.cbrt(of_outputs(first) * of_outputs(depthwise) * of_inputs(last))
    first, depthwise, last = weights(after)
    for value in (of_outputs(first), of_outputs(depthwise), of_inputs(last)):
        np.testing.assert_allclose(value, mean, rtol=1e-5)
    assert len(facts.changed) == 2


def test_the_account_names_the_layers_and_the_scales() -> None:
    _, facts = equalized(model_of(pair), PLAIN)
    assert facts.name == "cross-layer equalization"
    assert len(facts.changed) == 1
    assert facts.changed[0].startswith("conv0 -> conv2: 6 channels, scales 0.")
    assert [(each.node, each.op_type) for each in facts.left] == [("conv2", "Conv")]
    assert "'y' is an output of the graph" in facts.left[0].reason


def test_a_bias_counts_in_its_channel_when_asked() -> None:
    def build(net: Net) -> str:
        bias = net.constant(np.array([0, 0, 100, 0, 0, 0], np.float32))
        y = net.node("Relu", net.node("Conv", "x", net.weight(6, 4, 1, 1), bias))
        return net.conv(y, (6, 5), 1)

    before = model_of(build)
    without, counted = (
        equalized(before, CrossLayerOptions(weight_threshold=0, has_appended_bias=has))[0] for has in (False, True)
    )
    smaller = of_outputs(weights(counted)[0]) < 0.5 * of_outputs(weights(without)[0])
    assert smaller.tolist() == [False, False, True, False, False, False]


def test_channels_below_the_threshold_stay() -> None:
    before = model_of(pair)
    after, facts = equalized(before, CrossLayerOptions(weight_threshold=1000.0))
    assert facts.changed == ()
    assert "as even as they can be" in facts.left[-1].reason
    untouched, no_steps = equalized(before, CrossLayerOptions(steps=0))
    assert after.graph.SerializeToString() == untouched.graph.SerializeToString()
    assert "CLESteps is 0" in no_steps.left[-1].reason


def test_more_steps_come_to_rest() -> None:
    def build(net: Net) -> str:
        y = net.conv("x", (4, 6), 1)
        for _ in range(3):
            y = net.conv(net.node("Relu", y), (6, 6), 1)
        return y

    before = model_of(build)
    after, _ = equalized(before, CrossLayerOptions(steps=-1, weight_threshold=0.0))
    again, _ = equalized(after, CrossLayerOptions(steps=1, weight_threshold=0.0))
    for now, later in zip(weights(after), weights(again), strict=True):
        np.testing.assert_allclose(later, now, rtol=1e-4)
    once, _ = equalized(before, CrossLayerOptions(weight_threshold=0.0))
    assert any(not np.allclose(a, b, rtol=1e-3) for a, b in zip(weights(once), weights(after), strict=True))
    assert_same(before, after, random_feed(before))


# --- what is left


def sigmoid(net: Net) -> str:
    return net.conv(net.node("Sigmoid", net.conv("x", (4, 6))), (6, 5))


def gate(net: Net) -> str:
    y = net.conv("x", (4, 6))
    return net.conv(net.node("Mul", y, net.conv("x", (4, 6))), (6, 5))


def input_stream(net: Net) -> str:
    return net.conv(net.node("Add", "x", net.conv("x", (4, 4), 1)), (4, 5))


def joined(net: Net) -> str:
    y = net.node("Concat", net.conv("x", (4, 3), 1), net.conv("x", (4, 3), 1), axis=1)
    return net.conv(y, (6, 5))


def shuffled(net: Net) -> str:
    y = net.node("Reshape", net.conv("x", (4, 6), 1), net.integers([2, 3, 2, 64]))
    y = net.node("Reshape", net.node("Transpose", y, perm=[0, 2, 1, 3]), net.integers([2, 6, 8, 8]))
    return net.conv(y, (6, 5))


def number_for_all(net: Net) -> str:
    return net.conv(net.node("Add", net.conv("x", (4, 6)), net.constant(3.0)), (6, 5))


def broadcast(net: Net) -> str:
    return net.conv(net.node("Add", net.conv("x", (4, 6), 1), net.conv("x", (4, 1), 1)), (6, 5))


def padded_with_ones(net: Net) -> str:
    y = net.node("Pad", net.conv("x", (4, 6)), net.integers([0, 0, 1, 1, 0, 0, 1, 1]), net.constant(1.0))
    return net.conv(y, (6, 5))


def padded_channels(net: Net) -> str:
    return net.conv(net.node("Pad", net.conv("x", (4, 6)), net.integers([0, 1, 0, 0, 0, 1, 0, 0])), (8, 5))


def mean_of_channels(net: Net) -> str:
    return net.conv(net.reduce("ReduceMean", net.conv("x", (4, 6)), [1]), (1, 5))


def weight_read_elsewhere(net: Net) -> str:
    weight = net.weight(6, 4, 1, 1)
    y = net.conv(net.node("Relu", net.node("Conv", "x", weight)), (6, 5), 1)
    return net.node("Add", y, net.reduce("ReduceMean", net.node("Abs", weight), [0, 1, 2, 3]))


def weight_read_in_two_ways(net: Net) -> str:
    weight = net.weight(6, 6, 1, 1)
    y = net.node("Relu", net.node("Conv", net.node("Concat", "x", "x", axis=1), net.weight(6, 8, 1, 1)))
    y = net.node("Add", net.node("Conv", y, weight), net.node("ConvTranspose", net.node("Neg", y), weight))
    return net.conv(net.node("Sigmoid", y), (6, 5))


def computed_bias(net: Net) -> str:
    bias = net.node(
        "Reshape", net.reduce("ReduceMean", net.node("Concat", "x", "x", axis=1), [0, 2, 3]), net.integers([8])
    )
    return net.conv(net.node("Conv", "x", net.weight(8, 4, 1, 1), bias), (8, 5))


def negative_clip(net: Net) -> str:
    return net.conv(net.node("Clip", net.conv("x", (4, 6)), net.constant(-1.0), net.constant(1.0)), (6, 5))


def computed_clip(net: Net) -> str:
    top = net.node("ReduceMax", "x", keepdims=0)
    return net.conv(net.node("Clip", net.conv("x", (4, 6)), net.constant(0.0), top), (6, 5))


LEFT: dict[Callable[[Net], str], str] = {
    sigmoid: "Sigmoid does not commute",
    gate: "Mul of two activations",
    input_stream: "'x' is an input of the graph",
    joined: "Concat joins channels",
    shuffled: "mixes",
    number_for_all: "no such channels",
    broadcast: "no such channels",
    padded_with_ones: "other than zeros",
    padded_channels: "Pad adds channels",
    mean_of_channels: "goes over the channels",
    weight_read_elsewhere: "its weight is also read by",
    weight_read_in_two_ways: "its weight is also read by",
    computed_bias: "its bias is not constant",
    negative_clip: "Clip from -1 to 1",
    computed_clip: "a bound that is not constant",
}


@pytest.mark.parametrize("build", LEFT, ids=lambda build: build.__name__)
def test_is_left_with_the_reason(build: Callable[[Net], str]) -> None:
    before = model_of(build)
    untouched, _ = equalized(before, CrossLayerOptions(steps=0))
    after, facts = equalized(before, PLAIN)
    assert facts.changed == ()
    assert any(LEFT[build] in each.reason for each in facts.left), facts.left
    assert after.graph.SerializeToString() == untouched.graph.SerializeToString()


def test_what_a_branch_reads_is_left() -> None:
    _, facts = equalized(with_if(), PLAIN)
    assert facts.changed == ()
    assert [each.node for each in facts.left] == ["conv0"]


def test_a_model_without_layers_has_nothing_to_do() -> None:
    _, facts = equalized(model_of(lambda net: net.node("Relu", "x")), PLAIN)
    assert (facts.changed, facts.left) == ((), ())
