"""Graphs that a quantizer stumbles over: wiring, names, nesting, functions, what is never read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx_models import Array, Net

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def _typed(model: onnx.ModelProto, **kinds: int) -> onnx.ModelProto:
    """With the types of those outputs, which `Net.model` takes for floats."""
    for info in model.graph.output:
        if info.name in kinds:
            info.type.tensor_type.elem_type = kinds[info.name]
    return model


def constants_as_nodes() -> onnx.ModelProto:
    """Constants by every attribute, and no initializer at all."""
    net = Net()
    dense = (net.random.standard_normal((4, 4)) / 2).astype(np.float32)
    y = net.node("MatMul", net.input("x", (2, 4)), net.node("Constant", value=numpy_helper.from_array(dense)))
    y = net.node("Add", y, net.node("Constant", value_floats=[0.1, 0.2, 0.3, 0.4]))
    y = net.node("Mul", y, net.node("Constant", value_float=1.5))
    y = net.node("Unsqueeze", y, net.node("Constant", value_ints=[0]))
    return net.model(net.node("Gather", y, net.node("Constant", value_int=0), axis=0))


def sparse_constant() -> onnx.ModelProto:
    net = Net()
    values = numpy_helper.from_array(np.array([0.5, -1.5], np.float32), "values")
    places = numpy_helper.from_array(np.array([1, 14], np.int64), "places")
    sparse = net.node("Constant", sparse_value=helper.make_sparse_tensor(values, places, [4, 4]))
    return net.model(net.node("MatMul", net.input("x", (2, 4)), sparse))


def unnamed_nodes() -> onnx.ModelProto:
    net = Net()
    y = net.node("Relu", net.conv(net.input("x", (1, 3, 6, 6)), (3, 4)))
    model = net.model(net.conv(y, (4, 2)))
    for node in model.graph.node:
        node.name = ""
    return model


def nodes_named_as_tensors() -> onnx.ModelProto:
    """Nodes named as tensors are, and as other nodes' outputs."""
    net = Net()
    y = net.node("Gemm", net.input("x", (2, 6)), net.weight(6, 6), net.weight(6), name="x", output="b")
    y = net.node("Relu", y, name="c1", output="a")
    return net.model(net.node("Gemm", y, net.weight(6, 3), net.weight(3), name="a", output="last"))


def local_function() -> onnx.ModelProto:
    """A function of the model's own with an attribute, called twice, and one that calls it."""
    inner = [
        helper.make_node("MatMul", ["data", "weight"], ["product"]),
        helper.make_node("LeakyRelu", ["product"], ["result"]),
    ]
    inner[1].attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    outer = [helper.make_node("Layer", ["data", "weight"], ["result"], domain="own", slope=0.3)]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    parameters = ["data", "weight"], ["result"]
    net = Net()
    net.domains["own"] = 1
    y = net.node("Layer", net.input("x", (2, 6)), net.weight(6, 6), domain="own", slope=0.1)
    y = net.node("Twice", y, net.weight(6, 6), domain="own")
    model = net.model(net.node("MatMul", y, net.weight(6, 2)))
    model.functions.append(helper.make_function("own", "Layer", *parameters, inner, opsets, ["slope"]))
    model.functions.append(helper.make_function("own", "Twice", *parameters, outer, opsets))
    return model


def dead_branches() -> onnx.ModelProto:
    """Nodes that nobody reads, one of them on a weight of NaN; initializers and an input that nobody reads."""
    net = Net()
    x = net.input("x", (2, 4))
    net.input("unused", (3, 3))
    net.weight(7, 7)
    y = net.node("MatMul", x, net.weight(4, 4))
    net.node("MatMul", y, net.constant(np.full((4, 4), np.nan, np.float32)))
    net.node("Conv", net.node("Reshape", y, net.integers([1, 2, 2, 2])), net.weight(3, 2, 1, 1))
    return net.model(net.node("Relu", y))


def nothing_to_quantize() -> onnx.ModelProto:
    net = Net()
    largest, where = net.nodes_of("TopK", net.input("x", (3, 6)), net.integers([2]), outputs=["largest", "where"])
    return _typed(net.model(net.node("Sin", largest), where), where=INT64)


def only_identity() -> onnx.ModelProto:
    net = Net()
    return net.model(net.node("Identity", net.input("x", (2, 3))))


def deep_chain() -> onnx.ModelProto:
    """Two hundred layers, each of which is a small turn."""
    net = Net()
    y = net.input("x", (2, 8))
    for _ in range(200):
        turn, _ = np.linalg.qr(net.random.standard_normal((8, 8)))
        y = net.node("MatMul", y, net.constant(turn.astype(np.float32)))
    return net.model(y)


def many_outputs() -> onnx.ModelProto:
    """Every tensor of the network is an output, one behind an Identity and one that is a plain copy of the input."""
    net = Net()
    x = net.input("x", (2, 3, 5, 5))
    first = net.conv(x, (3, 4))
    second = net.node("Relu", first)
    third = net.node("Flatten", net.node("GlobalAveragePool", second))
    scores = net.node("Gemm", third, net.weight(4, 3), net.weight(3))
    return net.model(first, second, third, scores, net.node("Identity", third), net.node("Identity", x))


