"""A part of a network in torch computes what ONNX Runtime computes, with quantizers and without, and has gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blocks_of_layers import FORMATS, quantized, quantized_copy
from onnx_models import Net, random_feed, residual, run_model, transformer_block

from quark.features.finetuning.block_fitting import TorchGraph, unsupported
from quark.features.finetuning.blocks import Block
from quark.onnx.graph import constant, input_value, piece
from quark.onnx.load import load
from quark.onnx.session import open_session
from quark.rounded import rounded

IMAGE, LINE, MATRIX, SEQUENCE = (2, 4, 9, 8), (2, 4, 11), (5, 6), (2, 5, 6)


def w(*shape):
    return lambda net: net.weight(*shape)


def ints(*numbers):
    return lambda net: net.integers(numbers)


def number(value):
    return lambda net: net.constant(value)


CASES = {
    "conv": ("Conv", IMAGE, (w(6, 4, 3, 3), w(6)), {}),
    "conv_asymmetric": ("Conv", IMAGE, (w(6, 4, 3, 3), w(6)), {"pads": [0, 1, 2, 1], "strides": [2, 1]}),
    "conv_dilated": ("Conv", IMAGE, (w(6, 4, 3, 2),), {"dilations": [2, 3], "pads": [2, 1, 2, 1]}),
    "conv_groups": ("Conv", IMAGE, (w(8, 1, 3, 3), w(8)), {"group": 4, "pads": [1] * 4}),
    "conv_upper": ("Conv", IMAGE, (w(6, 4, 4, 3), w(6)), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "conv_lower": ("Conv", IMAGE, (w(6, 4, 4, 3), w(6)), {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    "conv_valid": ("Conv", IMAGE, (w(6, 4, 3, 3), w(6)), {"auto_pad": "VALID"}),
    "conv_line": ("Conv", LINE, (w(6, 4, 3), w(6)), {"pads": [1, 0]}),
    "conv_volume": ("Conv", (1, 2, 5, 4, 6), (w(3, 2, 3, 2, 3), w(3)), {"pads": [1, 0, 1, 1, 1, 0]}),
    "transposed": ("ConvTranspose", IMAGE, (w(4, 6, 3, 3), w(6)), {"strides": [2, 2], "pads": [1, 0, 0, 1]}),
    "transposed_padding": (
        "ConvTranspose",
        IMAGE,
        (w(4, 3, 3, 3), w(6)),
        {"strides": [2, 3], "group": 2, "output_padding": [1, 2], "pads": [1] * 4},
    ),
    "transposed_dilated": ("ConvTranspose", LINE, (w(4, 6, 3),), {"dilations": [2], "strides": [3]}),
    "transposed_upper": (
        "ConvTranspose",
        IMAGE,
        (w(4, 6, 4, 3), w(6)),
        {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
    ),
    "transposed_lower": (
        "ConvTranspose",
        IMAGE,
        (w(4, 6, 4, 3), w(6)),
        {"strides": [2, 2], "auto_pad": "SAME_LOWER"},
    ),
    "gemm": ("Gemm", MATRIX, (w(4, 6), w(4)), {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    "gemm_turned": ("Gemm", MATRIX, (w(5, 3),), {"transA": 1}),
    "matmul": ("MatMul", SEQUENCE, (w(6, 4),), {}),
    "matmul_stacked": ("MatMul", SEQUENCE, (w(2, 6, 4),), {}),
    "relu": ("Relu", IMAGE, (), {}),
    "clip": ("Clip", IMAGE, (number(-0.5), number(1.5)), {}),
    "clip_above": ("Clip", IMAGE, (lambda net: "", number(1.5)), {}),
    "min": ("Min", IMAGE, (w(4, 1, 1),), {}),
    "max": ("Max", IMAGE, (w(4, 1, 1), number(0.2)), {}),
    "add": ("Add", IMAGE, (w(8),), {}),
    "sub": ("Sub", IMAGE, (w(4, 1, 1),), {}),
    "mul": ("Mul", IMAGE, (w(4, 1, 8),), {}),
    "div": ("Div", IMAGE, (number(3.0),), {}),
    "pow": ("Pow", IMAGE, (number(2.0),), {}),
    "leaky_relu": ("LeakyRelu", IMAGE, (), {"alpha": 0.2}),
    "p_relu": ("PRelu", IMAGE, (w(4, 1, 1),), {}),
    "sigmoid": ("Sigmoid", IMAGE, (), {}),
    "hard_sigmoid": ("HardSigmoid", IMAGE, (), {"alpha": 1 / 6}),
    "hard_swish": ("HardSwish", IMAGE, (), {}),
    "tanh": ("Tanh", IMAGE, (), {}),
    "gelu": ("Gelu", IMAGE, (), {}),
    "gelu_tanh": ("Gelu", IMAGE, (), {"approximate": "tanh"}),
    "erf": ("Erf", IMAGE, (), {}),
    "exp": ("Exp", IMAGE, (), {}),
    "neg": ("Neg", IMAGE, (), {}),
    "identity": ("Identity", IMAGE, (), {}),
    "softmax": ("Softmax", IMAGE, (), {}),
    "softmax_channels": ("Softmax", IMAGE, (), {"axis": 1}),
    "layer_norm": ("LayerNormalization", SEQUENCE, (w(6), w(6)), {"epsilon": 1e-3}),
    "layer_norm_wide": ("LayerNormalization", IMAGE, (w(9, 8),), {"axis": 2}),
    "instance_norm": ("InstanceNormalization", IMAGE, (w(4), w(4)), {}),
    "average": ("AveragePool", IMAGE, (), {"kernel_shape": [3, 2], "strides": [2, 2]}),
    "average_padded": ("AveragePool", IMAGE, (), {"kernel_shape": [3, 3], "pads": [1, 0, 2, 1], "strides": [2, 2]}),
    "average_counted": (
        "AveragePool",
        IMAGE,
        (),
        {"kernel_shape": [3, 3], "pads": [1] * 4, "strides": [2, 2], "count_include_pad": 1},
    ),
    "average_ceil": ("AveragePool", IMAGE, (), {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1}),
    "average_ceil_padded": (
        "AveragePool",
        IMAGE,
        (),
        {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1, "pads": [1, 1, 1, 0], "count_include_pad": 1},
    ),
    "average_same": ("AveragePool", IMAGE, (), {"kernel_shape": [4, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "average_dilated": ("AveragePool", IMAGE, (), {"kernel_shape": [3, 2], "dilations": [2, 2]}),
    "max_pool": ("MaxPool", IMAGE, (), {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 0, 1]}),
    "max_pool_ceil": ("MaxPool", IMAGE, (), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    "max_pool_dilated": ("MaxPool", IMAGE, (), {"kernel_shape": [3, 2], "dilations": [2, 3]}),
    "max_pool_line": ("MaxPool", LINE, (), {"kernel_shape": [4], "strides": [3], "auto_pad": "SAME_LOWER"}),
    "global_average": ("GlobalAveragePool", IMAGE, (), {}),
    "reduce_mean": ("ReduceMean", IMAGE, (ints(2, -1),), {"keepdims": 0}),
    "reduce_all": ("ReduceMean", IMAGE, (), {}),
    "reshape": ("Reshape", IMAGE, (ints(0, -1, 8),), {}),
    "flatten": ("Flatten", IMAGE, (), {"axis": 2}),
    "transpose": ("Transpose", IMAGE, (), {"perm": [0, 2, 3, 1]}),
    "transpose_all": ("Transpose", IMAGE, (), {}),
    "concat": ("Concat", IMAGE, (w(2, 3, 9, 8),), {"axis": 1}),
    "pad": ("Pad", IMAGE, (ints(0, 0, 1, 2, 0, 1, 0, 3), number(0.7)), {}),
    "pad_axes": ("Pad", IMAGE, (ints(1, 2, 0, 1), lambda net: "", ints(-1, 1)), {}),
    "squeeze": ("Squeeze", (2, 1, 5, 1), (ints(1, -1),), {}),
    "unsqueeze": ("Unsqueeze", MATRIX, (ints(0, -1),), {}),
}


def in_torch(model, inputs, outputs, feed, choices=None):
    graph = TorchGraph(model, Block((), inputs, outputs), choices or {})
    return graph(torch.from_numpy(feed), [])[0]


@pytest.mark.parametrize("case", CASES)
def test_an_operator_computes_what_the_runtime_computes(case):
    op_type, shape, more, attributes = CASES[case]
    net = Net(20)
    x = net.input("x", shape)
    proto = net.model(net.node(op_type, x, *(make(net) for make in more), output="y", **attributes))
    model = load(proto).model
    assert unsupported(model.graph) is None
    feed = random_feed(proto)
    assert_close(in_torch(model, "x", "y", feed["x"]).numpy(), run_model(proto, feed)["y"])


def test_a_batch_normalization_is_computed_as_in_inference():
    net = Net()
    proto = net.model(net.batch_norm(net.input("x", IMAGE), 4, epsilon=0.01, name="n", output="y"))
    feed = random_feed(proto)
    assert_close(in_torch(load(proto).model, "x", "y", feed["x"]).numpy(), run_model(proto, feed)["y"])


def linear_block():
    net = Net(20)
    x = net.node("LayerNormalization", net.input("x", (2, 5, 8)), net.weight(8), net.weight(8), name="norm")
    y = net.node("Gelu", net.node("MatMul", x, net.weight(8, 12), name="wide"))
    return net.model(net.node("Add", net.node("MatMul", y, net.weight(12, 8), name="narrow"), x, output="y"))


@pytest.mark.parametrize("make", [residual, linear_block, transformer_block])
@pytest.mark.parametrize("format", FORMATS)
def test_a_block_computes_what_the_quantized_network_computes(make, format):
    proto = make()
    found = quantized(proto, format)
    feed = random_feed(proto)
    for block in found.blocks:
        (x,) = run_part(found.model, list(feed), [block.input], feed)
        graph = TorchGraph(found.model, block, found.choices)
        actual, given = graph(torch.from_numpy(x), rounded_weights(found, block))
        (expected,) = run_part(quantized_copy(found), [block.input], [block.output], {block.input: x})
        assert_mostly_close(actual.numpy(), expected)
        assert len(given) == len(block.layers)


def test_gradients_reach_every_layer():
    proto = residual()
    found = quantized(proto)
    block = found.blocks[0]
    x = torch.from_numpy(random_feed(proto)[block.input])
    weights = [(weight.requires_grad_(), bias) for weight, bias in rounded_weights(found, block)]
    TorchGraph(found.model, block, found.choices)(x, weights)[0].square().sum().backward()
    for weight, _ in weights:
        assert float(weight.grad.abs().max()) > 0


def test_what_saturates_has_no_gradient():
    net = Net()
    proto = net.model(net.node("MatMul", net.input("x", (1, 3)), net.weight(3, 2), name="m", output="y"))
    found = quantized(proto)
    x = torch.tensor([[0.1, 100.0, -0.4]], requires_grad=True)
    graph = TorchGraph(found.model, found.blocks[0], found.choices)
    graph(x, rounded_weights(found, found.blocks[0]))[0].sum().backward()
    assert (x.grad != 0).tolist() == [[True, False, True]]


@pytest.mark.parametrize(
    ("op_type", "more", "attributes", "word"),
    [
        ("Resize", (lambda net: "", lambda net: net.constant(np.ones(4, np.float32))), {}, "not an operator"),
        ("Pad", (ints(0, 0, 1, 2, 0, 1, 0, 3),), {"mode": "reflect"}, "kind"),
        ("ConvTranspose", (w(4, 6, 3, 3),), {"output_shape": [11, 10]}, "kind"),
        ("Pow", (ints(2),), {}, "kind"),
        ("Reshape", (lambda net: net.input("shape", (2,), np.int64),), {}, "run time"),
    ],
)
def test_what_cannot_be_computed_is_named(op_type, more, attributes, word):
    net = Net()
    x = net.input("x", IMAGE)
    proto = net.model(net.node(op_type, x, *(make(net) for make in more), name="odd", output="y", **attributes))
    reason = unsupported(load(proto).model.graph)
    assert reason is not None
    assert reason.startswith(f"{op_type} 'odd' ")
    assert word in reason


def rounded_weights(found, block):
    """Weight and bias of each layer as the quantized network has them."""
    nodes = {node.name: node for node in found.model.graph}
    return [
        (torch.from_numpy(rounded(constant(input_value(nodes[layer.name], 1)), layer.weight)), None)
        for layer in block.layers
    ]


def run_part(model, inputs, outputs, feed):
    wanted = [name for name in outputs if name not in feed]
    if not wanted:
        return [feed[name] for name in outputs]
    session = open_session(piece(model, inputs, outputs), has_optimizations=False)
    names = [input_.name for input_ in session.get_inputs()]
    return session.run(outputs, {name: feed[name] for name in names})


def assert_close(actual, expected):
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * float(np.abs(expected).max()))


def assert_mostly_close(actual, expected):
    """All but those few that are rounded to the other side of a tie."""
    assert actual.shape == expected.shape
    is_close = np.isclose(actual, expected, rtol=1e-4, atol=1e-4 * float(np.abs(expected).max()))
    assert is_close.mean() > 0.98
    assert np.linalg.norm(actual - expected) < 0.02 * np.linalg.norm(expected)
