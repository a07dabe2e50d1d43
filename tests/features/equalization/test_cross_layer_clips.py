"""Equalization through Clips in its three ways, and the absorption of biases."""

from __future__ import annotations

from collections import Counter

import numpy as np
from equalized_networks import assert_same, equalized, extremes_of, model_of, of_outputs, weights
from onnx_models import Net, random_feed

from quark.features.equalization.on_onnx import tensors_to_survey as clip_tensors
from quark.features.equalization.options import ClipTreatment, CrossLayerOptions
from quark.onnx.load import load

CALIBRATED = CrossLayerOptions(weight_threshold=0.0, clip=ClipTreatment.CALIBRATED)
ABSORBING = CrossLayerOptions(weight_threshold=0.0, has_bias_absorption=True)

# --- Clips


def clipped(net: Net, bound: float = 6.0) -> str:
    y = net.node("Clip", net.conv("x", (4, 40), 1), net.constant(0.0), net.constant(bound))
    return net.conv(y, (40, 5), 1)


def test_a_bound_for_each_channel_takes_a_min() -> None:
    before = model_of(clipped)
    after, facts = equalized(before, CrossLayerOptions(weight_threshold=0.0))
    assert Counter(node.op_type for node in after.graph.node) == Counter(["Conv", "Relu", "Min", "Conv", "Neg"])
    assert len(facts.changed) == 1
    feed = {name: 3 * array for name, array in random_feed(before).items()}
    assert_same(before, after, feed)
    again, _ = equalized(after, CrossLayerOptions(weight_threshold=0.0))  # the Min scales along
    assert_same(before, again, feed)


def test_a_clip_that_is_skipped_is_named() -> None:
    _, facts = equalized(model_of(clipped), CrossLayerOptions(clip=ClipTreatment.SKIP))
    assert facts.changed == ()
    assert facts.left[0].reason == "'clip1': a Clip that is left as it is"
    assert clip_tensors(load(model_of(clipped)).model, CrossLayerOptions(clip=ClipTreatment.SKIP)) == {}
    assert clip_tensors(load(model_of(clipped)).model, CrossLayerOptions()) == {}


def test_a_calibrated_clip_stays_and_the_function_with_it() -> None:
    feed = random_feed(model_of(clipped))
    extremes = extremes_of(model_of(clipped), CALIBRATED, feed)
    assert list(extremes) == ["conv0_out"]
    highest = extremes["conv0_out"][1]
    bound = float(np.sort(highest)[-2:].mean())  # one channel alone goes beyond
    before = model_of(lambda net: clipped(net, bound))
    after, facts = equalized(before, CALIBRATED, extremes)
    assert len(facts.changed) == 1
    assert [node.op_type for node in after.graph.node] == [node.op_type for node in before.graph.node]
    assert_same(before, after, feed)
    scales = of_outputs(weights(before)[0]) / of_outputs(weights(after)[0])
    assert np.count_nonzero(np.abs(scales - 1) > 1e-3) > 20
    assert abs(scales[highest.argmax()] - 1) < 1e-6
    assert (np.delete(highest / scales, highest.argmax()) < bound).all()


def test_a_region_whose_clip_is_often_at_work_is_left() -> None:
    before = model_of(lambda net: clipped(net, 1.0))
    _, facts = equalized(before, CALIBRATED, extremes_of(before, CALIBRATED, random_feed(before)))
    assert facts.changed == ()
    assert "this Clip is at work in 100% of the channels" in facts.left[0].reason


def test_a_clip_whose_input_was_not_measured_is_left() -> None:
    _, facts = equalized(model_of(clipped), CALIBRATED, {})
    assert facts.changed == ()
    assert "were not measured" in facts.left[0].reason


# --- absorbing biases


def high(net: Net) -> str:
    """A channel that is always far above zero, before an activation, pooling and a layer without padding."""
    bias = net.constant(np.array([50, 0, 80, -50, 0, 0], np.float32))
    y = net.node("LeakyRelu", net.node("Conv", "x", net.weight(6, 4, 1, 1), bias), alpha=0.1)
    y = net.node("MaxPool", y, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2])
    one = net.conv(y, (6, 4), has_bias=False)
    two = net.node("Gemm", net.node("Flatten", y), net.weight(3, 96), net.weight(1, 3), transB=1, alpha=0.5, beta=2.0)
    return net.node("Add", net.reduce("ReduceMean", one, [1, 2, 3]), net.reduce("ReduceMean", two, [0, 1]))


def test_what_is_always_on_top_moves_behind() -> None:
    before = model_of(high)
    feed = random_feed(before)
    extremes = extremes_of(before, ABSORBING, feed)
    assert list(extremes) == ["conv0_out"]
    after, facts = equalized(before, ABSORBING, extremes)
    assert "conv0 -> conv3, gemm5: biases of 2 channels absorbed" in facts.changed
    assert_same(before, after, feed)
    lowest = extremes_of(after, ABSORBING, feed)["conv0_out"][0]
    np.testing.assert_allclose(lowest[[0, 2]], 0, atol=1e-4)


def test_padding_keeps_a_bias_where_it_is() -> None:
    before = model_of(lambda net: net.conv(net.node("Relu", net.conv("x", (4, 6))), (6, 5), pads=[1, 1, 1, 1]))
    assert clip_tensors(load(before).model, ABSORBING) == {}
    _, facts = equalized(before, ABSORBING)
    assert len(facts.changed) == 1
    assert any("its padding is zero" in each.reason for each in facts.left)
