"""A small quantized file that an NPU takes, and the same with something wrong."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper
from onnx_models import Net
from position_plans import plan_of

from quark.onnx.insert import insert
from quark.onnx.load import load
from quark.onnx.simulate import DEFAULT_SUBSTITUTIONS, SimulateOptions, simulate

POSITIONS: Mapping[str, int] = dict(x=5, w=7, b=9, r=5, p=5, s=5, m=5, k=6, a=5, j=5, g=7, y=6)  # noqa: C408


def npu_net() -> onnx.ModelProto:
    """In float: every operator that has a rule on positions, in one network."""
    net = Net()
    x, w, b = net.input("x", (1, 4, 8, 8)), net.weight(4, 4, 3, 3, name="w"), net.weight(4, name="b")
    c = net.node("Conv", x, w, b, pads=[1] * 4, name="conv", output="c")
    r = net.node("LeakyRelu", c, alpha=0.1, name="leaky", output="r")
    p = net.node("Pad", r, net.integers([0, 0, 1, 1, 0, 0, 1, 1]), name="pad", output="p")
    begin, end, axes = (net.integers(value) for value in ([1, 1], [9, 9], [2, 3]))
    s = net.node("Slice", p, begin, end, axes, name="slice", output="s")
    m = net.node("MaxPool", s, kernel_shape=[2, 2], strides=[2, 2], name="pool", output="m")
    a = net.node("Add", m, net.weight(1, 4, 1, 1, name="k"), name="add", output="a")
    j = net.node("Concat", a, m, axis=1, name="join", output="j")
    g = net.node("Sigmoid", j, name="gate", output="g")
    return net.model(net.node("Mul", j, g, name="swish", output="y"))


def npu_file(*, without: str = "", is_simulated: bool = True, **positions: int) -> onnx.ModelProto:
    """Quantized, at other positions for some tensors, and with one of them left in float."""
    model = load(npu_net()).model
    if is_simulated:
        simulate(model, SimulateOptions(DEFAULT_SUBSTITUTIONS))
    wanted = {name: position for name, position in {**POSITIONS, **positions}.items() if name != without}
    insert(model, plan_of(model, wanted))
    return ir.to_proto(model)


def with_initializer(model: onnx.ModelProto, name: str, array: np.ndarray) -> onnx.ModelProto:
    """The model with another content for one constant."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    tensor = next(each for each in changed.graph.initializer if each.name == name)
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    return changed
