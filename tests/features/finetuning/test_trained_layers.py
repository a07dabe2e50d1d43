"""Which layers are trained, with which numbers; and the reason where one is not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest
from onnx_models import Net

from quark.features.finetuning.layers import TrainedLayer, bias_of, trained_layers
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import FORMATS
from quark.formats.spec import BlockFormat
from quark.onnx.graph import infer_shapes
from quark.plan import (
    AffineChoice,
    BlockChoice,
    Choice,
    DynamicChoice,
    FloatChoice,
    QuantizationPlan,
    Reader,
    Role,
    SkippedNode,
    TensorChoice,
)

WEIGHT = AffineChoice("int8", (0.1,), (0,))
BIAS = AffineChoice("int32", (0.01,), (0,))
TYPES = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LayerNormalization")


def blocks(axis: int) -> BlockChoice:
    fmt = FORMATS["bfp16"]
    assert isinstance(fmt, BlockFormat)
    return BlockChoice(BlockQuantizer(fmt), axis)


def found_in(
    net: Net, output: str, choices: Mapping[tuple[str, int], Choice]
) -> tuple[list[TrainedLayer], list[SkippedNode]]:
    model = ir.serde.deserialize_model(net.model(output))
    infer_shapes(model)
    plan = QuantizationPlan(
        tuple(
            TensorChoice(f"{node}{index}", Role.WEIGHT, choice, (Reader(node, index),))
            for (node, index), choice in choices.items()
        )
    )
    return trained_layers(model, plan, TYPES)


def test_layers_come_in_order_with_their_choices() -> None:
    net = Net()
    x = net.conv(net.input("x", (1, 3, 6, 6)), (3, 4), name="a")
    x = net.node("Relu", x, name="relu")
    x = net.conv(x, (4, 5), name="b", has_bias=False)
    x = net.node("Flatten", x, name="flat")
    x = net.node("Gemm", x, net.weight(20, 2), net.weight(2), name="c")
    choices = {("c", 1): WEIGHT, ("a", 1): WEIGHT, ("a", 2): BIAS, ("b", 0): WEIGHT}
    found, left = found_in(net, x, choices)
    assert [layer.name for layer in found] == ["a", "c"]  # the weight of b stays in float
    assert left == []
    assert (found[0].weight, found[0].bias, found[0].has_bias, found[0].output) == (WEIGHT, BIAS, True, WEIGHT)
    assert (found[0].row_numbers, found[0].output_numbers) == (27, 4)
    assert found[1].bias is None


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (blocks(1), blocks(1)),
        (blocks(-3), blocks(1)),
        (blocks(3), None),  # along the width: not in one row
        (AffineChoice("int8", (0.1,) * 4, (0,) * 4, 1), AffineChoice("int8", (0.1,) * 4, (0,) * 4, 1)),
        (AffineChoice("int8", (0.1,) * 6, (0,) * 6, 2), None),
        (FloatChoice("bfloat16"), FloatChoice("bfloat16")),
        (DynamicChoice("uint8"), None),
    ],
)
def test_how_the_output_of_a_convolution_is_rounded(choice: Choice, expected: Choice | None) -> None:
    net = Net()
    x = net.conv(net.input("x", (1, 3, 8, 8)), (3, 4), name="a")
    x = net.conv(net.node("Relu", x), (4, 4), name="b")
    found, _ = found_in(net, x, {("a", 1): WEIGHT, ("b", 0): choice})
    assert found[0].output == expected


@pytest.mark.parametrize(("axis", "expected"), [(2, blocks(1)), (-1, blocks(1)), (1, None)])
def test_how_the_output_of_a_matrix_product_is_rounded(axis: int, expected: Choice | None) -> None:
    net = Net()
    x = net.node("MatMul", net.input("x", (2, 3, 8)), net.weight(8, 16), name="a")
    x = net.node("MatMul", x, net.weight(16, 4), name="b")
    found, _ = found_in(net, x, {("a", 1): WEIGHT, ("b", 0): blocks(axis)})
    assert found[0].output == expected


def test_a_weight_that_two_layers_share_is_left() -> None:
    net = Net()
    weight = net.weight(4, 4)
    x = net.node("MatMul", net.input("x", (2, 4)), weight, name="a")
    found, left = found_in(net, net.node("MatMul", x, weight, name="b"), {("a", 1): WEIGHT, ("b", 1): WEIGHT})
    assert not found
    assert [each.node for each in left] == ["a", "b"]
    assert "shares" in left[0].reason


def test_what_comes_at_run_time_is_left() -> None:
    net = Net()
    x = net.node("MatMul", net.input("x", (2, 4)), net.input("y", (4, 4)), name="a")
    x = net.node("MatMul", x, net.weight(4, 4), name="b")
    found, left = found_in(net, x, {("a", 1): WEIGHT, ("b", 1): DynamicChoice("uint8")})
    assert not found
    assert "constant" in left[0].reason
    assert "run time" in left[1].reason


def test_a_bias_that_is_shared_is_not_trained() -> None:
    net = Net()
    bias = net.weight(4)
    x = net.node("Gemm", net.input("x", (2, 4)), net.weight(4, 4), bias, name="a")
    x = net.node("Gemm", x, net.weight(4, 4), bias, name="b")
    found, _ = found_in(net, x, {("a", 1): WEIGHT, ("b", 1): WEIGHT})
    assert [layer.has_bias for layer in found] == [False, False]


@pytest.mark.parametrize("shape", [(1,), (3, 4), (3, 1), ()])
def test_a_bias_that_is_not_one_for_each_output_leaves_the_layer(shape: tuple[int, ...]) -> None:
    net = Net()
    bias = net.constant(np.ones(shape, np.float32))
    x = net.node("Gemm", net.input("x", (3, 4)), net.weight(4, 4), bias, name="a")
    found, left = found_in(net, x, {("a", 1): WEIGHT})
    assert not found
    assert "bias" in left[0].reason


def test_a_bias_by_row_is_not_taken_for_one_by_output() -> None:
    net = Net()
    x = net.node("Gemm", net.input("x", (4, 4)), net.weight(4, 4), net.weight(4, 1), name="a")
    assert not found_in(net, x, {("a", 1): WEIGHT})[0]


def test_a_bias_that_is_computed_leaves_the_layer() -> None:
    net = Net()
    x = net.node("Gemm", net.input("x", (3, 4)), net.weight(4, 4), net.input("c", (4,)), name="a")
    found, left = found_in(net, x, {("a", 1): WEIGHT})
    assert not found
    assert "computed" in left[0].reason


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_bias_with_a_factor_counts_as_it_is_added(beta: float) -> None:
    net = Net()
    x = net.node("Gemm", net.input("x", (3, 4)), net.weight(4, 4), net.weight(4, name="c"), name="a", beta=beta)
    found, _ = found_in(net, x, {("a", 1): WEIGHT, ("a", 2): BIAS})
    assert not found[0].has_bias
    assert found[0].bias is None  # what is rounded is the constant before the factor
    node = next(iter(ir.serde.deserialize_model(net.model(x)).graph))
    bias = bias_of(node)
    constant = node.inputs[2]
    assert constant is not None
    assert constant.const_value is not None
    if beta:
        assert bias is not None
        np.testing.assert_allclose(bias, beta * constant.const_value.numpy())
    else:
        assert bias is None


def test_operators_that_are_not_asked_for_are_no_business_of_ours() -> None:
    net = Net()
    x = net.node("PRelu", net.input("x", (3, 4)), net.weight(4), name="a")
    assert found_in(net, x, {("a", 1): WEIGHT}) == ([], [])
