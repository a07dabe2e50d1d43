"""Channels that smoothing cannot help are computed in float: the same function, and far less error in 8 bits."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_models import Net

from quark.features.smooth_quant.outliers import FACTOR, outlier_channels, split_outliers
from quark.features.smooth_quant.smoothing import ChannelStatistics
from quark.onnx import get_default_config, quantize
from quark.onnx.graph import nodes
from quark.onnx.load import load
from quark.onnx.session import open_session

CHANNELS, OUTLIER, OUTPUTS, TOKENS = 128, 77, 8, 6


def network() -> onnx.ModelProto:
    """Two products with biases that read the same tensor, in which one channel has wide inputs and wide weights."""
    net = Net()
    random = np.random.default_rng(0)
    x, sums = net.input("x", (1, TOKENS, CHANNELS)), []
    for name in ("first", "second"):
        weight = (random.standard_normal((CHANNELS, OUTPUTS)) / 8).astype(np.float32)
        weight[OUTLIER] *= 8
        sums.append(net.node("Add", net.node("MatMul", x, net.constant(weight), name=name), net.weight(OUTPUTS)))
    return net.model(net.node("Mul", *(net.node("Tanh", each) for each in sums), output="y"))


@pytest.fixture(scope="module")
def samples() -> list[dict[str, np.ndarray]]:
    """One token of each has a massive value."""
    random = np.random.default_rng(1)
    arrays = random.standard_normal((16, 1, TOKENS, CHANNELS)).astype(np.float32) / 4
    arrays[:, 0, 1, OUTLIER] = 200 + random.standard_normal(16)
    return [{"x": array} for array in arrays]


def statistics(samples) -> dict[str, ChannelStatistics]:
    rows = np.concatenate([sample["x"][0] for sample in samples])
    return {"x": ChannelStatistics(rows.min(0), rows.max(0), np.square(rows).mean(0), len(rows), 0.0)}


def test_a_split_product_computes_the_same(samples) -> None:
    model, known = load(network()).model, statistics(samples)
    facts = split_outliers(model, known)
    assert facts is not None
    assert facts.changed == ("first, second: 1 channel of 128 in float",)
    products = [node for node in nodes(model) if node.op_type == "MatMul"]
    rows = {node.name: node.inputs[1].const_value.numpy() for node in products}
    for name in ("first", "second"):
        assert not rows[name][OUTLIER].any()
        assert rows[f"{name}_outliers"].shape == (1, OUTPUTS)
    rest = str(products[0].inputs[0].name)
    assert known[rest].reach[OUTLIER] == 0
    assert known[rest].reach.max() < 2
    before, after = (open_session(value).run(None, samples[0])[0] for value in (network(), model))
    np.testing.assert_allclose(after, before, atol=1e-5)


def test_ordinary_tokens_survive_a_massive_one(samples) -> None:
    errors = []
    for alpha in ("auto", 0.5):
        config = get_default_config("INT8_TRANSFORMER_DEFAULT")
        config.extra_options.update(SmoothAlpha=alpha, Protect="none")
        result = quantize(network(), samples, config)
        exact, found = (open_session(value) for value in (network(), result.model))
        errors.append(
            np.mean(
                [np.square(found.run(None, sample)[0] - exact.run(None, sample)[0])[:, 2:].mean() for sample in samples]
            )
        )
    assert errors[0] < errors[1] / 30


def test_a_wide_channel_with_narrow_weights_is_left_to_smoothing() -> None:
    reach = np.ones(CHANNELS)
    reach[OUTLIER] = 100
    assert outlier_channels(reach, 1 / reach).size == 0
    assert outlier_channels(reach, np.ones(CHANNELS)).tolist() == [OUTLIER]
    reach[OUTLIER] = FACTOR
    assert outlier_channels(reach, np.ones(CHANNELS)).size == 0
    reach[: CHANNELS // 4] = 100  # too many to be outliers
    assert outlier_channels(reach, np.ones(CHANNELS)).size == 0
