"""Opsets: lifted where they are old, kept where they will do, refused where nothing can be done."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx_models import Net, random_feed, run_model, with_if

from quark.errors import InvalidValueError, ModelError
from quark.onnx.file_graph import read_graph
from quark.onnx.graph import opset
from quark.onnx.load import LoadOptions, load


def _old(version: int) -> onnx.ModelProto:
    """Operators whose form changed before opset 13: sizes and bounds as attributes, Dropout, a large weight."""
    net = Net(version)
    net.input("x", (2, 3, 8, 8))
    y = net.node(
        "BatchNormalization", net.conv("x", (3, 40)), *(net.constant(np.full(40, n, np.float32)) for n in (1, 2, 3, 4))
    )
    if version < 11:
        y = net.node("Clip", y, min=0.0, max=6.0)
        y = net.node("Pad", y, pads=[0, 0, 1, 1, 0, 0, 1, 1])
    y = net.node("Squeeze", net.node("GlobalAveragePool", net.node("Dropout", y)), axes=[2, 3])
    return net.model(net.node("Softmax", y, axis=1, output="y"))


@pytest.mark.parametrize("version", [8, 9, 10, 11, 12])
def test_an_old_model_is_lifted_and_gives_the_same(version: int) -> None:
    model = _old(version)
    loaded = load(model)
    assert opset(loaded.model) == 13
    assert f"opset lifted from {version} to 13" in loaded.remarks
    assert [value.name for value in loaded.model.graph.inputs] == ["x"]
    feed = random_feed(model)
    got = run_model(ir.serde.serialize_model(loaded.model), feed)
    np.testing.assert_allclose(got["y"], run_model(model, feed)["y"], rtol=1e-6, atol=1e-7)


def test_a_softmax_takes_its_rank_from_what_it_makes() -> None:
    net = Net(12)
    shape = net.input("shape", ("rank",), np.int64)
    y = net.node("Reshape", net.input("x", (2, 12)), shape)
    model = net.model(net.node("Softmax", y, axis=2, output="y"), output_shape=("a", "b", "c"))
    lifted = load(model).model
    assert [node.op_type for node in lifted.graph] == ["Reshape", "Softmax"]
    feed = random_feed(model) | {"shape": np.array([2, 3, 4])}
    np.testing.assert_array_equal(run_model(ir.to_proto(lifted), feed)["y"], run_model(model, feed)["y"])


def test_a_subgraph_is_lifted_too() -> None:
    model = with_if(11)
    feed = {"x": np.ones((1, 2, 4, 4), np.float32), "flag": np.array(False)}
    got = run_model(ir.serde.serialize_model(load(model).model), feed)
    np.testing.assert_array_equal(got["y"], run_model(model, feed)["y"])


@pytest.mark.parametrize(("present", "wanted"), [(13, 17), (17, 21), (11, 17)])
def test_a_newer_opset_can_be_asked_for(present: int, wanted: int) -> None:
    net = Net(present)
    net.input("x", (2, 3, 8, 8))
    model = net.model(net.node("Relu", net.node("ReduceMean", "x", axes=[2, 3]), output="y"))
    loaded = load(model, LoadOptions(opset=wanted))
    assert opset(loaded.model) == wanted
    feed = random_feed(model)
    got = run_model(ir.serde.serialize_model(loaded.model), feed)
    np.testing.assert_allclose(got["y"], run_model(model, feed)["y"], rtol=1e-6)


def test_an_older_opset_cannot() -> None:
    net = Net(17)
    net.input("x", (2,))
    model = net.model(net.node("Relu", "x", output="y"))
    assert opset(load(model, LoadOptions(opset=17)).model) == 17
    for wanted in (13, 1, 10_000):
        with pytest.raises(InvalidValueError, match=f"opset {wanted}"):
            load(model, LoadOptions(opset=wanted))


def test_an_opset_beyond_the_runtime_is_refused_with_the_newest_it_takes() -> None:
    net = Net(10_000)
    net.input("x", (2,))
    with pytest.raises(ModelError, match=r"opset 10000, and the installed ONNX Runtime takes up to \d+"):
        load(net.model(net.node("Relu", "x", output="y")))


def test_what_the_converter_cannot_lift_is_refused_by_name() -> None:
    net = Net(7)
    net.input("x", (1, 1, 4, 4))
    net.node("Upsample", "x", scales=[1.0, 1.0, 2.0, 2.0], name="grow", output="u")
    net.nodes.append(helper.make_node("ATen", ["u"], ["y"], name="old", domain=""))
    with pytest.raises(ModelError, match="'old'"):
        load(net.model("y"))


def test_a_newer_container_is_lowered_to_what_the_runtime_takes() -> None:
    net = Net(17)
    net.input("x", (2,))
    model = net.model(net.node("Relu", "x", output="y"))
    model.ir_version = 60
    loaded = load(model)
    assert 10 <= loaded.model.ir_version < 60
    assert "IR version lowered" in loaded.remarks[0]
    assert run_model(ir.serde.serialize_model(loaded.model), random_feed(model))["y"].shape == (2,)


def test_a_model_without_an_opset_is_refused() -> None:
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 3)], ir_version=8)
    with pytest.raises(ModelError, match="opset_import"):
        load(model)


def test_the_long_name_of_the_standard_domain_is_the_short_one() -> None:
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx")], "g", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx", 17)], ir_version=8)
    assert opset(load(model).model) == 17


def test_a_network_without_standard_operators_need_not_say_their_opset(tmp_path: Path) -> None:
    """A forest of trees, as the converter for xgboost writes it."""
    tree = {"nodes_falsenodeids": [2, 0, 0], "nodes_truenodeids": [1, 0, 0], "nodes_nodeids": [0, 1, 2]}
    tree |= {"nodes_featureids": [0, 0, 0], "nodes_treeids": [0, 0, 0], "class_ids": [0, 0], "class_treeids": [0, 0]}
    tree |= {"class_nodeids": [1, 2], "classlabels_int64s": [0, 1]}
    floats = {"nodes_values": [0.5, 0.0, 0.0], "class_weights": [0.0, 1.0]}
    node = helper.make_node(
        "TreeEnsembleClassifier",
        ["x"],
        ["label", "y"],
        name="forest",
        domain="ai.onnx.ml",
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
        post_transform="LOGISTIC",
        **tree,
        **floats,
    )
    ports = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 2])]
    results = [
        helper.make_tensor_value_info("label", onnx.TensorProto.INT64, ["N"]),
        helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 2]),
    ]
    graph = helper.make_graph([node], "forest", ports, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 1)], ir_version=8)
    assert opset(load(model).model) == 13
    onnx.save(model, tmp_path / "forest.onnx")
    assert opset(read_graph(tmp_path / "forest.onnx")) == 13
