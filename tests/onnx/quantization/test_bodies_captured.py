"""ONNX Runtime ends the process if a DequantizeLinear reaches the body of an If through an operator that moves values."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_models import Net

from quark.onnx import quantize


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
