"""What stays in pairs when a model is rewritten to operators on codes, and what is around the rewritten nodes."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir
import pytest
from quantized_networks import (
    CONV,
    CONV_RELU,
    GEMM,
    MATMUL,
    RESIDUAL,
    U8S8,
    U8S8_CHANNELS,
    Network,
    changed,
    check,
    op_types,
    with_plan,
)

from quark.onnx.insert import NodeStyle
from quark.onnx.insert.qoperator import to_qoperators
from quark.plan import QuantizationPlan, Reader

CONV_WITHOUT_BIAS = CONV.replace(", float[16] b", "").replace(", b)", ")")
RESIZE = """(float[2,3,8,8] x) => (float y)
    <float[4] s = {1.0, 1.0, 0.7, 1.6}> { y = Resize<mode="linear">(x,,s) }"""


def _without(plan: QuantizationPlan, tensor: str) -> QuantizationPlan:
    return QuantizationPlan(tuple(each for each in plan if each.tensor != tensor))


@pytest.mark.parametrize(
    ("text", "change"),
    [
        pytest.param(CONV, lambda plan: _without(plan, "b"), id="float bias"),
        pytest.param(CONV, lambda plan: _without(plan, "w"), id="float weight"),
        pytest.param(CONV, lambda plan: _without(plan, "y"), id="float result"),
        pytest.param(CONV, lambda plan: changed(plan, "b", scale=(0.001,)), id="bias of another scale"),
        pytest.param(CONV, lambda plan: changed(plan, "y", format="int8"), id="result of another type"),
        pytest.param(
            CONV, lambda plan: changed(changed(plan, "x", format="uint16"), "y", format="uint16"), id="16 bits"
        ),
        pytest.param(
            CONV_WITHOUT_BIAS,
            lambda plan: changed(plan, "w", axis=0, scale=(0.02,) * 16, zero_point=tuple(range(16))),
            id="weight of several zero points",
        ),
        pytest.param(
            MATMUL.replace("[8,6]", "[2,8,6]"),
            lambda plan: changed(plan, "w", axis=1, scale=(0.02,) * 8, zero_point=(0,) * 8),
            id="summed channels of a stack of matrices",
        ),
        pytest.param(
            MATMUL.replace("[8,6]", "[2,8,6]"),
            lambda plan: changed(plan, "w", axis=2, scale=(0.02,) * 6, zero_point=(0,) * 6),
            id="channels of a stack of matrices",
        ),
        pytest.param(
            MATMUL,
            lambda plan: changed(plan, "w", axis=0, scale=(0.02,) * 8, zero_point=(0,) * 8),
            id="summed channels",
        ),
        pytest.param(GEMM.replace("<", "<beta=2.0, "), lambda plan: plan, id="beta"),
        pytest.param(GEMM.replace("<", "<alpha=2.0, "), lambda plan: plan, id="alpha with a bias of another scale"),
        pytest.param(
            "(float[2,4,8,8] x) => (float y) { y = AveragePool<kernel_shape=[2,2], dilations=[2,2]>(x) }",
            lambda plan: plan,
            id="dilated pool",
        ),
        pytest.param(RESIZE, lambda plan: plan, id="linear resize"),
        pytest.param("(float[2,4] x) => (float y) { y = Tanh(x) }", lambda plan: plan, id="no integer form"),
        pytest.param(
            "(float[2,4] x) => (float y) { y = Add(x, x) }", lambda plan: _without(plan, "x"), id="float data"
        ),
    ],
)
def test_what_has_no_integer_form_stays_as_it_is(text, change):
    network = Network(text, opset=21)
    plan = change(network.plan(U8S8))
    codes, pairs = (with_plan(network, plan, form) for form in (NodeStyle.QOPERATOR, NodeStyle.QDQ))
    assert ir.serde.serialize_model(codes) == ir.serde.serialize_model(pairs)
    assert to_qoperators(pairs) == 0


def test_numbers_that_are_read_as_such_keep_their_node():
    """`h` is read as it is by Tanh, and `i` is an output of the graph; Mul reads both quantized."""
    network = Network(
        "(float[4,4] x) => (float y, float i, float t) { h = Add(x, x)  i = Sigmoid(x)  y = Mul(i, h)  t = Tanh(h) }"
    )
    plan = _without(network.plan(U8S8), "t")
    readers = {"h": (Reader("Mul_2", 1),), "i": (Reader("Mul_2", 0),)}
    some = QuantizationPlan(
        tuple(replace(tensor, readers=readers.get(tensor.tensor, tensor.readers)) for tensor in plan)
    )
    assert op_types(check(network, some)) == ["Add", "QLinearMul", "Sigmoid", "Tanh"]


@pytest.mark.parametrize("fields", [{"scale": (0.1,)}, {"zero_point": (1,)}, {"format": "int8"}], ids=str)
def test_a_move_to_codes_of_another_meaning_stays_float(fields):
    network = Network("(float[4,4] x) => (float y) { y = Transpose(x) }")
    plan = changed(changed(network.plan(U8S8), "x", zero_point=(100,)), "y", zero_point=(100,))
    model = check(network, changed(plan, "y", **fields))
    assert [node.op_type for node in model.graph][2] == "Transpose"
    assert len(model.graph) == 5


@pytest.mark.parametrize("options", [{"has_dedicated_pairs": True}, {"has_pairs_on_weights": True}], ids=str)
def test_pairs_in_other_places_make_no_difference(options):
    network = Network(RESIDUAL)
    plan = network.plan(U8S8_CHANNELS)
    model = check(network, plan, least_equal=0, most_steps=3, **options)
    assert op_types(model) == op_types(with_plan(network, plan, NodeStyle.QOPERATOR))


def test_a_tensor_that_nobody_reads_is_no_hindrance():
    network = Network("(float[2,4,8] x) => (float y) <int64[2] s = {1, 3}> { y, z = Split<axis=1>(x, s) }")
    assert op_types(check(network, network.plan(U8S8))) == ["Split"]


def test_indices_of_a_maximum_need_the_float_pool():
    network = Network("(float[1,2,4,4] x) => (float y, int64 i) { y, i = MaxPool<kernel_shape=[2,2]>(x) }")
    plan = network.plan(U8S8)
    first = QuantizationPlan((plan.of("x")[0], replace(plan.of("y")[0], readers=(Reader("", 0),))))
    model = check(network, first)
    assert next(node for node in model.graph if node.op_type == "MaxPool").inputs[0].dtype is ir.DataType.FLOAT


def test_the_number_of_rewritten_nodes_and_no_import_that_is_not_needed():
    network = Network(CONV_RELU)
    model = network.quantized(U8S8, NodeStyle.QDQ)
    assert to_qoperators(model) == 1
    assert to_qoperators(model) == 0
    assert "com.microsoft" not in model.opset_imports
    assert [value.name for value in (*model.graph.inputs, *model.graph.outputs)] == ["x", "y"]
    assert network.quantized(U8S8, NodeStyle.QOPERATOR).opset_imports.get("com.microsoft") is None
    assert Network(GEMM).quantized(U8S8, NodeStyle.QOPERATOR).opset_imports["com.microsoft"] == 1
