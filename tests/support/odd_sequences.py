"""Networks on sequences that a quantizer stumbles over: attention, recurrence, lengths that are not known."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx_models import Net, gelu_erf, transformer_block

FLOAT = TensorProto.FLOAT


def masked_attention() -> onnx.ModelProto:
    """A mask of booleans, scores that it makes very small, and lengths that are not known."""
    net = Net()
    x, keep = net.input("x", ("batch", "length", 8)), net.input("keep", ("batch", 1, "length"), np.bool_)
    q, k, v = (net.node("MatMul", x, net.weight(8, 8)) for _ in range(3))
    scores = net.node("MatMul", q, net.node("Transpose", k, perm=[0, 2, 1]))
    scores = net.node("Where", keep, scores, net.constant(-30.0))
    return net.model(net.node("Add", net.node("MatMul", net.node("Softmax", scores), v), x))


def attention_operator() -> onnx.ModelProto:
    """The operator of opset 23, with as many heads as fit."""
    net = Net(23)
    x = net.input("x", (2, 5, 8))
    q, k, v = (net.node("MatMul", x, net.weight(8, 8)) for _ in range(3))
    y = net.node("Attention", q, k, v, q_num_heads=2, kv_num_heads=2)
    return net.model(net.node("MatMul", y, net.weight(8, 4)))


def rms_norm_operator() -> onnx.ModelProto:
    net = Net(23)
    y = net.node("MatMul", net.input("x", (2, 5, 8)), net.weight(8, 8))
    return net.model(net.node("MatMul", net.node("RMSNormalization", y, net.weight(8), axis=-1), net.weight(8, 4)))


def rms_norm_composed() -> onnx.ModelProto:
    net = Net()
    y = net.node("MatMul", net.input("x", (2, 5, 8)), net.weight(8, 8))
    mean = net.reduce("ReduceMean", net.node("Mul", y, y), [-1])
    root = net.node("Sqrt", net.node("Add", mean, net.constant(1e-6)))
    y = net.node("Mul", net.node("Mul", y, net.node("Reciprocal", root)), net.weight(8))
    return net.model(net.node("MatMul", y, net.weight(8, 4)))


def einsum() -> onnx.ModelProto:
    """A product with a weight, a product of two tensors, and a trace, written as sums over letters."""
    net = Net()
    x = net.input("x", (2, 5, 8))
    y = net.node("Einsum", x, net.weight(8, 2, 4), equation="bld,dhk->blhk")
    scores = net.node("Einsum", y, y, equation="blhk,bmhk->bhlm")
    mixed = net.node("Einsum", net.node("Softmax", scores), y, equation="bhlm,bmhk->blhk")
    return net.model(net.node("MatMul", net.node("Reshape", mixed, net.integers([0, 0, 8])), net.weight(8, 3)))


def layer_norms() -> onnx.ModelProto:
    """Without a bias, with its two further outputs, over two axes."""
    net = Net()
    y = net.node("MatMul", net.input("x", (2, 5, 8)), net.weight(8, 8))
    y = net.node("LayerNormalization", y, net.weight(8), axis=-1, epsilon=1e-3)
    y, mean, _ = net.nodes_of(
        "LayerNormalization", y, net.weight(5, 8), net.weight(5, 8), outputs=["n", "m", "s"], axis=1
    )
    return net.model(net.node("MatMul", y, net.weight(8, 4)), mean)


def recurrent_both_ways() -> onnx.ModelProto:
    """An LSTM in both directions with a bias, lengths left out, a first state, and peepholes."""
    net = Net()
    x, first = net.input("x", (5, 2, 4)), net.input("first", (2, 2, 3))
    weights = net.weight(2, 12, 4), net.weight(2, 12, 3), net.weight(2, 24)
    y = net.node("LSTM", x, *weights, "", first, first, net.weight(2, 9), hidden_size=3, direction="bidirectional")
    y = net.node("Reshape", net.node("Transpose", y, perm=[0, 2, 1, 3]), net.integers([5, 2, 6]))
    return net.model(net.node("MatMul", y, net.weight(6, 2)))


def recurrent_kinds() -> onnx.ModelProto:
    """GRU with the reset after the product, backwards; a plain RNN of dynamic length with lengths given."""
    net = Net()
    x, lengths = net.input("x", ("length", 2, 4)), net.constant(np.array([2, 1], np.int32))
    back = {"hidden_size": 3, "linear_before_reset": 1, "direction": "reverse"}
    y = net.node("GRU", x, net.weight(1, 9, 4), net.weight(1, 9, 3), net.weight(1, 18), **back)
    z = net.node("RNN", x, net.weight(1, 3, 4), net.weight(1, 3, 3), "", lengths, hidden_size=3)
    y = net.node("Squeeze", net.node("Add", y, z), net.integers([1]))
    return net.model(net.node("MatMul", y, net.weight(3, 2)))


def scan() -> onnx.ModelProto:
    """A recurrence written out: the body multiplies with a weight of the outer graph."""
    net = Net()
    weight = net.weight(4, 4, name="w")
    nodes = [
        helper.make_node("MatMul", ["h", weight], ["m"], name="in_matmul"),
        helper.make_node("Add", ["m", "row"], ["a"], name="in_add"),
        helper.make_node("Tanh", ["a"], ["next"], name="in_tanh"),
        helper.make_node("Identity", ["next"], ["seen"], name="in_identity"),
    ]
    infos = {name: helper.make_tensor_value_info(name, FLOAT, [2, 4]) for name in ("h", "row", "next", "seen")}
    body = helper.make_graph(nodes, "body", [infos["h"], infos["row"]], [infos["next"], infos["seen"]])
    x = net.node("MatMul", net.input("x", (5, 2, 4)), weight)
    last, all_of_them = net.nodes_of(
        "Scan", net.input("start", (2, 4)), x, outputs=["last", "all"], body=body, num_scan_inputs=1
    )
    return net.model(net.node("MatMul", last, net.weight(4, 2)), all_of_them)


def embedding_tied() -> onnx.ModelProto:
    """One table embeds the words and, turned, makes the scores."""
    net = Net()
    table = net.weight(10, 8, name="table")
    y = net.node("Gather", table, net.input("ids", ("batch", "length"), np.int64))
    y = net.node("Add", y, gelu_erf(net, net.node("MatMul", y, net.weight(8, 8))))
    return net.model(net.node("MatMul", y, net.node("Transpose", table, perm=[1, 0])))


def activations_opset_20() -> onnx.ModelProto:
    """Gelu in both forms, Mish, Elu, Softplus and Erf, between products."""
    net = Net(20)
    y = net.input("x", (3, 8))
    for op_type in ("Gelu", "Mish", "Elu", "Softplus", "Erf"):
        y = net.node(op_type, net.node("Gemm", y, net.weight(8, 8), net.weight(8)))
    y = net.node("Gelu", net.node("MatMul", y, net.weight(8, 8)), approximate="tanh")
    return net.model(net.node("MatMul", y, net.weight(8, 2)))


def softmax_opset_11() -> onnx.ModelProto:
    """Before opset 13 a Softmax is over everything from its axis on."""
    net = Net(11)
    y = net.node("Softmax", net.node("MatMul", net.input("x", (2, 3, 4)), net.weight(4, 4)), axis=1)
    return net.model(net.node("MatMul", y, net.weight(4, 2)))


def _transformer(opset: int) -> Callable[[], onnx.ModelProto]:
    return lambda: transformer_block(opset)


_PLAIN: tuple[Callable[[], onnx.ModelProto], ...] = (
    *(masked_attention, attention_operator, rms_norm_operator, rms_norm_composed, einsum, layer_norms),
    *(recurrent_both_ways, recurrent_kinds, scan, embedding_tied, activations_opset_20, softmax_opset_11),
)
SEQUENCES: Mapping[str, Callable[[], onnx.ModelProto]] = {
    **{make.__name__: make for make in _PLAIN},
    **{f"transformer {opset}": _transformer(opset) for opset in (13, 21)},
}
