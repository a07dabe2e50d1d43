"""What a layer's output goes through, as training computes it, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper
from onnx_models import Net, run_model

from quark.features.finetuning.layers import activation_behind
from quark.features.finetuning.problem import Activation, Bounds
from quark.onnx.graph import infer_shapes

Array = np.ndarray[Any, Any]
Chain = Callable[[Net, str], str]
CHANNELS = 4


def by_channel(net: Net, low: float, high: float, axes: int = 2) -> str:
    values = np.linspace(low, high, CHANNELS, dtype=np.float32)
    return net.constant(values.reshape(CHANNELS, *[1] * axes))


def clip(net: Net, x: str, low: float | None, high: float | None) -> str:
    ends = ["" if value is None else net.constant(value) for value in (low, high)]
    return net.node("Clip", x, *ends)


CHAINS: dict[str, Chain] = {
    "Relu": lambda net, x: net.node("Relu", x),
    "Clip": lambda net, x: clip(net, x, -0.5, 0.7),
    "Clip without bounds": lambda net, x: net.node("Clip", x),
    "Clip from below": lambda net, x: clip(net, x, 0.1, None),
    "Clip from above": lambda net, x: clip(net, x, None, 0.2),
    "Clip whose bounds are crossed": lambda net, x: clip(net, x, 0.5, -0.5),
    "Min": lambda net, x: net.node("Min", x, net.constant(0.3)),
    "Max the other way round": lambda net, x: net.node("Max", net.constant(0.3), x),
    "Min per channel": lambda net, x: net.node("Min", x, by_channel(net, -1, 1)),
    "Max per channel, then Min": lambda net, x: net.node(
        "Min", net.node("Max", by_channel(net, -1, 1), x), net.constant(0.5)
    ),
    "Relu, then Min per channel": lambda net, x: net.node("Min", net.node("Relu", x), by_channel(net, 0.1, 1)),
    "bounds that exclude each other": lambda net, x: clip(net, clip(net, x, 0.5, 0.9), -0.2, 0.1),
    "the other way round": lambda net, x: clip(net, clip(net, x, -0.2, 0.1), 0.5, 0.9),
    "LeakyRelu": lambda net, x: net.node("LeakyRelu", x, alpha=0.3),
    "LeakyRelu by default": lambda net, x: net.node("LeakyRelu", x),
    "HardSwish": lambda net, x: net.node("HardSwish", x),
    "HardSigmoid": lambda net, x: net.node("HardSigmoid", x, alpha=0.4, beta=0.3),
    "HardSigmoid by default": lambda net, x: net.node("HardSigmoid", x),
    "Sigmoid": lambda net, x: net.node("Sigmoid", x),
    "Tanh": lambda net, x: net.node("Tanh", x),
    "Gelu": lambda net, x: net.node("Gelu", x),
    "Gelu by tanh": lambda net, x: net.node("Gelu", x, approximate="tanh"),
}


def computed(activation: Activation, flat: Array) -> Array:
    """What training makes of rows of outputs."""
    if isinstance(activation, Bounds):
        return np.clip(flat, activation.lowest, activation.highest)
    assert activation is not None
    return np.asarray(activation(torch.from_numpy(flat)))


def behind(model: Any, number: int = 0) -> tuple[Activation, str]:
    net = ir.serde.deserialize_model(model)
    infer_shapes(net)
    activation, value = activation_behind(list(net.graph)[number])
    return activation, str(value.name)


def convolution(chain: Chain) -> tuple[Net, str, str]:
    net = Net(opset=20)
    y = net.conv(net.input("x", (2, 3, 5, 6)), (3, CHANNELS))
    return net, y, chain(net, y)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_chains_behind_a_convolution(chain: Chain) -> None:
    net, y, out = convolution(chain)
    activation, name = behind(net.model(out))
    assert name == out
    x = np.random.default_rng(1).standard_normal((2, 3, 5, 6)).astype(np.float32)
    values = run_model(net.model(y, out), {"x": x})
    flat, expected = (np.moveaxis(values[value], 1, -1).reshape(-1, CHANNELS) for value in (y, out))
    np.testing.assert_allclose(computed(activation, flat), expected, rtol=1e-5, atol=1e-6)


def layers(net: Net) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Layers of CHANNELS outputs by operator: the output, its shape, and the axis of the channels."""
    x = net.input("x", (2, CHANNELS))
    tokens = net.input("tokens", (2, 3, CHANNELS))
    images = net.input("images", (2, CHANNELS, 3, 4))
    square = (CHANNELS, CHANNELS)
    return {
        "Gemm": (net.node("Gemm", x, net.weight(CHANNELS, CHANNELS), transB=1), (2, CHANNELS), 1),
        "MatMul": (net.node("MatMul", tokens, net.weight(*square)), (2, 3, CHANNELS), 2),
        "LayerNormalization": (net.node("LayerNormalization", tokens, net.weight(CHANNELS)), (2, 3, CHANNELS), 2),
        "ConvTranspose": (net.conv(images, square, op_type="ConvTranspose", group=2), (2, CHANNELS, 5, 6), 1),
        "InstanceNormalization": (
            net.node("InstanceNormalization", images, net.weight(CHANNELS), net.weight(CHANNELS)),
            (2, CHANNELS, 3, 4),
            1,
        ),
    }


