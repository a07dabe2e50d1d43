"""The functions through which the steps reach the graph."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_models import Net, random_feed, run_model, with_if

from quark.errors import InvalidValueError
from quark.onnx import graph
from quark.onnx.load import LoadOptions, load


def _chain() -> ir.Model:
    """x -> relu -> neg -> y, and relu -> abs -> z; a constant `k` for all."""
    net = Net()
    net.input("x", (2, "N"))
    relu = net.node("Relu", "x", name="relu", output="r")
    neg = net.node("Add", relu, net.constant([1.5], "k"), name="add", output="a")
    return load(
        net.model(net.node("Neg", neg, name="neg", output="y"), net.node("Abs", relu, name="abs", output="z"))
    ).model


def _node(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in graph.nodes(model) if node.name == name)


def _check(model: ir.Model) -> dict[str, np.ndarray]:
    proto = ir.serde.serialize_model(model)
    onnx.checker.check_model(proto, full_check=True)
    return run_model(proto, random_feed(proto))


def test_reading() -> None:
    model = _chain()
    add = _node(model, "add")
    assert graph.opset(model) == 17
    np.testing.assert_array_equal(graph.constant(graph.input_value(add, 1)), np.float32([1.5]))
    assert graph.constant(graph.input_value(add, 0)) is None
    assert graph.constant(None) is None
    assert graph.input_value(add, 2) is None
    relu = _node(model, "relu").outputs[0]
    assert [(node.name, index) for node, index in graph.readers(relu)] == [("add", 0), ("abs", 0)]
    assert not graph.is_read_once(relu)
    assert graph.is_read_once(add.outputs[0])
    assert not graph.is_read_once(_node(model, "neg").outputs[0])  # an output of the graph
    assert graph.dimensions(relu) == (2, None)
    assert graph.rank(relu) == 2
    assert graph.is_float(relu)
    assert graph.attribute(add, "nothing", 7) == 7


def test_an_initializer_that_may_be_given_is_no_constant() -> None:
    net = Net()
    net.input("x", (1,))
    net.input("k", (1,))
    model = net.model(net.node("Add", "x", net.constant([1.0], "k"), output="y"))
    kept = load(model, LoadOptions(has_initializers_as_inputs=True)).model
    assert graph.constant(kept.graph.initializers["k"]) is None


def test_a_reader_inside_a_branch_is_a_reader() -> None:
    model = load(with_if()).model
    conv = next(node for node in model.graph if node.op_type == "Conv")
    assert sorted(node.op_type for node, _ in graph.readers(conv.outputs[0])) == ["Neg", "Relu"]


def test_fresh_names_are_unique_among_nodes_and_values_and_the_same_each_time() -> None:
    names = [
        [graph.fresh_name(model, base) for base in ("x", "relu", "k", "new", "new", "x")]
        for model in (_chain(), _chain())
    ]
    assert names[0] == names[1] == ["x_1", "relu_1", "k_1", "new", "new_1", "x_2"]


def test_nodes_go_beside_others() -> None:
    model = _chain()
    add = _node(model, "add")
    before = graph.add_node(model, "Abs", [graph.input_value(add, 0)], before=add, name="before")
    graph.replace_input(add, 0, before.outputs[0])
    after = graph.add_node(model, "Softmax", [add.outputs[0]], after=add, attributes={"axis": -1, "nothing": None})
    graph.replace_input(_node(model, "neg"), 0, after.outputs[0])
    assert [node.op_type for node in model.graph] == ["Relu", "Abs", "Add", "Softmax", "Neg", "Abs"]
    assert graph.attribute(after, "axis") == -1
    graph.infer_shapes(model)
    assert graph.dimensions(after.outputs[0]) == (2, None)
    _check(model)
    with pytest.raises(InvalidValueError, match="not both"):
        graph.add_node(model, "Abs", [add.outputs[0]], before=add, after=add)


def test_a_constant_is_changed_in_place_or_copied() -> None:
    model = _chain()
    add = _node(model, "add")
    assert graph.set_constant(model, add, 1, np.float32([2, 3])).name == "k"
    value = model.graph.initializers["k"]
    other = graph.add_node(model, "Mul", [graph.input_value(add, 0), value], before=add)
    copy = graph.set_constant(model, other, 1, np.float32([4]))
    assert copy is not value
    np.testing.assert_array_equal(graph.constant(value), np.float32([2, 3]))
    np.testing.assert_array_equal(graph.constant(graph.input_value(other, 1)), np.float32([4]))


def test_outputs_keep_their_names_when_a_node_goes() -> None:
    model = _chain()
    expected = _check(model)
    assert graph.bypass(_node(model, "neg"))
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    np.testing.assert_array_equal(_check(model)["y"], -expected["y"])
    assert graph.bypass(_node(model, "abs"))
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    np.testing.assert_array_equal(_check(model)["z"], expected["z"])
    assert [value.name for value in _node(model, "relu").outputs] == ["z"]


def test_what_stands_between_an_input_and_an_output_stays() -> None:
    net = Net()
    net.input("x", (2,))
    model = load(net.model(net.node("Identity", "x", name="only", output="y"))).model
    assert not graph.bypass(_node(model, "only"))
    _check(model)


def test_a_node_becomes_another_and_keeps_its_name() -> None:
    model = _chain()
    add = _node(model, "add")
    graph.become(add, "LeakyRelu", [graph.input_value(add, 0)], {"alpha": 0.5})
    assert graph.remove_dead(model)
    assert not graph.remove_dead(model)
    assert "k" not in model.graph.initializers
    assert (add.name, add.op_type, len(add.inputs)) == ("add", "LeakyRelu", 1)
    _check(model)
