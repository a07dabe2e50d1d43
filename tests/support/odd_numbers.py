"""Numbers that a quantizer stumbles over: none at all, all alike, huge, tiny, of two widths in one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import TensorProto
from onnx_models import Net

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16


def empty_batch() -> onnx.ModelProto:
    """Tensors with no element, on their way to an output and on their way to a Concat."""
    net = Net()
    x = net.input("x", (0, 4))
    y = net.node("Relu", net.node("MatMul", x, net.weight(4, 3)))
    some = net.node("MatMul", net.input("some", (2, 4)), net.weight(4, 3))
    return net.model(y, net.node("MatMul", net.node("Concat", y, some, axis=0), net.weight(3, 2)))


def empty_weight() -> onnx.ModelProto:
    """A product over no element at all, which gives zeros."""
    net = Net()
    none = net.node("Slice", net.input("x", (2, 4)), *(net.integers([value]) for value in (0, 0, 1)))
    nothing = net.node("MatMul", none, net.constant(np.zeros((0, 4), np.float32)))
    return net.model(net.node("Gemm", net.node("Add", nothing, "x"), net.weight(4, 3), net.weight(3)))


def scaled(name: str, factor: float) -> onnx.ModelProto:
    """A product by weights of that size and one that undoes it."""
    net = Net()
    weight = net.random.standard_normal((6, 6)) / 2
    large = net.constant((weight * factor).astype(np.float32))
    small = net.constant((np.linalg.inv(weight) / factor).astype(np.float32))
    y = net.node("MatMul", net.node("MatMul", net.input("x", (4, 6)), large), small, name=name)
    return net.model(net.node("Relu", y))


def constant_activations() -> onnx.ModelProto:
    """Tensors whose every element is the same: zero, three, and minus a thousandth."""
    net = Net()
    none = net.node("Mul", net.input("x", (1, 3, 6, 6)), net.constant(0.0))
    parts = [net.conv(net.node("Add", none, net.constant(level)), (3, 4)) for level in (0.0, 3.0, -0.001)]
    return net.model(net.node("Concat", *parts, net.node("Relu", net.conv("x", (3, 4))), axis=1))


def zero_weights() -> onnx.ModelProto:
    net = Net()
    zeros = net.constant(np.zeros((4, 3, 3, 3), np.float32))
    y = net.node("Relu", net.node("Conv", net.input("x", (1, 3, 6, 6)), zeros, net.constant([0.0] * 4)))
    y = net.node("Flatten", net.node("Add", y, net.conv("x", (3, 4))))
    return net.model(net.node("Gemm", y, net.constant(np.zeros((64, 3), np.float32)), net.weight(3)))


def uneven_channels() -> onnx.ModelProto:
    """Channels of a millionth beside channels of a thousand, in the weights and in what goes through them."""
    net = Net()
    spread = np.logspace(-6, 3, 8).astype(np.float32)
    x = net.input("x", (1, 3, 6, 6))
    first = net.constant(spread[:, None, None, None] * net.random.standard_normal((8, 3, 1, 1)).astype(np.float32))
    last = net.constant(net.random.standard_normal((2, 8, 1, 1)).astype(np.float32))
    return net.model(net.node("Conv", net.node("Relu", net.node("Conv", x, first)), last))


def negative_only() -> onnx.ModelProto:
    """No number above zero: the zero point lies at the end of its range."""
    net = Net()
    y = net.node("Neg", net.node("Abs", net.conv(net.input("x", (1, 3, 6, 6)), (3, 4))))
    return net.model(net.conv(net.node("Sub", y, net.constant(5.0)), (4, 2), 1))


def mixed_half() -> onnx.ModelProto:
    """A float32 network with a middle of float16, and a weight of float16 that is cast before it is used."""
    net = Net()
    y = net.node("Cast", net.node("Relu", net.conv(net.input("x", (1, 3, 6, 6)), (3, 4))), to=FLOAT16)
    half = net.constant((net.random.standard_normal((4, 4, 1, 1)) / 2).astype(np.float16))
    y = net.node("Cast", net.node("Relu", net.node("Conv", y, half)), to=FLOAT)
    stored = net.constant((net.random.standard_normal((2, 4, 3, 3)) / 2).astype(np.float16))
    return net.model(net.node("Conv", y, net.node("Cast", stored, to=FLOAT)))


def half_attention() -> onnx.ModelProto:
    net = Net(dtype=np.float16)
    x = net.input("x", (2, 5, 8))
    q, k, v = (net.node("MatMul", x, net.weight(8, 8)) for _ in range(3))
    scores = net.node("Div", net.node("MatMul", q, net.node("Transpose", k, perm=[0, 2, 1])), net.constant(8.0))
    return net.model(net.node("Add", net.node("MatMul", net.node("Softmax", scores), v), x))


def half_inside_float_outside() -> onnx.ModelProto:
    """What converters to float16 write that keep the inputs and outputs as they were."""
    net = Net(dtype=np.float16)
    y = net.node("Cast", net.input("x", (2, 6), np.float32), to=FLOAT16)
    y = net.node("Gemm", net.node("Relu", net.node("Gemm", y, net.weight(6, 6), net.weight(6))), net.weight(6, 3))
    model = net.model(net.node("Cast", y, to=FLOAT))
    model.graph.output[0].type.tensor_type.elem_type = FLOAT
    return model


def integer_arithmetic() -> onnx.ModelProto:
    """Sums and products of integers, which nobody quantizes, beside those of floats."""
    net = Net()
    ids = net.input("ids", (2, 3), np.int64)
    twice = net.node("Mul", net.node("Add", ids, net.integers([1, 1, 1])), net.integers([2]))
    y = net.node("MatMul", net.node("Cast", twice, to=FLOAT), net.weight(3, 4))
    model = net.model(y, net.node("Concat", twice, ids, axis=0, output="both"))
    model.graph.output[1].type.tensor_type.elem_type = TensorProto.INT64
    return model


def one_number() -> onnx.ModelProto:
    """A network on scalars: products of rank one, a weight of one element."""
    net = Net()
    y = net.node("MatMul", net.input("x", (1,)), net.weight(1))
    return net.model(net.node("Add", net.node("Mul", y, net.constant([0.3])), net.input("s", ())))


def odd_widths() -> onnx.ModelProto:
    """Rows of 1, 7, 33 and 65 elements: no block of any format comes out even."""
    net = Net()
    y = net.input("x", (3, 7))
    for into, out in ((7, 33), (33, 65), (65, 1)):
        y = net.node("LeakyRelu", net.node("Gemm", y, net.weight(into, out), net.weight(out)), alpha=0.5)
    return net.model(net.node("MatMul", y, net.weight(1, 2)))


def saturated() -> onnx.ModelProto:
    """Everything ends up at the bounds of a Clip, and a bias is far beyond its products."""
    net = Net()
    weight, bias = net.weight(6, 4), net.constant([1000.0, -1000.0, 1000.0, 0.001])
    y = net.node("Gemm", net.input("x", (3, 6)), weight, bias)
    return net.model(net.node("MatMul", net.node("Clip", y, net.constant(0.0), net.constant(6.0)), net.weight(4, 2)))


_PLAIN: tuple[Callable[[], onnx.ModelProto], ...] = (
    *(empty_batch, empty_weight, constant_activations, zero_weights, uneven_channels, negative_only, mixed_half),
    *(half_attention, half_inside_float_outside, integer_arithmetic, one_number, odd_widths, saturated),
)
NUMBERS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    **{make.__name__: make for make in _PLAIN},
    "huge": lambda: scaled("huge", 1e30),
    "tiny": lambda: scaled("tiny", 1e-30),
}
