"""Operators on codes do what the float operators between QuantizeLinear and DequantizeLinear do.

Both forms of small networks run in ONNX Runtime: the one with pairs without optimizations, so that it is computed in
float as it is written, and the one on codes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from quantized_networks import (
    CONV,
    CONV_RELU,
    CONV_RELU6,
    DEPTHWISE,
    GEMM,
    MATMUL,
    RESIDUAL,
    S8S8,
    S8S8_CHANNELS,
    STYLES,
    TYPES,
    U8S8,
    U8S8_CHANNELS,
    Network,
    Style,
    changed,
    check,
    op_types,
    run,
)

from quark.onnx.insert import NodeStyle
from quark.plan import QuantizationPlan

PRODUCTS = {
    "conv": (CONV, ["QLinearConv"]),
    "conv strided": (
        '(float[2,8,9] x, float[6,4,3] w) => (float y) { y = Conv<group=2, strides=[2], auto_pad="SAME_UPPER">(x, w) }',
        ["QLinearConv"],
    ),
    "depthwise": (DEPTHWISE, ["QLinearConv"]),
    "matmul": (MATMUL, ["QLinearMatMul"]),
    "gemm": (GEMM, ["QGemm"]),
    "gemm scaled": ("(float[8,4] x, float[8,6] w) => (float y) { y = Gemm<alpha=0.5, transA=1>(x, w) }", ["QGemm"]),
}


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("case", PRODUCTS)
def test_sums_of_products_agree_in_all_pairs_of_types(case, style):
    text, expected = PRODUCTS[case]
    network = Network(text)
    model = check(network, network.plan(style))
    assert [op for op in op_types(model) if op != "Relu"] == expected


@pytest.mark.parametrize("text", [CONV, MATMUL, GEMM], ids=["conv", "matmul", "gemm"])
def test_int8_data_with_uint8_weights_stay_pairs_as_no_kernel_takes_them(text):
    network = Network(text)
    model = check(network, network.plan(Style("int8", "uint8")))
    assert op_types(model) == [network.graph.node[0].op_type]


ELEMENTWISE = {
    "matmul of activations": ("(float[2,5,8] x, float[2,8,6] x2) => (float y) { y = MatMul(x, x2) }", "QLinearMatMul"),
    "add": ("(float[4,8] x, float[8] x2) => (float y) { y = Add(x, x2) }", "QLinearAdd"),
    "add constant": ("(float[4,8] x, float[8] w) => (float y) { y = Add(x, w) }", "QLinearAdd"),
    "mul": ("(float[2,4,8] x, float[4,1] x2) => (float y) { y = Mul(x, x2) }", "QLinearMul"),
    "concat": ("(float[2,4,8] x, float[2,3,8] x2) => (float y) { y = Concat<axis=1>(x, x2) }", "QLinearConcat"),
    "average pool": (
        "(float[2,4,8,8] x) => (float y) { y = AveragePool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x) }",
        "QLinearAveragePool",
    ),
    "average pool with its padding": (
        """(float[2,4,8,8] x) => (float y)
        { y = AveragePool<kernel_shape=[3,3], strides=[2,2], pads=[0,0,1,1], ceil_mode=1, count_include_pad=1>(x) }""",
        "QLinearAveragePool",
    ),
    "global pool": ("(float[2,4,7,7] x) => (float y) { y = GlobalAveragePool(x) }", "QLinearGlobalAveragePool"),
    "leaky": ("(float[2,4,8] x) => (float y) { y = LeakyRelu<alpha=0.2>(x) }", "QLinearLeakyRelu"),
    "leaky by default": ("(float[2,4,8] x) => (float y) { y = LeakyRelu(x) }", "QLinearLeakyRelu"),
    "sigmoid": ("(float[2,4,8] x) => (float y) { y = Sigmoid(x) }", "QLinearSigmoid"),
    "relu to another scale": ("(float[2,4,8] x) => (float y) { y = Relu(x) }", "QLinearLeakyRelu"),
}


@pytest.mark.parametrize("style", TYPES, ids=str)
@pytest.mark.parametrize("case", ELEMENTWISE)
def test_arithmetic_agrees(case, style):
    text, expected = ELEMENTWISE[case]
    network = Network(text)
    assert op_types(check(network, network.plan(style))) == [expected]


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("axis", ["", "<axis=1>"])
def test_softmax_is_at_most_a_step_off(axis, opset):
    """ONNX Runtime's kernel for uint8 cuts off where others round."""
    network = Network(f"(float[2,10,7] x) => (float y) {{ y = Softmax{axis}(x) }}", opset)
    model = check(network, network.plan(U8S8), least_equal=0.6)
    assert op_types(model) == ["QLinearSoftmax"]


