"""Rows times weights are what ONNX Runtime computes at the positions that were picked."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_models import Net, run_model

from quark.features.finetuning.layers import RowSource, bias_of, row_source
from quark.features.finetuning.problem import WeightLayout
from quark.onnx.graph import constant, infer_shapes

Array = np.ndarray[Any, Any]


def input_of(*shape: int) -> Array:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def source_of(model: Any) -> tuple[ir.Node, tuple[RowSource, WeightLayout] | str, Array]:
    """Of the last layer of the model, with its weight."""
    net = ir.serde.deserialize_model(model)
    infer_shapes(net)
    node = list(net.graph)[-1]
    weight = constant(node.inputs[1])
    assert weight is not None
    return node, row_source(node, weight), weight


def check_written(source: RowSource, layout: WeightLayout, x: Array, picks: Array, rows: Array) -> None:
    """Rows are the same where they are written to places among others, by compiled code or without, and those others
    stay as they were."""
    places = np.random.default_rng(2).permutation(len(picks) + 2)[: len(picks)]
    for given in (x, torch.from_numpy(x)):
        room: Any = np.full((len(picks) + 2, rows[0].size), 7, np.float32)
        written = source.rows(room if isinstance(given, np.ndarray) else torch.from_numpy(room), layout)
        source.write_inputs(given, picks, places, written)
        np.testing.assert_allclose(np.asarray(written)[places], rows, rtol=1e-6, atol=1e-6)
        assert (np.delete(room, places, axis=0) == 7).all()


def check(net: Net, output: str, x: Array) -> None:
    model = net.model(output)
    node, found, weight = source_of(model)
    assert not isinstance(found, str), found
    source, layout = found
    (y,) = run_model(model, {"x": x}).values()
    count = source.count(y.shape)
    assert count * layout.matrices[0] * layout.matrices[1] == y.size
    everything = np.arange(count)
    some = np.sort(np.random.default_rng(1).choice(count, min(count, 7), replace=False))
    for picks in (everything, some, some[:1]):
        rows = source.inputs(x, picks)
        assert rows.shape == (len(picks), layout.matrices[0], layout.matrices[2])
        assert rows.dtype == np.float32
        check_written(source, layout, x, picks, rows)
        products = np.einsum("rgk,gok->rgo", rows, layout.to_matrices(weight)).reshape(len(picks), -1)
        bias = bias_of(node)
        products = products if bias is None else products + bias.reshape(-1)
        np.testing.assert_allclose(products, source.outputs(y, picks), rtol=1e-4, atol=1e-4)
        found_rows, found_outputs = (
            source.inputs(torch.from_numpy(x), picks),
            source.outputs(torch.from_numpy(y), picks),
        )
        np.testing.assert_allclose(found_rows.numpy(), rows, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(found_outputs.numpy(), source.outputs(y, picks))
    np.testing.assert_array_equal(layout.from_matrices(layout.to_matrices(weight)), weight)
    # whatever the picks are, all of them together are the whole output
    assert sorted(source.outputs(y, everything).reshape(-1)) == sorted(y.reshape(-1))


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"pads": [1, 1, 1, 1]},
    "padded on one side": {"pads": [0, 2, 1, 0]},
    "strided": {"pads": [1, 1, 1, 1], "strides": [2, 3]},
    "strided beyond its kernel": {"kernel": 1, "strides": [3, 2]},
    "dilated": {"pads": [2, 2, 2, 2], "dilations": [2, 1]},
    "padded beyond its kernel": {"kernel": 2, "pads": [3, 3, 3, 3], "strides": [2, 1]},
    "same upper": {"kernel": 4, "auto_pad": "SAME_UPPER", "strides": [2, 3]},
    "same lower": {"kernel": 4, "auto_pad": "SAME_LOWER", "strides": [2, 2]},
    "valid": {"auto_pad": "VALID", "strides": [2, 2]},
    "in groups": {"group": 2, "pads": [1, 1, 1, 1]},
    "depthwise": {"group": 6, "pads": [1, 1, 1, 1]},
    "without a bias": {"has_bias": False},
    "as large as the input": {"kernel": 9},
}


@pytest.mark.parametrize("attributes", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions(attributes: dict[str, Any]) -> None:
    net, x = Net(), input_of(3, 6, 9, 11)
    channels = (6, 12 if attributes.get("group") == 6 else 8)
    check(net, net.conv(net.input("x", x.shape), channels, **attributes), x)


TRANSPOSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "strided": {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
    "strided beyond its kernel": {"kernel": 2, "strides": [3, 3]},
    "padding at the end of some axes": {"strides": [2, 3], "output_padding": [0, 2]},
    "dilated": {"kernel": 2, "dilations": [2, 3], "pads": [1, 0, 0, 1]},
    "in groups": {"group": 2, "strides": [2, 1]},
    "depthwise": {"group": 4, "strides": [2, 2]},
    "same upper": {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
    "same lower": {"strides": [2, 2], "auto_pad": "SAME_LOWER"},
    "same of an even kernel": {"kernel": 4, "strides": [2, 3], "auto_pad": "SAME_UPPER"},
    "valid": {"auto_pad": "VALID"},
}


@pytest.mark.parametrize("attributes", TRANSPOSED.values(), ids=TRANSPOSED)
def test_transposed_convolutions(attributes: dict[str, Any]) -> None:
    net, x = Net(), input_of(2, 4, 5, 6)
    check(net, net.conv(net.input("x", x.shape), (4, 8), op_type="ConvTranspose", **attributes), x)


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("rank", [1, 3])
def test_other_numbers_of_dimensions(op_type: str, rank: int) -> None:
    net, x = Net(), input_of(2, 4, *range(6, 6 + rank))
    weight = net.weight(4, 4 // 2, *[3, 2, 3][:rank])
    bias = net.weight(4)
    attributes: dict[str, Any] = {
        "pads": [1] * rank + [0] * rank,
        "strides": [2, 1, 2][:rank],
        "dilations": [1, 2, 1][:rank],
    }
    check(net, net.node(op_type, net.input("x", x.shape), weight, bias, group=2, **attributes), x)


def test_a_transposed_convolution_of_a_given_shape_is_left() -> None:
    net = Net()
    y = net.conv(net.input("x", (2, 4, 5, 6)), (4, 8), op_type="ConvTranspose", output_shape=[8, 9])
    assert source_of(net.model(y))[1] == "the shape of its output is given, not computed"


def test_what_lies_in_the_padding_is_zero_whatever_the_input_holds() -> None:
    net, x = Net(), input_of(1, 2, 4, 4)
    x[..., -1] = np.inf  # where an index of -1 would fall
    _, found, _ = source_of(net.model(net.conv(net.input("x", x.shape), (2, 3), pads=[1, 1, 1, 1])))
    assert not isinstance(found, str)
    rows = found[0].inputs(x, np.array([0]))
    assert np.isfinite(rows).all()


@pytest.mark.parametrize("of_input", [0, 1])
@pytest.mark.parametrize("of_weight", [0, 1])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.25)])
def test_gemm(of_input: int, of_weight: int, alpha: float, beta: float) -> None:
    net, x = Net(), input_of(*((5, 6) if of_input else (6, 5)))
    weight = net.weight(*((7, 5) if of_weight else (5, 7)))
    bias = net.weight(7)
    attributes: dict[str, Any] = {"transA": of_input, "transB": of_weight, "alpha": alpha, "beta": beta}
    check(net, net.node("Gemm", net.input("x", x.shape), weight, bias, **attributes), x)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (2, 4, 3, 5)])
def test_matmul(shape: tuple[int, ...]) -> None:
    net, x = Net(), input_of(*shape)
    check(net, net.node("MatMul", net.input("x", shape), net.weight(5, 7)), x)


def test_a_stack_of_matrices_is_left() -> None:
    net = Net()
    model = net.model(net.node("MatMul", net.input("x", (2, 4, 5)), net.weight(2, 5, 7)))
    assert source_of(model)[1] == "its weight is not one matrix"


@pytest.mark.parametrize("axis", [-1, 2, 1, -2, 0])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_normalization(axis: int, has_bias: bool) -> None:
    net, x = Net(), input_of(3, 4, 5)
    shape = x.shape[axis:]
    inputs = [net.weight(*shape) for _ in range(1 + has_bias)]
    check(net, net.node("LayerNormalization", net.input("x", x.shape), *inputs, axis=axis, epsilon=0.01), x)


@pytest.mark.parametrize("shape", [(1, 1, 5), (1, 5)])
def test_layer_normalization_with_more_axes_than_needed(shape: tuple[int, ...]) -> None:
    net, x = Net(), input_of(3, 4, 5)
    check(net, net.node("LayerNormalization", net.input("x", x.shape), net.weight(*shape)), x)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (4, 1)])
def test_a_scale_that_is_broadcast_is_left(shape: tuple[int, ...]) -> None:
    net = Net()
    y = net.node("LayerNormalization", net.input("x", (3, 4, 5)), net.weight(*shape), axis=1)
    assert source_of(net.model(y))[1] == "its scale is broadcast"


def test_layer_normalization_of_sizes_that_are_not_known() -> None:
    net = Net()
    y = net.node("LayerNormalization", net.input("x", ("N", "T", "D")), net.weight(5))
    assert not isinstance(source_of(net.model(y))[1], str)
    net = Net()
    y = net.node("LayerNormalization", net.input("x", ("N", "T", "D")), net.weight(1))
    assert source_of(net.model(y))[1] == "its scale is broadcast"


@pytest.mark.parametrize("space", [(7,), (5, 4), (3, 4, 2)])
def test_instance_normalization(space: tuple[int, ...]) -> None:
    net, x = Net(), input_of(2, 6, *space)
    weights = [net.weight(6), net.weight(6)]
    check(net, net.node("InstanceNormalization", net.input("x", x.shape), *weights, epsilon=0.01), x)


def test_other_operators_are_left() -> None:
    net = Net()
    reason = source_of(net.model(net.node("PRelu", net.input("x", (2, 3)), net.weight(3))))[1]
    assert isinstance(reason, str)
    assert "PRelu" in reason


def test_a_network_in_float16() -> None:
    net, x = Net(dtype=np.float16), input_of(2, 4, 5, 5).astype(np.float16)
    _, found, _ = source_of(net.model(net.conv(net.input("x", x.shape), (4, 4), pads=[1, 1, 1, 1])))
    assert not isinstance(found, str)
    assert found[0].inputs(x, np.arange(3)).dtype == np.float32
