"""A message opens as the graph that it stands for, and keeps its weights apart."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import Net

from quark.onnx import session as sessions
from quark.onnx.large_tensors import split
from quark.onnx.load import load
from quark.onnx.session import open_session


@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["through a file", "as bytes"])
def test_a_message_computes_what_its_graph_does(limit, monkeypatch):
    monkeypatch.setattr(sessions, "_FILE_FROM_BYTES", limit)
    net = Net(opset=17)
    y = net.node("MatMul", net.input("x", (2, 300)), net.weight(300, 40, name="w"), name="product")
    model = load(net.model(y)).model
    message = split(model)
    assert "w" in message.weights
    x = np.random.default_rng(0).standard_normal((2, 300)).astype(np.float32)
    expected = open_session(model, threads=1).run(None, {"x": x})[0]
    for _ in range(2):
        np.testing.assert_array_equal(open_session(message, threads=1).run(None, {"x": x})[0], expected)
    assert not any(proto.raw_data for proto, _ in message.apart()), "weights stay apart"
    (extra,) = open_session(message, extra_outputs=[y], threads=1).run([y], {"x": x})
    np.testing.assert_array_equal(extra, expected)
