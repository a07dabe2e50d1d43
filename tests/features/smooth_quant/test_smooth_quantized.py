"""SmoothQuant does what it is for: 8-bit networks with loud channels come out better, and no worse without them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import Net, run_model

from quark.onnx import get_default_config, quantize

WIDTH, LENGTH = 32, 24


def encoder(outlier, *, is_post_norm):
    """Two blocks whose norms make two channels louder, and whose layers weigh these less."""
    net = Net(opset=20)
    gains = np.ones(WIDTH, np.float32)
    gains[[3, 17]] = outlier
    scaled = (net.random.standard_normal((6, WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32) / gains[:, None]

    def norm(x):
        return net.node("LayerNormalization", x, net.constant(gains), net.weight(WIDTH))

    def part(x, weights):
        hidden = net.node("Gelu", net.node("MatMul", x, net.constant(weights[0])))
        gate = net.node("Sigmoid", net.node("MatMul", x, net.constant(weights[1])))
        return net.node("MatMul", net.node("Mul", hidden, gate), net.weight(WIDTH, WIDTH))

    x = net.input("x", (1, LENGTH, WIDTH))
    for i in range(2):
        weights = scaled[2 * i : 2 * i + 2]
        x = norm(net.node("Add", x, part(x, weights))) if is_post_norm else net.node("Add", x, part(norm(x), weights))
    return net.model(net.node("MatMul", norm(x), net.constant(scaled[5])))


def samples(count, seed):
    random = np.random.default_rng(seed)
    return [{"x": random.standard_normal((1, LENGTH, WIDTH)).astype(np.float32)} for _ in range(count)]


def quantized(model, alpha, preset="A8W8"):
    config = get_default_config(preset)
    config.print_summary = False
    config.op_types_to_quantize = ["MatMul"]
    config.extra_options["Protect"] = "none"  # what smoothing does by itself
    if alpha is not None:
        config.include_sq = True
        config.extra_options["SmoothAlpha"] = alpha
    return quantize(model, samples(12, 0), config)


def sqnr(model, result):
    noise = signal = 0.0
    for feed in samples(8, 1):
        (y,), (z,) = run_model(model, feed).values(), run_model(result.model, feed).values()
        signal, noise = signal + np.square(y).sum(), noise + np.square(y - z).sum()
    return 10 * np.log10(signal / noise)


def facts(result):
    return next(algorithm for algorithm in result.report.algorithms if algorithm.name == "SmoothQuant")


@pytest.mark.parametrize("preset", ["A8W8", "U8S8_AAWS"])
@pytest.mark.parametrize("is_post_norm", [False, True])
def test_outliers_cost_less(is_post_norm, preset):
    model = encoder(60.0, is_post_norm=is_post_norm)
    plain = sqnr(model, quantized(model, None, preset))
    for alpha in (0.5, "auto"):
        result = quantized(model, alpha, preset)
        assert facts(result).changed
        assert sqnr(model, result) > plain + 3


def test_without_outliers_nothing_gets_worse():
    model = encoder(1.0, is_post_norm=False)
    plain = sqnr(model, quantized(model, None))
    for alpha in (0.0, 0.5, 1.0, "auto"):
        assert sqnr(model, quantized(model, alpha)) > plain - 0.5


def test_a_mul_that_smooths_reads_float_and_hands_on_what_is_quantized():
    result = quantized(encoder(60.0, is_post_norm=True), 0.5)
    graph = result.model.graph
    producers = {output: node for node in graph.node for output in node.output}
    muls = [node for node in graph.node if node.op_type == "Mul" and node.name.endswith("_smooth")]
    assert muls
    for mul in muls:
        assert producers[mul.input[0]].op_type == "LayerNormalization"
        assert {node.op_type for node in graph.node if mul.output[0] in node.input} == {"QuantizeLinear"}