@pytest.mark.parametrize("number", range(5))
def test_bounds_by_channel_of_every_layer(number: int) -> None:
    net = Net()
    kinds = layers(net)
    y, shape, axis = list(kinds.values())[number]
    out = net.node("Min", y, by_channel(net, -1, 1, len(shape) - 1 - axis))
    activation, name = behind(net.model(out), number)
    assert name == out
    assert isinstance(activation, Bounds)
    np.testing.assert_allclose(activation.highest, np.linspace(-1, 1, CHANNELS))


@pytest.mark.parametrize("number", range(5))
def test_bounds_along_another_axis_are_not_taken(number: int) -> None:
    net = Net()
    y, shape, axis = list(layers(net).values())[number]
    other = len(shape) - 1 if axis == 1 else len(shape) - 2
    if other == axis:
        other = 0
    sizes = [size if place == other else 1 for place, size in enumerate(shape)]
    out = net.node("Min", y, net.constant(np.zeros(sizes, np.float32)))
    assert behind(net.model(out), number) == (None, y)


def test_bounds_of_a_normalization_over_several_axes() -> None:
    net = Net()
    y = net.node("LayerNormalization", net.input("x", (2, 3, CHANNELS)), net.weight(3, CHANNELS), axis=1)
    out = net.node("Min", y, by_channel(net, -1, 1, 0))
    assert behind(net.model(out)) == (None, y)
    single = net.node("Relu", net.node("LayerNormalization", "x", net.weight(3, CHANNELS), axis=1))
    assert behind(net.model(single), 2) == (Bounds(0.0, float("inf")), single)


def test_an_output_that_is_read_twice_or_given_away_is_taken_as_it_is() -> None:
    net, y, out = convolution(CHAINS["Relu"])
    assert behind(net.model(out, y)) == (None, y)
    total = net.node("Add", out, y)
    assert behind(net.model(total)) == (None, y)


def test_a_chain_ends_where_someone_else_reads_it() -> None:
    net, _, middle = convolution(CHAINS["Relu"])
    end = net.node("Min", middle, net.constant(0.5))
    for model in (net.model(end, middle), net.model(net.node("Add", end, middle))):
        activation, name = behind(model)
        assert (activation, name) == (Bounds(0.0, float("inf")), middle)


def test_a_function_behind_bounds_is_left_alone() -> None:
    net, _, middle = convolution(CHAINS["Relu"])
    assert behind(net.model(net.node("Sigmoid", middle)))[1] == middle


@pytest.mark.parametrize(
    "chain",
    [
        lambda net, x: net.node("Clip", net.input("z", (2, CHANNELS, 3, 4)), x),  # is a bound there
        lambda net, x: net.node("Clip", x, net.input("low", ())),  # a bound that is computed
        lambda net, x: net.node("Min", x, net.input("other", (1,))),
        lambda net, x: net.node("Min", x, net.constant(1.0), net.constant(2.0)),
        lambda net, x: net.node("Softmax", x),
        lambda net, x: net.node("Add", x, x),
        lambda net, x: net.node("Min", x, net.weight(6)),  # along the width
        lambda net, x: net.node("Relu", x, domain="other"),
    ],
)
def test_what_is_not_known_is_not_taken(chain: Chain) -> None:
    net, y, out = convolution(chain)
    assert behind(net.model(out)) == (None, y)


def test_a_branch_that_captures_is_no_activation() -> None:
    net = Net()
    flag = net.input("flag", (), dtype=np.bool_)
    y = net.conv(net.input("x", (1, 2, 4, 4)), (2, 2))
    branches = {}
    for key, inputs, op_type in (("then_branch", [y], "Relu"), ("else_branch", ["x"], "Identity")):
        out = helper.make_tensor_value_info(f"{key}_out", TensorProto.FLOAT, None)
        branches[key] = helper.make_graph([helper.make_node(op_type, inputs, [out.name])], key, [], [out])
    assert behind(net.model(net.node("If", flag, **branches))) == (None, y)
