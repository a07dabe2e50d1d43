"""Inputs and outputs with channels last."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_models import Net, run_model

from quark.onnx.load import load
from quark.onnx.optimize.layouts import to_channels_last


def test_images_are_turned_and_other_tensors_are_not(caplog):
    net = Net()
    y = net.conv(net.input("x", (1, 3, 6, 5)), (3, 4), 1)
    mean = net.node("ReduceMean", y, axes=[1, 2, 3], keepdims=0)
    total = net.node("Add", mean, net.input("v", (1,)), name="total")
    proto = net.model(y, total)
    model = load(proto).model
    assert to_channels_last(model) == ("x",)
    turned = ir.to_proto(model)
    assert [each.name for each in turned.graph.output] == ["conv0_out_transpose", "total_out"]
    assert "'v' of shape [1] keeps its layout" in caplog.text
    x, v = np.random.default_rng(0).random((1, 3, 6, 5), np.float32), np.ones(1, np.float32)
    first, second = run_model(proto, {"x": x, "v": v}).values()
    last, same = run_model(turned, {"x": x.transpose(0, 2, 3, 1), "v": v}).values()
    np.testing.assert_array_equal(last.transpose(0, 3, 1, 2), first)
    np.testing.assert_array_equal(same, second)