MOVES = {
    "MaxPool": "(float[2,4,8,8] x) => (float y) { y = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x) }",
    "Reshape": "(float[2,4,8] x) => (float y) <int64[2] s = {2, -1}> { y = Reshape(x, s) }",
    "Flatten": "(float[2,4,8] x) => (float y) { y = Flatten(x) }",
    "Transpose": "(float[2,4,8] x) => (float y) { y = Transpose<perm=[2,0,1]>(x) }",
    "Squeeze": "(float[2,1,8] x) => (float y) <int64[1] s = {1}> { y = Squeeze(x, s) }",
    "Unsqueeze": "(float[2,8] x) => (float y) <int64[1] s = {1}> { y = Unsqueeze(x, s) }",
    "Slice": "(float[2,4,8] x) => (float y) <int64[1] s = {1}, int64[1] e = {3}> { y = Slice(x, s, e, s) }",
    "Gather": "(float[2,4,8] x) => (float y) <int64[2] s = {3, 0}> { y = Gather<axis=1>(x, s) }",
    "Split": "(float[2,4,8] x) => (float y, float z) <int64[2] s = {1, 3}> { y, z = Split<axis=1>(x, s) }",
    "Expand": "(float[2,1,8] x) => (float y) <int64[3] s = {2, 3, 8}> { y = Expand(x, s) }",
    "Tile": "(float[2,1,8] x) => (float y) <int64[3] s = {2, 3, 1}> { y = Tile(x, s) }",
    "Resize": """(float[2,3,8,8] x) => (float y)
        <float[4] s = {1.0, 1.0, 0.7, 1.6}> { y = Resize<mode="nearest">(x,,s) }""",
    "Pad": "(float[2,4,8] x) => (float y) <int64[6] s = {0, 1, 2, 0, 1, 0}> { y = Pad(x, s) }",
    "Pad constant": """(float[2,4,8] x) => (float y)
        <int64[6] s = {0, 1, 2, 0, 1, 0}, float v = {0.7}> { y = Pad(x, s, v) }""",
    "Pad axes": """(float[2,4,8] x) => (float y)
        <int64[2] s = {1, 2}, int64[1] a = {2}> { y = Pad<mode="reflect">(x, s,,a) }""",
}


@pytest.mark.parametrize("style", [U8S8, Style("int8", "int8")], ids=str)
@pytest.mark.parametrize("case", MOVES)
def test_codes_are_moved_as_numbers_are(case, style):
    network = Network(MOVES[case], opset=18)
    plan = network.plan(style)
    assert any(plan.of("x")[0].choice.zero_point)  # or a wrong padding would go unseen
    assert op_types(check(network, plan, least_equal=1, most_steps=0)) == [case.split()[0]]


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        pytest.param(U8S8, CONV_RELU, [], id="relu by the range"),
        pytest.param(U8S8, CONV_RELU6, [], id="relu6 by the range"),
        pytest.param(S8S8, CONV_RELU, ["Relu"], id="relu of codes"),
        pytest.param(S8S8, CONV_RELU6, ["Relu"], id="relu of codes, 6 by the range"),
        pytest.param(replace(U8S8, has_pairs_before_clips=True), CONV_RELU, ["Clip"], id="relu with pairs"),
        pytest.param(replace(U8S8, has_pairs_before_clips=True), CONV_RELU6, ["Clip"], id="relu6 with pairs"),
        pytest.param(replace(S8S8, has_pairs_before_clips=True), CONV_RELU, ["Relu"], id="symmetric relu with pairs"),
        pytest.param(replace(S8S8, has_pairs_before_clips=True), CONV_RELU6, ["Clip"], id="symmetric relu6 with pairs"),
    ],
)
def test_relu_and_clip_act_on_codes_where_their_range_does_not(style, text, expected):
    network = Network(text)
    model = check(network, network.plan(style))
    assert op_types(model) == sorted([*expected, "QLinearConv"])


