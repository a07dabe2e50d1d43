"""EnableSubgraph: the bodies of If, Loop and Scan are quantized, with ranges that were measured inside."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from odd_models import loops
from onnx import TensorProto, helper
from onnx_models import Net, run_model

from quark.onnx import get_default_config, quantize
from quark.onnx.calibrate.bodies import with_lifted_tensors
from quark.onnx.load import load
from quark.onnx.session import open_session

RANDOM = np.random.default_rng(0)


def samples(flags=(True, False)):
    return [
        {"x": RANDOM.standard_normal((2, 4)).astype(np.float32), "flag": np.array(flags[i % len(flags)])}
        for i in range(8)
    ]


def quantized(model, data, preset="A8W8", **options):
    config = get_default_config(preset)
    config.extra_options.update({"EnableSubgraph": True, "Protect": "none", **options})
    return quantize(model, data, config)


def graphs(graph: onnx.GraphProto):
    yield graph
    for node in graph.node:
        for attr in node.attribute:
            if attr.HasField("g"):
                yield from graphs(attr.g)


def ops(model: onnx.ModelProto) -> dict[str, list[str]]:
    return {graph.name: [node.op_type for node in graph.node] for graph in graphs(model.graph)}


DATA = samples()


@pytest.fixture(scope="module")
def result():
    return quantized(loops(), DATA)


def test_quantizers_are_inside_the_bodies(result):
    found = ops(result.model)
    assert found["body"].count("QuantizeLinear") == 1  # what the product reads
    assert found["body"].count("DequantizeLinear") == 2  # and its weight, which the main graph has, too
    assert found["then_branch"].count("QuantizeLinear") == 2  # the Sigmoid's operand and result
    assert found["else_branch"] == ["Neg"]


def test_the_quantized_model_is_close_to_float(result):
    for sample in DATA[:-1]:  # the last one is held out from calibration
        expected, actual = (run_model(model, sample)["matmul5_out"] for model in (loops(), result.model))
        assert ((actual - expected) ** 2).sum() < 1e-2 * (expected**2).sum()


def test_a_range_inside_a_loop_covers_all_rounds(result):
    scale = next(
        onnx.numpy_helper.to_array(tensor)
        for graph in graphs(result.model.graph)
        for tensor in graph.initializer
        if tensor.name == "h_scale"
    )
    lifted, names = with_lifted_tensors(load(loops()).model, ["h"])
    session = open_session(lifted, extra_outputs=[names["h"]])
    rounds = [session.run([names["h"]], sample)[0] for sample in DATA[:-1]]
    assert rounds[0].shape == (16,)  # two rounds of 2 x 4
    assert float(scale) == pytest.approx(max(np.abs(each).max() for each in rounds) / 127)


def test_a_branch_that_no_sample_reaches_stays_float():
    result = quantized(loops(), samples(flags=(False,)))
    assert ops(result.model)["then_branch"] == ["Sigmoid"]
    reasons = {node.node: node.reason for node in result.report.plan.skipped}
    assert "no calibration sample reaches" in reasons["then_branch"]


def test_names_of_nodes_in_bodies_can_be_excluded():
    config = get_default_config("A8W8")
    config.extra_options.update({"EnableSubgraph": True, "Protect": "none"})
    config.nodes_to_exclude = ["in_MatMul", "matmul5"]
    result = quantize(loops(), samples(), config)
    assert "QuantizeLinear" not in ops(result.model)["body"]
    assert "QuantizeLinear" in ops(result.model)["then_branch"]


@pytest.mark.parametrize(
    ("preset", "inside"),
    [("UINT8_DYNAMIC_QUANT", "MatMulInteger"), ("MATMUL_NBITS", "MatMulNBits"), ("MXINT8", "MXQuantizeDequantize")],
)
def test_other_forms_inside_a_loop(preset, inside):
    assert inside in ops(quantized(loops(), samples(), preset).model)["body"]


def test_without_the_option_bodies_stay_float():
    result = quantized(loops(), samples(), EnableSubgraph=False)
    assert "QuantizeLinear" not in ops(result.model)["body"]
    assert any("left in float" in remark for remark in result.report.remarks)


def growing_loop():
    """A Loop that appends a row to its state in every round, and stacks another tensor."""
    net = Net()
    net.weight(4, 4, name="w")
    parts = [("MatMul", ["h", "w"], "m"), ("Identity", ["more"], "goes_on"), ("ReduceSum", ["m"], "total")]
    nodes = [helper.make_node(op, inputs, [out], name=f"in_{op}") for op, inputs, out in parts]
    nodes.append(helper.make_node("Concat", ["h", "m"], ["t"], name="in_Concat", axis=0))
    infos = [helper.make_tensor_value_info(name, kind, []) for name, kind in (("i", 7), ("more", 9), ("goes_on", 9))]
    state = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 4]) for name in ("h", "t")]
    total = helper.make_tensor_value_info("total", TensorProto.FLOAT, [1, 1])
    body = helper.make_graph(nodes, "body", [*infos[:2], state[0]], [infos[2], state[1], total])
    times, yes = net.constant(np.array(3, np.int64)), net.constant(np.array(True))
    outputs = net.nodes_of("Loop", times, yes, net.input("x", (1, 4)), body=body, outputs=["rows", "totals"])
    return net.model(*outputs)


def test_shapes_may_change_from_round_to_round():
    data = [{"x": RANDOM.standard_normal((1, 4)).astype(np.float32)} for _ in range(4)]
    lifted, names = with_lifted_tensors(load(growing_loop()).model, ["m", "h"])
    expected = run_model(growing_loop(), data[0])
    found = dict(
        zip(
            ["m", "h", "rows", "totals"],
            open_session(lifted, extra_outputs=names.values()).run([*names.values(), "rows", "totals"], data[0]),
            strict=True,
        )
    )
    assert (found["m"].shape, found["h"].shape) == ((7 * 4,), (7 * 4,))  # of 1, 2 and 4 rows
    for name in ("rows", "totals"):
        np.testing.assert_array_equal(found[name], expected[name])
    result = quantized(growing_loop(), data)
    assert "QuantizeLinear" in ops(result.model)["body"]


def scan_in_if():
    """An If whose branches have a tensor of the same name; one holds a Scan, with a product in every round."""
    net = Net()
    x = net.input("x", (3, 4))
    infos = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("s", "row", "t", "u")}
    weight = net.weight(4, 4, name="w")
    nodes = [
        helper.make_node("MatMul", ["row", weight], ["p"], name="inner"),
        helper.make_node("Add", ["p", "s"], ["t"], name="sum"),
        helper.make_node("Identity", ["t"], ["u"], name="copy"),
    ]
    body = helper.make_graph(nodes, "rounds", [infos["s"], infos["row"]], [infos["t"], infos["u"]])
    start = net.constant(np.zeros(4, np.float32), "start")
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, [3, 4])
    scan = helper.make_node("Scan", [start, x], ["last", "out"], name="scan", body=body, num_scan_inputs=1)
    branches = {
        "then_branch": helper.make_graph([scan], "then", [], [out]),
        "else_branch": helper.make_graph([helper.make_node("Relu", [x], ["out"], name="relu")], "else", [], [out]),
    }
    return net.model(net.node("If", net.input("flag", (), np.bool_), name="choice", output="y", **branches))


def test_a_scan_inside_a_branch():
    data = [{"x": RANDOM.standard_normal((3, 4)).astype(np.float32), "flag": np.array(i % 2 == 0)} for i in range(8)]
    result = quantized(scan_in_if(), data)
    assert "QuantizeLinear" in ops(result.model)["rounds"]
    assert "QuantizeLinear" in ops(result.model)["else"]
    for sample in data[:2]:
        expected, actual = (run_model(model, sample)["y"] for model in (scan_in_if(), result.model))
        assert ((actual - expected) ** 2).sum() < 1e-2 * (expected**2).sum()
