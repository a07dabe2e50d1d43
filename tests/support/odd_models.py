"""Models that a quantizer stumbles over: odd shapes, odd wiring, odd names. `ODD_MODELS` has them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx_models import Array, Net, random_feed

FLOAT = TensorProto.FLOAT


def conv1d() -> onnx.ModelProto:
    net = Net()
    y = net.node("Relu", net.node("Conv", net.input("x", (2, 4, 16)), net.weight(6, 4, 3), net.weight(6), pads=[1, 1]))
    return net.model(net.node("Conv", y, net.weight(4, 6, 3), dilations=[2]))


def conv3d() -> onnx.ModelProto:
    net = Net()
    y = net.node("Conv", net.input("x", (1, 2, 5, 5, 5)), net.weight(4, 2, 3, 3, 3), net.weight(4), pads=[1] * 6)
    return net.model(net.node("MaxPool", net.node("Relu", y), kernel_shape=[2] * 3, strides=[2] * 3))


def grouped() -> onnx.ModelProto:
    net = Net()
    y = net.conv(net.input("x", (1, 8, 9, 9)), (8, 12), group=4, dilations=[2, 2], pads=[2] * 4)
    y = net.node("Clip", y, net.constant(0.0), net.constant(6.0))
    return net.model(net.conv(y, (12, 12), group=12, strides=[2, 2]))


def transposed() -> onnx.ModelProto:
    net = Net()
    more = {"op_type": "ConvTranspose", "strides": [2, 2], "output_padding": [1, 1]}
    y = net.node("Relu", net.conv(net.input("x", (1, 4, 5, 5)), (4, 6), group=2, **more))
    return net.model(net.conv(y, (6, 3), **more))


def gemm_forms() -> onnx.ModelProto:
    """Every way to be a Gemm, with biases of every rank."""
    net = Net()
    x = net.input("x", (4, 8))
    turned = net.node("Transpose", x, perm=[1, 0])
    parts = [
        net.node("Gemm", x, net.weight(8, 6), net.weight(6), alpha=0.5, beta=2.0),
        net.node("Gemm", x, net.weight(6, 8), net.weight(1, 6), transB=1, alpha=3.0),
        net.node("Gemm", turned, net.weight(8, 6), net.weight(4, 6), transA=1, beta=0.5),
        net.node("Gemm", x, net.weight(8, 6), net.constant(0.3)),
        net.node("Gemm", x, net.weight(8, 6), net.constant([0.7]), alpha=-1.0),
        net.node("Gemm", x, net.weight(8, 6)),
        net.node("Gemm", x, net.weight(8, 6), net.input("z", (4, 6)), beta=0.5),
    ]
    return net.model(net.node("Sum", *parts))


def products() -> onnx.ModelProto:
    """MatMul of many dimensions, of vectors, and with the constant on the left."""
    net = Net()
    x, v = net.input("x", (2, 3, 4, 8)), net.input("v", (8,))
    y = net.node("MatMul", net.node("MatMul", x, net.input("z", (2, 3, 8, 5))), net.weight(3, 5, 6))
    parts = net.node("MatMul", v, net.weight(8, 6)), net.node("MatMul", x, net.weight(8))
    return net.model(y, *parts, net.node("MatMul", net.weight(6, 4), x), net.node("MatMul", net.weight(4), x))


def shared_weights() -> onnx.ModelProto:
    """One weight for Gemm, for Gemm turned, for MatMul, and as data; a bias that is a factor, too."""
    net = Net()
    x, w, b = net.input("x", (8, 8)), net.weight(8, 8), net.weight(8)
    y = net.node("Gemm", net.node("Relu", net.node("Gemm", x, w, b)), w, b, transB=1)
    return net.model(net.node("Add", net.node("MatMul", y, w), net.node("Mul", net.node("Mul", w, b), x)))


def wiring() -> onnx.ModelProto:
    """Outputs that are read inside, an output behind a Relu and before it, an input and a constant as outputs."""
    net = Net()
    x, w = net.input("x", (1, 4, 6, 6)), net.weight(2, 2)
    inner = net.node("Relu", net.conv(x, (4, 4)))
    before = net.conv(inner, (4, 4))
    return net.model(inner, before, net.node("Relu", before), x, w)


def twice() -> onnx.ModelProto:
    """Nodes that read one tensor more than once."""
    net = Net()
    x = net.input("x", (4, 4))
    y = net.node("Add", x, x)
    y = net.node("Mul", net.node("MatMul", y, y), y)
    return net.model(net.node("Gemm", net.node("Concat", y, y, axis=0), net.weight(4, 4), net.weight(4)))


def constants_as_data() -> onnx.ModelProto:
    """Concat of constants and an empty one, Gather from a table, a constant far larger than the data beside it."""
    net = Net()
    x, ids = net.input("x", (2, 4)), net.input("ids", (2,), np.int64)
    table = net.node("Gather", net.weight(10, 4), ids)
    known = net.node("Concat", net.weight(1, 4), net.weight(1, 4), net.constant(np.zeros((0, 4), np.float32)), axis=0)
    large = net.constant(np.full((2, 4), 40.0, np.float32))
    joined = net.node("Concat", net.node("MatMul", x, net.weight(4, 4)), table, known, large, axis=1)
    return net.model(net.node("MatMul", joined, net.weight(16, 3)))


def split() -> onnx.ModelProto:
    net = Net()
    y = net.node("MatMul", net.input("x", (8, 12)), net.weight(12, 12))
    a, b, c = net.nodes_of("Split", y, net.integers([2, 4, 6]), outputs=["a", "b", "c"], axis=1)
    return net.model(net.node("Relu", a), b, net.node("MatMul", c, net.weight(6, 3)))


def scalars() -> onnx.ModelProto:
    net = Net()
    return net.model(net.node("Sigmoid", net.node("Mul", net.input("x", ()), net.constant(2.5))))


def dynamic() -> onnx.ModelProto:
    """Symbolic batch, height and width, and an input of unknown rank."""
    net = Net()
    x = net.input("x", ("N", 3, "H", "W"))
    net.inputs.append(helper.make_tensor_value_info("scores", FLOAT, None))
    y = net.node("Flatten", net.node("GlobalAveragePool", net.node("Relu", net.conv(x, (3, 4), pads=[1] * 4))))
    return net.model(
        net.node("Gemm", y, net.weight(4, 3), net.weight(3)), net.node("MatMul", "scores", net.weight(2, 4))
    )


def half() -> onnx.ModelProto:
    net = Net(dtype=np.float16)
    y = net.node("Relu", net.conv(net.input("x", (1, 3, 8, 8)), (3, 4)))
    y = net.node("Flatten", net.node("GlobalAveragePool", y))
    return net.model(net.node("MatMul", net.node("Gemm", y, net.weight(4, 3), net.weight(3)), net.weight(3, 2)))


def double() -> onnx.ModelProto:
    net = Net(dtype=np.float64)
    return net.model(net.node("Relu", net.node("MatMul", net.input("x", (2, 4)), net.weight(4, 3))))


def embedding() -> onnx.ModelProto:
    net = Net()
    words = net.node("Gather", net.weight(10, 8), net.input("ids", (2, 5), np.int64))
    y = net.node("LayerNormalization", net.node("Add", words, net.weight(5, 8)), net.weight(8), net.weight(8), axis=-1)
    return net.model(net.node("MatMul", y, net.weight(8, 4)))


def attention() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", (2, 5, 8))
    q, k, v = (net.node("Add", net.node("MatMul", x, net.weight(8, 8)), net.weight(8)) for _ in range(3))
    heads = net.integers([2, 5, 2, 4])
    q, k, v = (net.node("Transpose", net.node("Reshape", part, heads), perm=[0, 2, 1, 3]) for part in (q, k, v))
    scores = net.node("Div", net.node("MatMul", q, net.node("Transpose", k, perm=[0, 1, 3, 2])), net.constant(8.0))
    mixed = net.node("Transpose", net.node("MatMul", net.node("Softmax", scores), v), perm=[0, 2, 1, 3])
    return net.model(net.node("MatMul", net.node("Reshape", mixed, net.integers([2, 5, 8])), net.weight(8, 8)))


def loops() -> onnx.ModelProto:
    """A Loop whose body captures a weight, an If whose branches capture a tensor."""
    net = Net()
    w = net.weight(4, 4, name="w")
    y = net.node("Relu", net.node("MatMul", net.input("x", (2, 4)), w), output="r")
    parts = [("MatMul", "h", w, "m"), ("Tanh", "m", "t"), ("Identity", "more", "goes_on")]
    nodes = [helper.make_node(op, inputs, [out], name=f"in_{op}") for op, *inputs, out in parts]
    infos = [helper.make_tensor_value_info(name, kind, []) for name, kind in (("i", 7), ("more", 9), ("goes_on", 9))]
    state = [helper.make_tensor_value_info(name, FLOAT, [2, 4]) for name in ("h", "t")]
    body = helper.make_graph(nodes, "body", [*infos[:2], state[0]], [infos[2], state[1]])
    times, yes = net.constant(np.array(2, np.int64)), net.constant(np.array(True))
    z = net.node("Loop", times, yes, y, body=body)
    branches = {}
    for key, op_type in (("then_branch", "Sigmoid"), ("else_branch", "Neg")):
        out = helper.make_tensor_value_info(f"{key}_out", FLOAT, [2, 4])
        branches[key] = helper.make_graph([helper.make_node(op_type, ["r"], [out.name], name=key)], key, [], [out])
    chosen = net.node("If", net.input("flag", (), np.bool_), **branches)
    return net.model(net.node("MatMul", net.node("Concat", z, chosen, axis=1), net.weight(8, 3)))


def recurrent() -> onnx.ModelProto:
    net = Net()
    x = net.node("MatMul", net.input("x", (5, 2, 4)), net.weight(4, 4))
    _, hidden, _ = net.nodes_of(
        "LSTM", x, net.weight(1, 12, 4), net.weight(1, 12, 3), outputs=["Y", "H", "C"], hidden_size=3
    )
    y, _ = net.nodes_of("GRU", x, net.weight(1, 9, 4), net.weight(1, 9, 3), outputs=["Y2", "H2"], hidden_size=3)
    return net.model(net.node("MatMul", net.node("Squeeze", hidden, net.integers([0])), net.weight(3, 2)), y)


def resize(mode: str) -> onnx.ModelProto:
    net = Net()
    y = net.conv(net.input("x", (1, 3, 4, 4)), (3, 4), pads=[1] * 4)
    y = net.node("Resize", y, "", net.constant([1.0, 1.0, 2.0, 2.0]), mode=mode)
    return net.model(net.conv(y, (4, 2), 1))


def pad(mode: str, *value: float) -> onnx.ModelProto:
    net = Net()
    y = net.conv(net.input("x", (1, 3, 6, 6)), (3, 3), 1)
    y = net.node("Pad", y, net.integers([0, 0, 1, 1, 0, 0, 2, 1]), *map(net.constant, value), mode=mode)
    return net.model(net.conv(y, (3, 2)))


def extremes() -> onnx.ModelProto:
    """Weights of 1e20 and 1e-20, channels of zeros with and without a bias."""
    net = Net()
    x = net.input("x", (1, 3, 6, 6))
    weight = net.random.standard_normal((4, 3, 3, 3)).astype(np.float32)
    weight[1] = 0
    y = net.node("Conv", x, net.constant(weight * 1e20), net.constant([1e20, 5e20, -2e20, 0.0]))
    y = net.node("Conv", y, net.constant(np.full((2, 4, 1, 1), 1e-20, np.float32)))
    nothing = net.node("Conv", x, net.constant(np.zeros((2, 3, 3, 3), np.float32)), net.constant([0.0, 0.0]))
    return net.model(net.node("Add", y, nothing))


def activations() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", (2, 4, 6, 6))
    y = net.node("InstanceNormalization", net.conv(x, (4, 4), pads=[1] * 4), net.weight(4), net.weight(4))
    y = net.node("HardSwish", net.node("LeakyRelu", net.node("PRelu", y, net.weight(4, 1, 1)), alpha=0.1))
    y = net.node("Clip", net.node("Mean", net.node("Max", y, x), net.node("Sum", x, y)), "", net.constant(2.0))
    return net.model(net.node("DepthToSpace", y, blocksize=2))


def names() -> onnx.ModelProto:
    """Odd, very long and empty names, and those that a quantizer would like to give."""
    net = Net()
    x = net.input("in put/ü:0", (2, 4))
    y = net.node("MatMul", x, net.weight(4, 4, name="w:0"), name="a b/c.*[", output="n" * 3000)
    y = net.node("Add", y, net.weight(4, name="w:0_scale"), name="a b/c.*[(", output="w:0_quantized")
    y = net.node("Relu", y, output=f"{x}_QuantizeLinear_output")
    model = net.model(net.node("MatMul", y, net.weight(4, 4, name=f"{x}_zero_point"), output="out put"))
    model.graph.node[2].name = ""
    return model


def of_opset(opset: int) -> onnx.ModelProto:
    net = Net(opset)
    y = net.batch_norm(net.conv(net.input("x", (1, 3, 8, 8)), (3, 4), pads=[1] * 4), 4)
    bounds = {"min": 0.0, "max": 6.0} if opset < 11 else {}
    y = net.node("Clip", y, *([] if bounds else [net.constant(0.0), net.constant(6.0)]), **bounds)
    y = net.node("Reshape", net.node("AveragePool", y, kernel_shape=[2, 2], strides=[2, 2]), net.integers([1, -1]))
    return net.model(net.node("Softmax", net.node("Gemm", y, net.weight(64, 5), net.weight(5)), axis=1))


_PLAIN: tuple[Callable[[], onnx.ModelProto], ...] = (
    *(conv1d, conv3d, grouped, transposed, gemm_forms, products, shared_weights, wiring, twice, constants_as_data),
    *(split, scalars, dynamic, half, double, embedding, attention, loops, recurrent, extremes, activations, names),
)
ODD_MODELS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    **{make.__name__: make for make in _PLAIN},
    **{f"resize {mode}": partial(resize, mode) for mode in ("nearest", "linear", "cubic")},
    **{f"pad {mode}": partial(pad, mode) for mode in ("constant", "reflect", "edge")},
    "pad with -7": lambda: pad("constant", -7.0),
    **{f"opset {opset}": partial(of_opset, opset) for opset in (7, 9, 11, 12, 13, 18, 21, 23)},
}


def odd_feed(model: onnx.ModelProto, seed: int) -> dict[str, Array]:
    """Values for every input: indices within their tables, and two columns for an input of unknown rank."""
    feed, random = random_feed(model, seed), np.random.default_rng(seed)
    if "ids" in feed:
        feed["ids"] = np.asarray(random.integers(0, 10, feed["ids"].shape))
    if "scores" in feed:
        feed["scores"] = random.standard_normal((3, 2)).astype(np.float32)
    return feed