def test_int8_relu_before_opset_14_is_a_clip():
    network = Network(CONV_RELU, opset=13)
    assert op_types(check(network, network.plan(S8S8))) == ["Clip", "QLinearConv"]


@pytest.mark.parametrize("seed", range(8))
def test_clips_of_codes_are_exact(seed):
    """Any bounds, also the wrong way round, with any scale and zero point."""
    generator = np.random.default_rng(seed)
    low, high, low2, high2 = generator.uniform(-3, 3, 4).round(3)
    network = Network(f"""(float[64,64] x) => (float y)
        <float a = {{{low}}}, float b = {{{high}}}, float c = {{{low2}}}, float d = {{{high2}}}>
        {{ t = Transpose(x)  h = Clip(t, a, b)  i = Clip(h, c)  j = Relu(i)  y = Clip(j,,d) }}""")
    plan = network.plan(replace(TYPES[seed % 2], has_pairs_before_clips=True))
    at_ends = QuantizationPlan(tuple(tensor for tensor in plan if tensor.tensor in ("x", "y")))
    model = check(network, at_ends, least_equal=1, most_steps=0)
    assert set(op_types(model)) <= {"Transpose", "Clip", "Relu"}
    assert len(op_types(model)) <= 2


def test_an_unbounded_and_a_computed_bound():
    network = Network("(float[4,4] x, float x2) => (float y) { h = Transpose(x)  y = Clip(h, x2) }")
    plan = network.plan(replace(U8S8, has_pairs_before_clips=True))
    model = check(network, plan)
    assert op_types(model) == ["Clip", "Transpose"]
    assert next(node for node in model.graph if node.op_type == "Clip").inputs[0].dtype is ir.DataType.FLOAT


RESIDUAL_OPS = [
    *("MaxPool", "QGemm", "QLinearAdd", "QLinearConcat", "QLinearConv", "QLinearConv", "QLinearConv"),
    *("QLinearGlobalAveragePool", "QLinearLeakyRelu", "Reshape"),
]


@pytest.mark.parametrize("style", [*STYLES, replace(U8S8_CHANNELS, has_float_outputs=True)], ids=str)
def test_a_residual_network_has_no_pairs_left_but_at_its_ends(style):
    network = Network(RESIDUAL)
    model = check(network, network.plan(style), least_equal=0, most_steps=3 if not style.has_float_outputs else 2**11)
    assert [op for op in op_types(model) if op != "Relu"] == RESIDUAL_OPS
    counts = Counter(node.op_type for node in model.graph)
    assert counts["QuantizeLinear"] == 1
    assert counts["DequantizeLinear"] == (0 if style.has_float_outputs else 1)


def test_codes_are_what_the_runtime_itself_makes_of_pairs():
    network = Network(RESIDUAL)
    pairs, codes = (network.quantized(U8S8_CHANNELS, form) for form in NodeStyle)
    for feed in network.feeds:
        np.testing.assert_array_equal(run(pairs, feed, True)[0], run(codes, feed, True)[0])


def test_gemm_also_gives_numbers():
    network = Network(GEMM)
    model = check(network, network.plan(replace(S8S8_CHANNELS, has_float_outputs=True)))
    assert [node.op_type for node in model.graph] == ["QuantizeLinear", "QGemm"]
    assert [value.name for value in model.graph.outputs] == ["y"]


def test_a_relu_of_codes_that_stand_for_no_negative_number_is_an_identity():
    network = Network("(float[4,4] x) => (float y) { y = Relu(x) }")
    plan = network.plan(U8S8)
    for tensor in ("x", "y"):
        plan = changed(plan, tensor, scale=(0.01,), zero_point=(0,))
    assert op_types(check(network, plan, least_equal=1, most_steps=0)) == ["Identity"]
