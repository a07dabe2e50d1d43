"""Graphs in which SmoothQuant has something to do, with where it should do it. `CASES` has them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper
from onnx_models import Net


def layer_norm(net, x, width, has_bias=True):
    gains = net.constant(np.geomspace(0.1, 20, width).astype(net.dtype))
    return net.node("LayerNormalization", x, gains, *([net.weight(width)] if has_bias else []), axis=-1)


def norm_to_three(net):
    y = layer_norm(net, net.input("x", (2, 9, 16)), 16)
    return [net.node("MatMul", y, net.weight(16, size)) for size in (8, 12, 16)]


def norm_without_bias(net):
    y = layer_norm(net, net.input("x", (2, 9, 16)), 16, has_bias=False)
    return [net.node("MatMul", y, net.weight(16, 8))]


def norm_and_residual(net):
    y = layer_norm(net, net.input("x", (2, 9, 16)), 16)
    return [net.node("Add", net.node("MatMul", y, net.weight(16, 16)), y)]


def norm_that_is_an_output(net):
    y = layer_norm(net, net.input("x", (2, 9, 16)), 16)
    return [y, net.node("MatMul", y, net.weight(16, 16))]


def norm_in_a_branch(net):
    """The If reads the tensor as well, from inside."""
    y = layer_norm(net, net.input("x", (2, 9, 16)), 16)
    branches = {}
    for key, op_type in (("then_branch", "Relu"), ("else_branch", "Neg")):
        out = helper.make_tensor_value_info(f"{key}_out", TensorProto.FLOAT, None)
        branches[key] = helper.make_graph([helper.make_node(op_type, [y], [out.name])], key, [], [out])
    flag = net.input("flag", (), dtype=np.bool_)
    return [net.node("If", flag, **branches), net.node("MatMul", y, net.weight(16, 4))]


def product_with_constants(net):
    x = net.node("Tanh", net.input("x", (2, 9, 16)))
    y = net.node("Add", net.node("Mul", x, net.constant(np.geomspace(1, 50, 16).astype(np.float32))), net.weight(16))
    return [net.node("MatMul", y, net.weight(16, 8))]


def scalar_factor(net):
    return [
        net.node(
            "MatMul", net.node("Mul", net.node("Tanh", net.input("x", (40, 16))), net.constant(3.0)), net.weight(16, 8)
        )
    ]


def quotient(net):
    x = net.node("Tanh", net.input("x", (40, 16)))
    return [
        net.node(
            "MatMul", net.node("Div", x, net.constant(np.geomspace(1, 50, 16).astype(np.float32))), net.weight(16, 8)
        )
    ]


def constant_over_data(net):
    x = net.node("Exp", net.node("Tanh", net.input("x", (40, 16))))
    return [net.node("MatMul", net.node("Div", net.constant(2.0), x), net.weight(16, 8))]


def gemms(net):
    """Both turned, with a bias of every shape."""
    x = net.input("x", (40, 12))
    y = net.node("Relu", net.node("Gemm", x, net.weight(16, 12), net.constant(0.3), transB=1, alpha=0.5, beta=2.0))
    y = net.node("LeakyRelu", net.node("Gemm", y, net.weight(16, 20), net.weight(1, 20)))
    return [net.node("Gemm", y, net.weight(6, 20), net.weight(6), transB=1)]


def turned_gemm(net):
    y = net.node("MatMul", net.weight(16, 12), net.input("x", (12, 40)))
    return [net.node("Gemm", net.node("Relu", y), net.weight(16, 6), transA=1)]


def left_weight(net):
    y = net.node("Relu", net.node("MatMul", net.weight(16, 12), net.input("x", (2, 12, 40))))
    return [net.node("MatMul", net.weight(6, 16), y)]


def stack_of_weights(net):
    y = net.node("Relu", net.node("MatMul", net.input("x", (3, 40, 12)), net.weight(3, 12, 16)))
    return [net.node("MatMul", y, net.weight(3, 16, 8))]


def vectors(net):
    y = net.node("Relu", net.node("MatMul", net.input("x", (40, 12)), net.weight(12, 16)))
    return [net.node("MatMul", y, net.weight(16))]


def convs(net):
    y = net.node("PRelu", net.conv(net.input("x", (1, 4, 12, 12)), (4, 12), pads=[1] * 4), net.weight(12, 1, 1))
    y = net.node("MaxPool", net.conv(y, (12, 12), group=3), kernel_shape=[2, 2])
    y = net.node("AveragePool", net.conv(y, (12, 12), group=12, pads=[1] * 4, has_bias=False), kernel_shape=[2, 2])
    return [net.conv(y, (12, 4), 1)]


def transposed_convs(net):
    y = net.node("Relu", net.conv(net.input("x", (1, 4, 9, 9)), (4, 6), group=2, op_type="ConvTranspose"))
    return [net.conv(net.node("Relu", net.conv(y, (6, 8), op_type="ConvTranspose")), (8, 4), group=2)]


def pooled(net):
    y = net.node("Relu", net.conv(net.input("x", (4, 4, 9, 9)), (4, 16)))
    return [net.node("Gemm", net.node("Flatten", net.node("GlobalAveragePool", y)), net.weight(16, 5))]


def flattened(net):
    """Channels of the Gemm are places of the Conv's output: no factor for a channel of that."""
    y = net.node("Relu", net.conv(net.input("x", (4, 4, 5, 5)), (4, 6)))
    return [net.node("Gemm", net.node("Flatten", y), net.weight(54, 5))]