def many_inputs() -> onnx.ModelProto:
    """Floats, integers of two widths and booleans come in; integers and booleans go out as well."""
    net = Net()
    pixels = net.input("pixels", (1, 3, 6, 6), np.uint8)
    x = net.node("Mul", net.node("Cast", pixels, to=FLOAT), net.constant(1 / 255))
    y = net.node("Flatten", net.node("GlobalAveragePool", net.conv(x, (3, 4))))
    y = net.node("Add", y, net.node("Cast", net.input("count", (1,), np.int32), to=FLOAT))
    y = net.node("Where", net.input("flag", (1,), np.bool_), y, net.node("Neg", y))
    scores = net.node("Gemm", y, net.weight(4, 3), net.weight(3), output="scores")
    best = net.node("ArgMax", scores, axis=1, output="best")
    is_large = net.node("Greater", scores, net.constant(0.0), output="is_large")
    return _typed(net.model(scores, best, is_large), best=INT64, is_large=BOOL)


def initializers_as_inputs() -> onnx.ModelProto:
    """As files of IR version 3 have it: every initializer is listed among the inputs."""
    net = Net(9)
    y = net.node("Relu", net.conv(net.input("x", (1, 3, 6, 6)), (3, 4)))
    model = net.model(net.conv(y, (4, 2)))
    model.ir_version = 3
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return model


def layers_in_branches() -> onnx.ModelProto:
    """An If whose branches hold convolutions with weights of their own, one of them a further If."""
    net = Net()
    x, flag = net.input("x", (1, 3, 6, 6)), net.input("flag", (), np.bool_)
    y = net.conv(x, (3, 3), 1, has_bias=False)

    def branch(name: str, nodes: list[onnx.NodeProto], *constants: onnx.TensorProto) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(nodes[-1].output[0], FLOAT, None)
        return helper.make_graph(nodes, name, [], [out], list(constants))

    def layer(name: str) -> onnx.GraphProto:
        weight = numpy_helper.from_array(net.random.standard_normal((3, 3, 1, 1)).astype(np.float32), f"{name}_w")
        return branch(name, [helper.make_node("Conv", [y, weight.name], [f"{name}_y"], name=name)], weight)

    nested = helper.make_node(
        "If", [flag], ["nested"], name="nested", then_branch=layer("deep"), else_branch=layer("deeper")
    )
    z = net.node("If", flag, then_branch=layer("first"), else_branch=branch("second", [nested]))
    return net.model(net.conv(z, (3, 2), 1))


def optional_parts() -> onnx.ModelProto:
    """Inputs that are left out in the middle and at the end, an output that is left out, a dropout with its mask."""
    net = Net()
    y = net.node("Gemm", net.input("x", (2, 6)), net.weight(6, 6), "")
    y = net.node("Clip", y, net.constant(-1.0), "")
    y = net.nodes_of("Dropout", y, outputs=["dropped", "mask"])[0]
    y = net.node("LayerNormalization", net.node("Unsqueeze", y, net.integers([0])), net.weight(6))
    weights = net.weight(1, 9, 6), net.weight(1, 9, 3)
    _, last = net.nodes_of("GRU", y, *weights, "", "", outputs=["", "last"], hidden_size=3)
    return net.model(net.node("MatMul", last, net.weight(3, 2)))


def sequences_inside() -> onnx.ModelProto:
    """Tensors go through a list of tensors and come back."""
    net = Net()
    y = net.node("MatMul", net.input("x", (4, 6)), net.weight(6, 6))
    parts = net.node("SplitToSequence", y, net.constant(np.array(2, np.int64)), axis=0)
    back = net.node("ConcatFromSequence", parts, axis=1)
    return net.model(net.node("MatMul", back, net.weight(12, 3)))


def shapes_from_shapes() -> onnx.ModelProto:
    """Sizes are computed by the graph, as exporters write a flatten and a broadcast."""
    net = Net()
    y = net.conv(net.input("x", ("N", 3, "H", "W")), (3, 4), pads=[1] * 4)
    size = net.node("Gather", net.node("Shape", y), net.constant(np.array([0, 1], np.int64)))
    y = net.node("Reshape", y, net.node("Concat", size, net.integers([-1]), axis=0))
    y = net.node("Expand", net.reduce("ReduceMean", y, [2]), net.node("Shape", y))
    zeros = net.node("ConstantOfShape", net.node("Shape", y), value=numpy_helper.from_array(np.zeros(1, np.float32)))
    return net.model(net.node("Tile", net.node("Add", y, zeros), net.integers([1, 2, 1])))


def foreign_operators() -> onnx.ModelProto:
    """Operators of ONNX Runtime's own, and of classical machine learning, beside standard ones."""
    net = Net()
    net.domains |= {"com.microsoft": 1, "ai.onnx.ml": 3}
    y = net.node("FusedMatMul", net.input("x", (3, 6)), net.weight(6, 6), domain="com.microsoft", alpha=0.5)
    y = net.node("MatMul", net.node("QuickGelu", y, domain="com.microsoft"), net.weight(6, 4))
    return net.model(net.node("Normalizer", y, domain="ai.onnx.ml", norm="L2"))


def extra_feed(name: str, feed: dict[str, Array], seed: int) -> dict[str, Array]:
    """The values that random numbers cannot stand for."""
    random = np.random.default_rng(seed)
    if name == "many_inputs":
        feed |= {"pixels": random.integers(0, 256, (1, 3, 6, 6)).astype(np.uint8), "flag": np.array([seed % 2 == 0])}
    return feed


_PLAIN: tuple[Callable[[], onnx.ModelProto], ...] = (
    *(
        constants_as_nodes,
        sparse_constant,
        unnamed_nodes,
        nodes_named_as_tensors,
        local_function,
        dead_branches,
        nothing_to_quantize,
    ),
    *(only_identity, deep_chain, many_outputs, many_inputs, initializers_as_inputs, layers_in_branches),
    *(optional_parts, sequences_inside, shapes_from_shapes, foreign_operators),
)
GRAPHS: Mapping[str, Callable[[], onnx.ModelProto]] = {make.__name__: make for make in _PLAIN}
