"""Networks to walk through piece by piece: what is computed early is read at once, or late, or by a branch."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx_models import Net


def chain() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", (1, 3, 6, 6))
    for number in range(4):
        x = net.node("Relu", net.conv(x, (3, 3), pads=[1, 1, 1, 1], name=f"layer{number}"))
    return net.model(x)


def residual() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", (1, 3, 6, 6))
    for number in range(3):
        y = net.node("Relu", net.conv(x, (3, 3), pads=[1, 1, 1, 1], name=f"first{number}"))
        y = net.conv(y, (3, 3), pads=[1, 1, 1, 1], name=f"second{number}")
        x = net.node("Relu", net.node("Add", y, x))
    return net.model(net.node("GlobalAveragePool", x))


def read_late() -> onnx.ModelProto:
    """A branch of the first layer, and an input, that only the last layers read."""
    net = Net()
    x, mask = net.input("x", (1, 3, 4, 4)), net.input("mask", (1, 3, 4, 4))
    early = net.conv(x, (3, 3), 1, name="early")
    y = early
    for number in range(3):
        y = net.conv(net.node("Sigmoid", y), (3, 3), 1, name=f"middle{number}")
    y = net.conv(net.node("Mul", y, mask), (3, 3), 1, name="masked")
    return net.model(net.conv(net.node("Add", y, early), (3, 3), 1, name="last"))


def captured() -> onnx.ModelProto:
    """Branches, one inside another, that read what was computed long before."""
    net = Net()
    x, flag = net.input("x", (1, 2, 4, 4)), net.input("flag", (), dtype=np.bool_)
    early = net.conv(x, (2, 2), 1, name="early")
    y = net.conv(net.node("Relu", early), (2, 2), 1, name="middle")
    y = net.conv(net.node("Relu", y), (2, 2), 1, name="late")

    def branch(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)
        return helper.make_graph(list(nodes), name, [], [out])

    inner = helper.make_node(
        "If",
        [flag],
        ["inner"],
        then_branch=branch("deep", helper.make_node("Add", [early, y], ["deep_out"])),
        else_branch=branch("other", helper.make_node("Neg", [y], ["other_out"])),
    )
    branches = {
        "then_branch": branch("then", inner, helper.make_node("Abs", ["inner"], ["then_out"])),
        "else_branch": branch("else", helper.make_node("Sub", [x, y], ["else_out"])),
    }
    chosen = net.node("If", flag, name="choice", **branches)
    return net.model(net.conv(chosen, (2, 2), 1, name="last"))


def several_outputs() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", (1, 4, 4, 4))
    first, second = net.nodes_of("Split", x, outputs=["first", "second"], axis=1)
    y = net.conv(first, (2, 2), 1, name="a")
    z = net.conv(second, (2, 2), 1, name="b")
    return net.model(net.conv(net.node("Concat", y, z, axis=1), (4, 2), 1, name="last"))
