"""Inputs vary around their means if biases are corrected afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from quark.features.compensation.input_products import InputProducts
from quark.features.finetuning.layers import trained_layers
from quark.onnx.load import load
from quark.plan import AffineChoice, FloatChoice, QuantizationPlan, Reader, Role, TensorChoice
from quark.rounded import rounded


@pytest.fixture
def layer():
    from onnx_models import Net

    net = Net(opset=17)
    y = net.node("MatMul", net.input("x", (64, 5)), net.weight(5, 3, name="w"), name="product")
    weight = TensorChoice("w", Role.WEIGHT, AffineChoice("int8", (0.01,), (0,)), (Reader("product", 1),))
    (found,), _ = trained_layers(load(net.model(y)).model, QuantizationPlan((weight,)), ("MatMul",))
    return found


def products(layer, data, x):
    sums = InputProducts()
    sums.add(layer, data, 1)
    sums.observe(x)
    return sums.sums[layer.name]


def test_means_are_taken_out(layer) -> None:
    x = np.random.default_rng(0).standard_normal((64, 5)).astype(np.float32) + 4
    data = AffineChoice("int8", (0.0625,), (0,))
    sums = products(layer, data, x)
    sums.centre()
    z = rounded(x, data).astype(np.float64)
    exact, own = (each - each.mean(axis=0) for each in (x.astype(np.float64), z))
    np.testing.assert_allclose(sums.inner[0], own.T @ own, rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(sums.cross[0], exact.T @ own, rtol=1e-3, atol=1e-2)


def test_other_formats_keep_their_means(layer) -> None:
    x = np.random.default_rng(0).standard_normal((64, 5)).astype(np.float32) + 4
    sums = products(layer, FloatChoice("bfloat16"), x)
    before = sums.inner.copy()
    sums.centre()
    np.testing.assert_array_equal(sums.inner, before)
