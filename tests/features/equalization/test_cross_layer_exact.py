"""Equalization changes weights and leaves the function: on a graph for every operator that lets a scale through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from equalized_networks import assert_same, equalized, model_of
from onnx_models import Net, random_feed

from quark.features.equalization.options import CrossLayerOptions

OPTIONS = CrossLayerOptions(weight_threshold=0.0)


def pair(net: Net) -> str:
    return net.conv(net.node("Relu", net.conv("x", (4, 6))), (6, 5))


def pair_without_bias(net: Net) -> str:
    return net.conv(net.node("Relu", net.conv("x", (4, 6), has_bias=False)), (6, 5), has_bias=False)


def triple(net: Net) -> str:
    y = net.conv(net.node("Relu", net.conv("x", (4, 6), 1)), (6, 6), group=6, pads=[1, 1, 1, 1])
    return net.conv(net.node("Relu", y), (6, 5), 1)


def depthwise_with_multiplier(net: Net) -> str:
    y = net.conv(net.node("Relu", net.conv("x", (4, 6), 1)), (6, 12), group=6)
    return net.conv(net.node("Relu", y), (12, 5), 1)


def grouped(net: Net) -> str:
    y = net.conv(net.node("Relu", net.conv("x", (4, 6), group=2)), (6, 9), group=3)
    return net.conv(y, (9, 3), group=3)


def transposed(net: Net) -> str:
    y = net.conv(net.node("Relu", net.conv("x", (4, 6), op_type="ConvTranspose", strides=[2, 2])), (6, 8))
    y = net.conv(net.node("Relu", y), (8, 6), op_type="ConvTranspose", group=2)
    return net.conv(net.node("LeakyRelu", y, alpha=0.2), (6, 6), op_type="ConvTranspose", group=3)


def one_dimensional(net: Net) -> str:
    x = net.node("Reshape", "x", net.integers([2, 4, 64]))
    y = net.node("Relu", net.node("Conv", x, net.weight(6, 4, 3), net.weight(6)))
    return net.node("Conv", net.node("MaxPool", y, kernel_shape=[2]), net.weight(3, 6, 3))


def activations(net: Net) -> str:
    y = net.node("PRelu", net.conv("x", (4, 6)), net.weight(6, 1, 1))
    y = net.node("Neg", net.node("LeakyRelu", net.conv(y, (6, 6), 1), alpha=0.1))
    y = net.node("Abs", net.conv(y, (6, 6), 1))
    y = net.node("Clip", net.conv(y, (6, 6), 1), net.constant(0.0))
    return net.conv(net.node("Identity", net.node("Dropout", y)), (6, 3), 1)


def residual_stream(net: Net) -> str:
    stream = net.conv("x", (4, 6), 1)
    for _ in range(2):
        y = net.conv(net.node("Relu", net.conv(stream, (6, 8), 1)), (8, 6), 1)
        stream = net.node("Relu", net.node("Add", stream, y))
    return net.conv(stream, (6, 4), 1)


def sums_and_extremes(net: Net) -> str:
    a, b, c = (net.conv("x", (4, 6), 1) for _ in range(3))
    y = net.node("Max", net.node("Sum", a, b, c), net.node("Sub", a, net.node("Mean", b, c)))
    return net.conv(net.node("Min", y, net.weight(1, 6, 1, 1)), (6, 3), 1)


def constants_along(net: Net) -> str:
    y = net.node("Add", net.conv("x", (4, 6), 1), net.weight(6, 1, 1))
    y = net.node("Sub", net.weight(1, 6, 8, 8), net.node("Add", y, net.constant(np.zeros((1, 1), net.dtype))))
    y = net.node("Div", net.node("Mul", y, net.weight(6, 1, 1)), net.constant(3.0))
    return net.conv(net.node("Relu", y), (6, 3), 1)


def space(net: Net) -> str:
    y = net.node("Relu", net.conv("x", (4, 6), 1))
    y = net.node("Pad", y, net.integers([0, 0, 1, 2, 0, 0, 0, 1]))
    y = net.node("Slice", y, net.integers([1, 0]), net.integers([9, 8]), net.integers([2, -1]))
    y = net.node("Resize", y, "", net.constant(np.array([1, 1, 2, 2], np.float32)), mode="linear")
    y = net.node("AveragePool", net.node("MaxPool", y, kernel_shape=[2, 2]), kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    y = net.node(
        "Concat", y, net.node("Abs", y), net.constant(net.random.random((2, 6, 15, 3)).astype(net.dtype)), axis=3
    )
    a, b = net.nodes_of("Split", y, net.integers([10, 5]), outputs=["a", "b"], axis=2)
    return net.conv(net.node("Add", net.node("GlobalMaxPool", a), net.reduce("ReduceMean", b, [2, 3])), (6, 3), 1)


def pool_flatten_gemm(net: Net) -> str:
    y = net.node("Relu", net.conv("x", (4, 6)))
    y = net.node("Flatten", net.node("GlobalAveragePool", y))
    y = net.node("Gemm", y, net.weight(7, 6), net.weight(7), transB=1)
    return net.node("Gemm", net.node("Relu", y), net.weight(7, 3), net.weight(1), alpha=0.5, beta=2.0)


def flatten_of_space(net: Net) -> str:
    y = net.node("Relu", net.conv("x", (4, 6)))
    y = net.node("Relu", net.node("Reshape", y, net.integers([2, -1])))
    left = net.node("Gemm", y, net.weight(216, 3), net.weight(1, 3))
    return net.node("Add", left, net.node("Gemm", y, net.weight(3, 216), transB=1))


def gemm_with_one_bias(net: Net) -> str:
    y = net.node("Gemm", net.node("Flatten", "x"), net.weight(256, 6), net.weight(1))
    return net.node("Gemm", net.node("Relu", y), net.weight(3, 6), transB=1)


def matmul(net: Net) -> str:
    x = net.node("Reshape", "x", net.integers([2, 16, 16]))
    y = net.node("Add", net.node("MatMul", x, net.weight(16, 6)), net.weight(6))
    return net.node("MatMul", net.node("Relu", y), net.weight(6, 3))


def channels_last(net: Net) -> str:
    y = net.node("Transpose", net.node("Relu", net.conv("x", (4, 6))), perm=[0, 2, 3, 1])
    y = net.node("Relu", net.node("MatMul", y, net.weight(6, 5)))
    return net.conv(net.node("Transpose", y, perm=[0, 3, 1, 2]), (5, 3), 1)


def shared_weight(net: Net) -> str:
    weight, bias = net.weight(6, 4, 1, 1), net.weight(6)
    a, b = (net.node("Relu", net.node("Conv", x, weight, bias)) for x in ("x", net.node("Neg", "x")))
    back = net.weight(5, 6, 1, 1)
    return net.node("Add", *(net.node("Conv", y, back) for y in (a, net.node("MaxPool", b, kernel_shape=[1, 1]))))


def weight_applied_twice(net: Net) -> str:
    weight = net.weight(6, 6, 1, 1)
    y = net.conv("x", (4, 6), 1)
    for _ in range(2):
        y = net.node("Relu", net.node("Conv", y, weight))
    return net.conv(y, (6, 3), 1)


def shared_bias(net: Net) -> str:
    bias = net.weight(6)
    y = net.node("Relu", net.node("Conv", "x", net.weight(6, 4, 1, 1), bias))
    return net.conv(net.node("Relu", net.node("Conv", y, net.weight(6, 6, 1, 1), bias)), (6, 3), 1)


def dead_channels(net: Net) -> str:
    first, second = (np.array(net.random.standard_normal(s), net.dtype) for s in ((6, 4, 1, 1), (3, 6, 1, 1)))
    first *= np.array([1, 20, 1, 1, 1, 0.1], net.dtype).reshape(-1, 1, 1, 1)
    first[2], first[3], second[:, 3], second[:, 4] = 0, 0, 0, 0
    y = net.node("Relu", net.node("Conv", "x", net.constant(first), net.weight(6)))
    return net.node("Conv", y, net.constant(second))


def almost_dead_channels(net: Net) -> str:
    first, second = (np.array(net.random.standard_normal(s), net.dtype) for s in ((6, 4, 1, 1), (3, 6, 1, 1)))
    first[0], second[:, 1] = first[0] * net.dtype.type(1e-4), second[:, 1] * net.dtype.type(1e-4)
    first[2] = 1e-30
    return net.node("Conv", net.node("Relu", net.node("Conv", "x", net.constant(first))), net.constant(second))


def clip(net: Net) -> str:
    y = net.node("Clip", net.conv("x", (4, 6), 1), net.constant(0.0), net.constant(1.0))
    y = net.conv(y, (6, 6), group=6, pads=[1, 1, 1, 1])
    return net.conv(net.node("Clip", y, net.constant(0.0), net.constant(0.5)), (6, 3), 1)


@dataclass(frozen=True)
class Case:
    build: Callable[[Net], str]
    regions: int = 1

    def __str__(self) -> str:
        return self.build.__name__


CASES = (
    Case(pair),
    Case(pair_without_bias),
    Case(triple, 2),
    Case(depthwise_with_multiplier, 2),
    Case(grouped, 2),
    Case(transposed, 3),
    Case(one_dimensional),
    Case(activations, 4),
    Case(residual_stream, 3),
    Case(sums_and_extremes),
    Case(constants_along),
    Case(space),
    Case(pool_flatten_gemm, 2),
    Case(flatten_of_space),
    Case(gemm_with_one_bias),
    Case(matmul),
    Case(channels_last, 2),
    Case(shared_weight),
    Case(weight_applied_twice),
    Case(shared_bias, 2),
    Case(dead_channels),
    Case(almost_dead_channels),
    Case(clip, 2),
)


def spread(model: onnx.ModelProto) -> float:
    """How much the channels of the weights differ: the variance of the logarithms of their ranges."""
    total = 0.0
    for tensor in model.graph.initializer:
        array = np.abs(onnx.numpy_helper.to_array(tensor).astype(np.float64))
        if array.ndim < 2 or 1 in array.shape[:2]:
            continue
        for axis in (0, 1):
            ranges = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1).max(axis=1)
            total += float(np.log(ranges[ranges > 0]).var())
    return total


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_function_stays_and_the_channels_become_even(case: Case, steps: int) -> None:
    before = model_of(case.build, is_uneven=True)
    after, facts = equalized(before, CrossLayerOptions(steps=steps, weight_threshold=0.0))
    assert len(facts.changed) == case.regions, facts
    assert spread(after) < spread(before)
    onnx.checker.check_model(after, full_check=True)
    assert_same(before, after, random_feed(before))


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_at_other_opsets(case: Case, opset: int) -> None:
    before = model_of(case.build, opset, seed=1, is_uneven=True)
    after, facts = equalized(before, OPTIONS)
    assert facts.changed
    assert_same(before, after, random_feed(before))


@pytest.mark.parametrize("case", [case for case in CASES if case.build is not space], ids=str)
def test_float16_stays_float16_and_in_its_range(case: Case) -> None:
    before = model_of(case.build, 21, dtype=np.float16, is_uneven=True)
    after, facts = equalized(before, OPTIONS)
    assert facts.changed
    assert {tensor.data_type for tensor in after.graph.initializer} <= {
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.INT64,
    }
    assert_same(before, after, random_feed(before), 2e-2)