def batch_norm(net):
    y = net.batch_norm(net.node("Tanh", net.input("x", (2, 6, 9, 9))), 6)
    return [net.conv(y, (6, 4))]


def other_norms(net):
    y = net.node("InstanceNormalization", net.input("x", (2, 6, 9, 9)), net.weight(6), net.weight(6))
    y = net.conv(y, (6, 8))
    return [net.conv(net.node("GroupNormalization", y, net.weight(8), net.weight(8), num_groups=2), (8, 4))]


def rms_norm(net):
    y = net.node(
        "RMSNormalization", net.input("x", (2, 9, 16)), net.constant(np.geomspace(0.1, 9, 16).astype(np.float32))
    )
    return [net.node("MatMul", y, net.weight(16, 8))]


def skip_norms(net):
    """What ONNX Runtime makes of a sum and a norm."""
    net.domains["com.microsoft"] = 1
    gains = [net.constant(np.geomspace(0.1, 9, 16).astype(np.float32)) for _ in range(2)]
    x, z = net.input("x", (2, 9, 16)), net.input("z", (2, 9, 16))
    y = net.node("SkipLayerNormalization", x, z, gains[0], net.weight(16), domain="com.microsoft")
    y = net.node("MatMul", y, net.weight(16, 16))
    y = net.node("SkipSimplifiedLayerNormalization", y, z, gains[1], domain="com.microsoft")
    return [net.node("MatMul", y, net.weight(16, 8))]


def attention(net):
    """The factor of the last layer's input goes through the heads to the layer that makes the values."""
    x = net.input("x", (2, 20, 12))
    q, k, v = (net.node("Add", net.node("MatMul", x, net.weight(12, 16)), net.weight(16)) for _ in range(3))
    q, k, v = (net.node("Reshape", value, net.integers([0, 0, 4, 4])) for value in (q, k, v))
    q, v, k = (
        net.node("Transpose", value, perm=p) for value, p in ((q, [0, 2, 1, 3]), (v, [0, 2, 1, 3]), (k, [0, 2, 3, 1]))
    )
    mixed = net.node("MatMul", net.node("Softmax", net.node("MatMul", q, k), axis=-1), v)
    joined = net.node("Reshape", net.node("Transpose", mixed, perm=[0, 2, 1, 3]), net.integers([0, 0, 16]))
    return [net.node("MatMul", joined, net.weight(16, 12))]


def rows_of_a_product(net):
    """The rows of one product become the channels of the next."""
    a = net.node("Relu", net.node("MatMul", net.weight(16, 12), net.input("x", (12, 8))))
    y = net.node("Transpose", net.node("MatMul", a, net.input("z", (8, 30))))
    return [net.node("MatMul", y, net.weight(16, 6))]


def from_an_input(net):
    return [net.node("MatMul", net.input("x", (40, 16)), net.weight(16, 8))]


def behind_gelu(net):
    y = net.node("Gelu", net.node("MatMul", net.input("x", (40, 12)), net.weight(12, 16)))
    return [net.node("MatMul", y, net.weight(16, 8))]


def broadcast_sum(net):
    """The channels come from the constant alone."""
    y = net.node("Add", net.node("MatMul", net.input("x", (40, 12)), net.weight(12, 1)), net.weight(16))
    return [net.node("MatMul", y, net.weight(16, 8))]


@dataclass(frozen=True)
class Case:
    """A graph, the operators that take factors in, and the Mul nodes that are inserted."""

    build: Callable[[Net], list[str]]
    into: tuple[str, ...] = ()
    muls: int = 0
    opset: int = 17

    def __str__(self) -> str:
        return self.build.__name__

    def model(self):
        net = Net(self.opset)
        outputs = self.build(net)
        return net.model(*outputs)


CASES = [
    Case(norm_to_three, ("LayerNormalization",)),
    Case(norm_without_bias, ("LayerNormalization",)),
    Case(norm_and_residual, muls=1),
    Case(norm_that_is_an_output, muls=1),
    Case(norm_in_a_branch, muls=1),
    Case(product_with_constants, ("Mul",)),
    Case(scalar_factor, ("Mul",)),
    Case(quotient, ("Div",)),
    Case(constant_over_data, ("Div",)),
    Case(gemms, ("Gemm", "Gemm"), muls=1),
    Case(turned_gemm, ("MatMul",), muls=1),
    Case(left_weight, ("MatMul",), muls=1),
    Case(stack_of_weights, ("MatMul",), muls=1),
    Case(vectors, ("MatMul",), muls=1),
    Case(convs, ("Conv", "Conv", "Conv"), muls=1),
    Case(transposed_convs, ("ConvTranspose", "ConvTranspose"), muls=1),
    Case(pooled, ("Conv",), muls=1),
    Case(flattened, muls=2),
    Case(batch_norm, ("BatchNormalization",)),
    Case(other_norms, ("InstanceNormalization", "GroupNormalization"), opset=21),
    Case(rms_norm, ("RMSNormalization",), opset=23),
    Case(skip_norms, ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")),
    Case(attention, ("MatMul",), muls=1),
    Case(rows_of_a_product, ("MatMul",), muls=1),
    Case(from_an_input, muls=1),
    Case(behind_gelu, muls=2, opset=20),
    Case(broadcast_sum, muls=2),
]
