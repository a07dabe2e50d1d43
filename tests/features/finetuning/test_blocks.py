"""Blocks have one input and one output, hold every layer once, and are those that a person would draw."""

from __future__ import annotations

import onnxruntime
import pytest
from blocks_of_layers import names, quantized
from onnx_models import Net, residual, transformer_block

from quark.features.finetuning.blocks import LONGEST, nodes_of
from quark.onnx.graph import piece
from quark.onnx.session import open_session


def layer(net, x, channels, name, kernel=1, **attributes):
    into, out = channels
    weight = net.weight(out, into // attributes.get("group", 1), kernel, kernel)
    return net.node("Conv", x, weight, net.weight(out), name=name, pads=[kernel // 2] * 4, **attributes)


def chain(count):
    net = Net()
    x = net.input("x", (1, 4, 6, 6))
    for number in range(count):
        x = net.node("Relu", layer(net, x, (4, 4), f"c{number}"))
    return net.model(x)


def residual_network():
    """A stem, a block with a convolution in its shortcut, one with a plain shortcut, and a head."""
    net = Net()
    x = net.node("Relu", layer(net, net.input("x", (1, 3, 8, 8)), (3, 4), "stem"))
    x = net.node("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    y = net.node("Relu", layer(net, x, (4, 4), "a1", 3))
    x = net.node("Relu", net.node("Add", layer(net, y, (4, 6), "a2"), layer(net, x, (4, 6), "a3")), output="after_a")
    y = net.node("Relu", layer(net, x, (6, 6), "b1", 3))
    x = net.node("Relu", net.node("Add", layer(net, y, (6, 6), "b2"), x), output="after_b")
    x = net.node("Flatten", net.node("GlobalAveragePool", x))
    return net.model(net.node("Gemm", x, net.weight(6, 5), net.weight(5), name="head", output="y"))


def activation_first():
    """The shortcut leaves before the activation that the first layer reads behind."""
    net = Net()
    x = layer(net, net.input("x", (1, 4, 6, 6)), (4, 4), "stem")
    for number in range(2):
        y = layer(net, net.node("Relu", x), (4, 4), f"first{number}", 3)
        x = net.node("Add", x, layer(net, net.node("Relu", y), (4, 4), f"second{number}"))
    return net.model(x)


def inverted():
    """Expansion, depthwise, projection: the first time without a shortcut; swish taken apart."""
    net = Net()
    x = net.input("x", (1, 4, 6, 6))
    for number in range(2):
        y = layer(net, x, (4, 8), f"expand{number}")
        y = net.node("Mul", y, net.node("Sigmoid", y))
        y = layer(net, net.node("Relu", layer(net, y, (8, 8), f"deep{number}", 3, group=8)), (8, 4), f"project{number}")
        x = net.node("Add", x, y) if number else y
    return net.model(x)


def far_skip():
    """What the first half computes is read far behind, past more layers than a block has."""
    net = Net()
    x = first = layer(net, net.input("x", (1, 4, 6, 6)), (4, 4), "first")
    for number in range(LONGEST + 2):
        x = net.node("Relu", layer(net, x, (4, 4), f"c{number}"))
    return net.model(net.node("Concat", x, first, axis=1))


def two_heads():
    net = Net()
    x = layer(net, net.input("x", (1, 4, 6, 6)), (4, 4), "trunk")
    y = net.node("Add", layer(net, net.node("Relu", layer(net, x, (4, 4), "a")), (4, 4), "b"), x)
    return net.model(layer(net, y, (4, 2), "left"), layer(net, y, (4, 3), "right"))


NETWORKS = [residual_network, activation_first, inverted, far_skip, two_heads, residual, transformer_block]
NETWORKS += [lambda: chain(3), lambda: chain(2 * LONGEST + 1)]


@pytest.mark.parametrize("make", NETWORKS)
def test_every_layer_is_in_one_block_in_order(make):
    found = quantized(make())
    assert [layer for block in found.blocks for layer in block.layers] == found.layers
    assert all(1 <= len(block.layers) <= LONGEST for block in found.blocks)


@pytest.mark.parametrize("make", NETWORKS)
def test_a_block_computes_its_output_from_its_input_alone(make):
    found = quantized(make())
    for block in found.blocks:
        part = piece(found.model, [block.input], [block.output])
        session = open_session(part)
        assert isinstance(session, onnxruntime.InferenceSession)
        assert [input_.name for input_ in session.get_inputs()] == [block.input]
        computed = {node.name for node in nodes_of(found.model, block)}
        assert {layer.name for layer in block.layers} == {layer.name for layer in found.layers} & computed


def test_residual_blocks_have_their_shortcuts_and_the_activation_behind():
    found = quantized(residual_network()).blocks
    assert names(found) == [("stem",), ("a1", "a2", "a3"), ("b1", "b2"), ("head",)]
    assert [block.output for block in found][1:] == ["after_a", "after_b", "y"]


def test_a_shortcut_that_leaves_before_the_activation_is_found():
    assert names(quantized(activation_first()).blocks) == [
        ("stem",),
        ("first0", "second0"),
        ("first1", "second1"),
    ]


def test_layers_without_a_shortcut_are_a_chain():
    expected = [tuple(f"{value}{number}" for value in ("expand", "deep", "project")) for number in range(2)]
    assert names(quantized(inverted()).blocks) == expected


def test_a_long_chain_is_cut_into_equal_parts():
    assert [len(block.layers) for block in quantized(chain(2 * LONGEST + 1)).blocks] == [6, 6, 5]


def test_what_is_read_far_behind_ends_a_chain():
    found = quantized(far_skip()).blocks
    assert names(found)[0] == ("first",)
    assert sum(len(block.layers) for block in found) == LONGEST + 3


def test_several_outputs_do_not_hide_a_residual_block():
    assert names(quantized(two_heads()).blocks) == [("trunk",), ("a", "b"), ("left",), ("right",)]
