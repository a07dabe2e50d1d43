"""What an 8-bit bias shifts is made up for by the layers behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx_models import Net

from quark.features.bias_correction import on_onnx
from quark.features.bias_correction.shifts import Shifts, is_coarse
from quark.onnx import get_default_config, quantize
from quark.onnx.load import load
from quark.onnx.quantization.config.quant_types import ExtendedQuantType
from quark.onnx.session import open_session
from quark.onnx.view import view_of
from quark.plan import AffineChoice, FloatChoice

RANDOM = np.random.default_rng(5)


def residual_network() -> tuple[onnx.ModelProto, list[Any]]:
    """Biases that 8 bits with one scale are coarse for: one is 20 times as large as the others."""
    net = Net(opset=17)
    x = net.input("x", (1, 8, 6, 6))

    def layer(source: str, groups: int = 1) -> str:
        weight = net.constant((RANDOM.standard_normal((8, 8 // groups, 3, 3)) / 6).astype(np.float32))
        bias = RANDOM.uniform(0.1, 0.4, 8).astype(np.float32)
        bias[0] = 6.0
        return net.node("Conv", source, weight, net.constant(bias), pads=[1, 1, 1, 1], group=groups)

    first = net.node("Relu", layer(x))
    second = net.node("Add", first, layer(net.node("Relu", layer(first, groups=8))))
    y = layer(net.node("Relu", second))
    return net.model(y), [RANDOM.standard_normal((1, 8, 6, 6)).astype(np.float32) for _ in range(24)]


def test_layers_behind_make_up_for_rounded_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = residual_network()
    session = open_session(model, threads=1)
    exact = [session.run(None, {"x": x})[0] for x in data]

    def error_of(result: Any) -> float:
        quantized = open_session(result.model, threads=1)
        errors = [quantized.run(None, {"x": x})[0] - y for x, y in zip(data, exact, strict=True)]
        return float(np.abs(np.mean(errors, axis=(0, 1, 3, 4))).mean())

    config = get_default_config("XINT8")
    config.activation_type = ExtendedQuantType.QInt16  # so that biases are what is coarse
    made_up = error_of(quantize(model, data, config, num_samples=16))
    monkeypatch.setattr(on_onnx, "_make_up_for_rounding", lambda work, means: None)
    plain = error_of(quantize(model, data, config, num_samples=16))
    assert made_up < 0.5 * plain


def test_shifts_follow_the_graph() -> None:
    net = Net(opset=17)
    a, b = net.input("a", (1, 2, 4, 4)), net.input("b", (1, 2, 4, 4))
    clipped = net.node("Relu", a)
    both = net.node("Concat", net.node("Add", clipped, b), b, axis=1)
    gated = net.node("Mul", both, both)
    graph = view_of(load(net.model(net.node("GlobalAveragePool", both), gated)).model)
    values = {value.name: value for node in graph for value in (*node.inputs, *node.outputs) if value is not None}
    shifts = Shifts({clipped: np.array([0.5, 1.0])}, {"a": np.array([1.0, 2.0]), "b": np.array([0.0, 3.0])})
    np.testing.assert_array_equal(shifts.of(values[clipped]), [0.5, 2.0])
    pooled = next(node.outputs[0] for node in graph if node.op_type == "GlobalAveragePool")
    np.testing.assert_array_equal(shifts.of(pooled), [0.5, 5.0, 0.0, 3.0])
    assert shifts.of(values[gated]) is None


def test_biases_of_32_bits_are_exact_enough() -> None:
    assert is_coarse(AffineChoice("int8", (1.0,), (0,)))
    assert is_coarse(FloatChoice("bfloat16"))
    assert not is_coarse(AffineChoice("int32", (1.0,), (0,)))
    assert not is_coarse(None)
