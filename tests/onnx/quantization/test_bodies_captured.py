"""What bodies of If, Loop and Scan read from outside.

ONNX Runtime ends the process if a DequantizeLinear reaches a body through an operator that moves values.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_models import Net

from quark.onnx import get_default_config, quantize


def network(moves: tuple[str, ...]) -> onnx.ModelProto:
    """A convolution, whose moved result the branches of an If read, and a further convolution."""
    net = Net()
    y = net.node("Relu", net.conv(net.input("x", (1, 4, 8, 8)), (4, 4), pads=[1] * 4, name="first"), name="relu")
    for op_type in moves:
        if op_type == "Transpose":
            y = net.node(op_type, y, perm=[0, 1, 3, 2], name="turn")
        elif op_type == "Reshape":
            y = net.node(op_type, y, net.integers([1, 4, 8, 8]), name="reshape")
        elif op_type == "Slice":
            y = net.node(op_type, y, *map(net.integers, ([0], [4], [2])), name="slice")
        elif op_type == "MaxPool":
            y = net.node(op_type, y, kernel_shape=[3, 3], pads=[1] * 4, name="pool")
        else:
            y = net.node(
                "Squeeze", net.node("Unsqueeze", y, net.integers([0]), name="up"), net.integers([0]), name="down"
            )
    branches = {
        f"{branch}_branch": onnx.helper.make_graph(
            [onnx.helper.make_node(op_type, [y], [f"{branch}_out"], name=f"in_{branch}")],
            branch,
            [],
            [onnx.helper.make_tensor_value_info(f"{branch}_out", onnx.TensorProto.FLOAT, None)],
        )
        for branch, op_type in (("then", "Neg"), ("else", "Abs"))
    }
    chosen = net.node("If", net.input("is_first", (), np.bool_), name="if", **branches)
    net.conv(chosen, (4, 4), pads=[1] * 4, name="last")
    return net.model("last_out")


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "INT8_CNN_DEFAULT"])
@pytest.mark.parametrize(
    "moves",
    [("Transpose",), ("Reshape",), ("Slice",), ("MaxPool",), ("Unsqueeze",), ("Reshape", "Transpose")],
    ids="_".join,
)
def test_what_a_body_reads_through_moving_operators_is_float(moves: tuple[str, ...], preset: str) -> None:
    rng = np.random.default_rng(0)
    samples = [
        {"x": rng.normal(size=(1, 4, 8, 8)).astype(np.float32), "is_first": np.array(i % 2 == 0)} for i in range(8)
    ]
    result = quantize(network(moves), samples, preset)  # runs the file in ONNX Runtime
    assert result.report.verdict.value == "ok"
    model = ir.from_proto(result.model)
    pairs = {node.op_type for node in model.graph}
    assert "QuantizeLinear" in pairs
    for node in model.graph:
        if node.op_type in moves:
            producer = node.inputs[0].producer()
            assert producer is None or producer.op_type != "DequantizeLinear"


def shared_weight() -> onnx.ModelProto:
    """Two products; the branches of an If read the weight of the first."""
    net = Net()
    weight = net.weight(32, 32)
    y = net.node(
        "MatMul", net.node("MatMul", net.input("x", (1, 32)), weight, name="shared"), net.weight(32, 32), name="own"
    )
    branches = {
        f"{branch}_branch": onnx.helper.make_graph(
            [
                onnx.helper.make_node("MatMul", [y, weight], [f"{branch}_product"], name=f"{branch}_layer"),
                onnx.helper.make_node(op_type, [f"{branch}_product"], [f"{branch}_out"], name=f"in_{branch}"),
            ],
            branch,
            [],
            [onnx.helper.make_tensor_value_info(f"{branch}_out", onnx.TensorProto.FLOAT, None)],
        )
        for branch, op_type in (("then", "Neg"), ("else", "Abs"))
    }
    net.node("If", net.input("is_first", (), np.bool_), name="if", output="y", **branches)
    return net.model("y")


@pytest.mark.parametrize("has_bodies", [False, True])
def test_a_weight_that_a_body_reads_in_float_is_not_stored_twice(has_bodies: bool) -> None:
    config = get_default_config("A8W8")
    config.extra_options |= {"EnableSubgraph": has_bodies, "Protect": "none"}
    rng = np.random.default_rng(0)
    samples = [{"x": rng.normal(size=(1, 32)).astype(np.float32), "is_first": np.array(i % 2 == 0)} for i in range(8)]
    report = quantize(shared_weight(), samples, config).report
    left = {node.node: node.reason for node in report.plan.skipped}
    assert ("shared" in left) is not has_bodies
    assert has_bodies or "reads its weight in float" in left["shared"]
    assert "own" not in left


def test_a_weight_that_is_an_input_of_a_loop_is_not_stored_twice() -> None:
    """As an unrolled first step of a recurrent layer, whose Loop takes the weights as loop-carried values."""
    net = Net()
    weight = net.weight(32, 32)
    y = net.node("MatMul", net.input("x", (1, 32)), weight, name="shared")
    y = net.node("MatMul", y, net.weight(32, 32), name="own")
    make, info, float32 = onnx.helper.make_node, onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    body = onnx.helper.make_graph(
        [
            make("Identity", ["go"], ["go_on"], name="same"),
            make("Identity", ["carried"], ["carried_on"], name="carry"),
            make("MatMul", ["state", "carried"], ["state_out"], name="layer"),
        ],
        "body",
        [info("i", onnx.TensorProto.INT64, []), info("go", onnx.TensorProto.BOOL, [])]
        + [info("carried", float32, [32, 32]), info("state", float32, [1, 32])],
        [info("go_on", onnx.TensorProto.BOOL, [])]
        + [info("carried_on", float32, [32, 32]), info("state_out", float32, [1, 32])],
    )
    count, go = net.constant(np.array(2)), net.constant(np.array(True))
    outputs = net.nodes_of("Loop", count, go, weight, y, name="loop", outputs=["weight_out", "y"], body=body)
    config = get_default_config("A8W8")
    config.extra_options["Protect"] = "none"
    samples = [{"x": np.random.default_rng(i).normal(size=(1, 32)).astype(np.float32)} for i in range(8)]
    report = quantize(net.model(outputs[1]), samples, config).report
    left = {node.node: node.reason for node in report.plan.skipped}
    assert "would be stored twice" in left["shared"]
    assert "own" not in left
