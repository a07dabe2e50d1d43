"""What XINT8 makes, the NPU takes: findings are about the model that came in, and about nothing that was done to it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from odd_models import ODD_MODELS, odd_feed
from onnx_models import Net, random_feed

from quark.demo import network_path
from quark.npu import RULE_NAMES
from quark.onnx import get_default_config, quantize
from quark.onnx.lint import Level, lint

# Of a file as it came: sizes, opset, operators that there are no quantized forms of, float16, nothing to quantize.
OF_THE_MODEL = {"Transformer", "Batch", "FixedShape", "Opset", "Operator"}
MORE = {"half": {"CustomDomain"}, "double": {"Quantized"}, "gemm_forms": {"FloatTensor"}}  # a bias that is computed


@pytest.mark.parametrize("name", ODD_MODELS)
def test_odd_models(name):
    model = onnx.shape_inference.infer_shapes(ODD_MODELS[name]())
    result = quantize(model, [odd_feed(model, seed) for seed in range(4)], "XINT8")
    findings = lint(result.model)
    assert {finding.rule for finding in findings} <= OF_THE_MODEL | MORE.get(name, set()), findings
    assert not [left for facts in result.report.algorithms if facts.name == "npu positions" for left in facts.left]


def test_the_demo_network():
    (found,) = lint(quantize(network_path(), None, "XINT8", use_random_data=True).model)
    assert (found.rule, found.level) == ("Batch", Level.WARNING)
    config = get_default_config("XINT8")
    config.extra_options["FixShapes"] = "[1,1,8,8]"
    assert lint(quantize(network_path(), None, config, use_random_data=True).model) == ()


def uneven(seed=0):
    """Branches of very different sizes, tiny weights, a large bias, gates, pools, slices: rules have to move much."""
    net = Net(seed=seed)
    x = net.input("x", (1, 4, 14, 14))
    small = net.node("Conv", x, net.constant(np.full((4, 4, 1, 1), 1e-4, np.float32)), net.constant([40.0] * 4))
    large = net.node("Mul", x, net.constant(300.0))
    y = net.node("Add", net.node("Relu", small), large)
    y = net.node("Mul", y, net.node("Sigmoid", y))
    y = net.node("Sub", net.node("AveragePool", y, kernel_shape=[3, 3], pads=[1] * 4), net.node("Tanh", x))
    y = net.node("Concat", net.node("MaxPool", y, kernel_shape=[1, 1]), x, net.node("LeakyRelu", x), axis=1)
    y = net.node("Pad", y, net.integers([0, 0, 1, 1, 0, 0, 1, 1]))
    y = net.node("Slice", y, net.integers([0]), net.integers([6]), net.integers([1]))
    y = net.node("GlobalAveragePool", net.conv(y, (6, 8)))
    return net.model(net.node("Gemm", net.node("Flatten", y), net.weight(5, 8), net.weight(5), transB=1))


@pytest.mark.parametrize("seed", range(3))
def test_a_network_with_much_to_move(seed):
    model = uneven(seed)
    result = quantize(model, [random_feed(model, i) for i in range(4)], "XINT8")
    assert lint(result.model) == ()
    facts = next(algorithm for algorithm in result.report.algorithms if algorithm.name == "npu positions")
    assert facts.changed
    assert facts.left == ()


def test_options_turn_rules_off():
    model = uneven()
    feeds = [random_feed(model, i) for i in range(4)]
    config = get_default_config("XINT8")
    config.extra_options["NPULimitationCheck"] = False
    found = {each.rule for each in lint(quantize(model, feeds, config).model)}
    assert found
    assert found <= set(RULE_NAMES)
    config = get_default_config("XINT8")
    config.extra_options["SimulateDPU"] = False
    assert {each.rule for each in lint(quantize(model, feeds, config).model)} == {"NpuConstant"}
