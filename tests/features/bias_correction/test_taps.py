"""The mean output of a layer from a few sums of its input, against the layer itself in ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx_models import Net, run_model

from quark.features.bias_correction.taps import MAX_ROWS, Taps, Window, mean_products, taps_of
from quark.onnx.graph import constant

Array = np.ndarray[Any, Any]

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {"kernel": 3},
    "padded": {"kernel": 3, "pads": [1, 1, 1, 1]},
    "padded on one side": {"kernel": 3, "pads": [0, 2, 1, 0]},
    "strided": {"kernel": 3, "pads": [1, 1, 1, 1], "strides": [2, 2]},
    "strided beyond its kernel": {"kernel": 1, "strides": [3, 2]},
    "dilated": {"kernel": 3, "pads": [2, 2, 2, 2], "dilations": [2, 2]},
    "padded beyond its kernel": {"kernel": 2, "pads": [3, 3, 3, 3], "strides": [2, 1]},
    "same upper": {"kernel": 4, "auto_pad": "SAME_UPPER", "strides": [2, 3]},
    "same lower": {"kernel": 4, "auto_pad": "SAME_LOWER", "strides": [2, 2]},
    "valid": {"kernel": 3, "auto_pad": "VALID", "strides": [2, 2]},
    "in groups": {"kernel": 3, "group": 2, "pads": [1, 1, 1, 1]},
    "depthwise": {"kernel": 3, "group": 6, "pads": [1, 1, 1, 1]},
    "one tap": {"kernel": 1},
    "as large as the input": {"kernel": 9},
}


def means_of(model: Any, x: Array) -> tuple[Array, Array]:
    """The mean of each channel in the runtime, and by taps."""
    graph = ir.serde.deserialize_model(model).graph
    node = graph.node(0)
    weight = constant(node.inputs[1])
    assert weight is not None
    taps = taps_of(node, weight)
    assert taps is not None
    sums, count = taps.sums(x)
    found = mean_products(node, weight, sums / count)
    (y,) = run_model(model, {"x": x}).values()
    channels = np.moveaxis(y, 1 if taps.windows else -1, -1)
    return channels.reshape(len(x), -1, channels.shape[-1]).mean(axis=1), found


def input_of(*shape: int) -> Array:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("attributes", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions(attributes: dict[str, Any]) -> None:
    net = Net()
    x = input_of(3, 6, 9, 11)
    y = net.conv(
        net.input("x", x.shape), (6, 8 if attributes.get("group", 1) != 6 else 12), has_bias=False, **attributes
    )
    expected, found = means_of(net.model(y), x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


TRANSPOSED: dict[str, dict[str, Any]] = {
    "plain": {"kernel": 3},
    "strided": {"kernel": 3, "strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
    "strided beyond its kernel": {"kernel": 2, "strides": [3, 3]},
    "dilated": {"kernel": 2, "dilations": [2, 2], "pads": [1, 0, 0, 1]},
    "in groups": {"kernel": 3, "group": 2, "strides": [2, 1]},
    "same upper": {"kernel": 3, "strides": [2, 2], "auto_pad": "SAME_UPPER"},
}


@pytest.mark.parametrize("attributes", TRANSPOSED.values(), ids=TRANSPOSED)
def test_transposed_convolutions(attributes: dict[str, Any]) -> None:
    net = Net()
    x = input_of(2, 4, 5, 6)
    y = net.conv(net.input("x", x.shape), (4, 8), has_bias=False, op_type="ConvTranspose", **attributes)
    expected, found = means_of(net.model(y), x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 3])
def test_other_numbers_of_dimensions(rank: int) -> None:
    net = Net()
    x = input_of(2, 4, *[7] * rank)
    weight = net.weight(6, 4, *[3] * rank)
    y = net.node("Conv", net.input("x", x.shape), weight, pads=[1] * 2 * rank, strides=[2] * rank)
    expected, found = means_of(net.model(y), x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_gemm(transposed: int, alpha: float) -> None:
    net = Net()
    x = input_of(3, 5)
    weight = net.weight(*((7, 5) if transposed else (5, 7)))
    y = net.node("Gemm", net.input("x", x.shape), weight, transB=transposed, alpha=alpha)
    expected, found = means_of(net.model(y), x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_matmul_of_tokens() -> None:
    net = Net()
    x = input_of(3, 4, 5)
    expected, found = means_of(net.model(net.node("MatMul", net.input("x", x.shape), net.weight(5, 7))), x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_stack_of_matrices_has_no_taps() -> None:
    net = Net()
    net.node("MatMul", net.input("x", (2, 4, 5)), net.weight(2, 5, 7))
    node = ir.serde.deserialize_model(net.model(net.nodes[0].output[0])).graph.node(0)
    assert taps_of(node, np.zeros((2, 5, 7))) is None


def test_many_rows_are_cut_into_pieces() -> None:
    sums, count = Taps(axis=1).sums(np.ones((MAX_ROWS * 3 + 1, 2), np.float32))
    assert sums.shape == (MAX_ROWS, 2)
    assert count == 3
    assert (sums == 3).all()


def test_a_tap_in_the_padding_falls_on_nothing() -> None:
    matrix, positions = Window(3, pad_begin=1, pad_end=1).places(4)
    assert positions == 4
    assert matrix.sum(axis=1).tolist() == [3, 4, 3]
