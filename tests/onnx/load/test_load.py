"""What can be relied on after loading, whatever the model was like before."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import OPSETS, Net, conv_bn_relu, random_feed, residual, run_model, transformer_block, with_if

from quark.errors import InvalidValueError, UnknownNameError
from quark.onnx.graph import constant, opset
from quark.onnx.load import LoadedModel, LoadOptions, load


def _proto(loaded: LoadedModel) -> onnx.ModelProto:
    return ir.serde.serialize_model(loaded.model)


def _same_output(before: onnx.ModelProto, loaded: LoadedModel) -> None:
    feed = random_feed(before)
    expected, got = run_model(before, feed), run_model(_proto(loaded), feed)
    assert list(got) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("opset_version", OPSETS)
@pytest.mark.parametrize("build", [conv_bn_relu, residual, transformer_block])
def test_path_bytes_and_proto_give_the_same_model(tmp_path: Path, build, opset_version: int) -> None:
    model = build(opset_version)
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    content = path.read_bytes()
    loaded = [load(path), load(str(path)), load(content), load(model)]
    for each in loaded:
        assert each.sha256 == hashlib.sha256(content).hexdigest()
        assert each.bytes == len(content)
        assert opset(each.model) == opset_version
        assert each.remarks == ()
        _same_output(model, each)
    assert [each.name for each in loaded] == ["net.onnx", "net.onnx", "model", "net"]
    assert path.read_bytes() == content
    assert model.SerializeToString() == content


def test_the_result_is_a_private_copy() -> None:
    model = conv_bn_relu()
    before = model.SerializeToString()
    loaded = load(model).model
    for node in list(loaded.graph):
        node.name = f"renamed_{node.name}"
    for value in loaded.graph.initializers.values():
        value.const_value = ir.Tensor(np.zeros(1, np.float32))
    assert model.SerializeToString() == before


def test_large_weights_are_views_of_what_was_read() -> None:
    net = Net()
    net.input("x", (1, 300))
    net.node("MatMul", "x", net.weight(300, 500, name="w"), output="y")
    loaded = load(net.model("y").SerializeToString()).model
    tensor = loaded.graph.initializers["w"].const_value
    assert tensor is not None
    array = tensor.numpy()
    assert not array.flags.owndata
    assert not array.flags.writeable
    np.testing.assert_array_equal(array, numpy_helper.to_array(net.initializers[0]))
    aligned = constant(loaded.graph.initializers["w"])
    assert aligned is not None
    assert aligned.flags.aligned
    assert aligned.flags.c_contiguous


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int8", "int64", "bool", "uint16"])
@pytest.mark.parametrize("size", [4, 4000])
def test_every_type_of_initializer_arrives(dtype: str, size: int) -> None:
    net = Net()
    net.input("x", (1,))
    array = np.arange(size).astype(dtype)
    net.node("Relu", "x", output="y")
    net.node("Identity", net.constant(array, "c"), output="z")
    model = net.model("y", "z")
    model.graph.output[1].type.tensor_type.elem_type = model.graph.initializer[0].data_type
    np.testing.assert_array_equal(constant(load(model).model.graph.initializers["c"]), array)


def test_typed_fields_and_four_bits_arrive() -> None:
    net = Net(21)
    net.input("x", (1,))
    net.initializers.append(helper.make_tensor("f", TensorProto.FLOAT, [2, 600], np.arange(1200.0)))
    packed = np.arange(4096, dtype=np.uint8)
    net.initializers.append(helper.make_tensor("p", TensorProto.UINT4, [8192], packed.tobytes(), raw=True))
    net.node("Cast", "p", to=TensorProto.FLOAT, output="z")
    net.node("Mul", "x", "f", output="y")
    initializers = load(net.model("y", "z")).model.graph.initializers
    np.testing.assert_array_equal(constant(initializers["f"]), np.arange(1200, dtype=np.float32).reshape(2, 600))
    four_bits = constant(initializers["p"])
    assert four_bits is not None
    np.testing.assert_array_equal(four_bits.astype(int)[:4], [0, 0, 1, 0])


def test_names_are_unique_constants_are_initializers_and_dead_nodes_are_gone() -> None:
    net = Net()
    net.input("x", (2, 3))
    net.node("Constant", output="k", value=numpy_helper.from_array(np.float32(2)), name="same")
    net.node("Constant", output="f", value_float=3.0, name="same")
    net.node("Mul", "x", "k", output="a", name="same")
    net.node("Add", "a", "f", output="y", name="same")
    net.nodes.append(helper.make_node("Relu", ["x"], ["nobody"]))
    net.nodes.append(helper.make_node("Relu", ["y"], ["z"]))
    net.weight(3, name="unused")
    model = net.model("z")
    loaded = load(model)
    graph = loaded.model.graph
    assert [node.name for node in graph] == ["same", "same_1", "z"]
    assert sorted(graph.initializers) == ["f", "k"]
    assert all(value.shape is not None and value.dtype is not None for node in graph for value in node.outputs)
    feed = random_feed(model)
    np.testing.assert_array_equal(run_model(_proto(loaded), feed)["z"], np.maximum(feed["x"] * 2 + 3, 0))


def test_nodes_are_put_in_order() -> None:
    model = conv_bn_relu()
    nodes = list(model.graph.node)
    shuffled = onnx.ModelProto()
    shuffled.CopyFrom(model)
    del shuffled.graph.node[:]
    shuffled.graph.node.extend(reversed(nodes))
    loaded = load(shuffled)
    assert [node.name for node in loaded.model.graph] == [node.name for node in nodes]
    _same_output(model, loaded)


def test_initializers_that_are_inputs_become_constants_unless_asked_for() -> None:
    model = residual()
    weight = model.graph.initializer[0]
    model.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))
    loaded = load(model)
    assert [value.name for value in loaded.model.graph.inputs] == ["x"]
    assert weight.name in loaded.remarks[0]
    assert constant(loaded.model.graph.initializers[weight.name]) is not None
    kept = load(model, LoadOptions(has_initializers_as_inputs=True)).model
    assert [value.name for value in kept.graph.inputs] == ["x", weight.name]
    assert constant(kept.graph.initializers[weight.name]) is None


def test_functions_are_inlined() -> None:
    body = [helper.make_node("Relu", ["a"], ["t"]), helper.make_node("Add", ["t", "b"], ["c"])]
    opsets = [helper.make_opsetid("", 17)]
    function = helper.make_function("our.own", "ReluAdd", ["a", "b"], ["c"], body, opsets)
    net = Net(17)
    net.domains["our.own"] = 1
    net.input("x", (2, 3))
    net.node("ReluAdd", net.node("ReluAdd", "x", net.weight(3), domain="our.own"), "x", domain="our.own", output="y")
    model = net.model("y")
    model.functions.append(function)
    loaded = load(model)
    assert [node.op_type for node in loaded.model.graph] == ["Relu", "Add", "Relu", "Add"]
    assert len({node.name for node in loaded.model.graph}) == 4
    assert not loaded.model.functions
    _same_output(model, loaded)


def test_subgraphs_stay_in_float_and_are_told() -> None:
    model = with_if()
    loaded = load(model)
    skipped = [(node.node, node.op_type) for node in loaded.skipped]
    assert skipped[0] == ("choice", "If")
    assert sorted(skipped[1:]) == [("else_branch_inner", "Neg"), ("then_branch_inner", "Relu")]
    assert all("left in float" in node.reason for node in loaded.skipped)
    assert "If 'choice'" in loaded.remarks[0]
    _same_output(model, loaded)


def test_a_symbolic_size_stays_unless_it_is_fixed() -> None:
    model = residual()
    assert str(load(model).model.graph.inputs[0].shape) == "[N,4,8,8]"
    for fixed in ((("x", (3, 4, 8, 8)),), (("", (3, 4, 8, 8)),)):
        loaded = load(model, LoadOptions(fixed_shapes=fixed))
        assert loaded.model.graph.inputs[0].shape == (3, 4, 8, 8)
        assert loaded.model.graph.outputs[0].shape == (3, 5)
        assert all(value.shape.is_static() for node in loaded.model.graph for value in node.outputs if value.shape)


def test_a_shape_that_cannot_be_is_refused() -> None:
    model = residual()
    with pytest.raises(UnknownNameError, match="'z'"):
        load(model, LoadOptions(fixed_shapes=(("z", (1, 4, 8, 8)),)))
    for shape in ((1, 3, 8, 8), (1, 4, 8), (0, 4, 8, 8)):
        with pytest.raises(InvalidValueError, match="input 'x'"):
            load(model, LoadOptions(fixed_shapes=(("x", shape),)))


def test_a_size_of_minus_one_is_not_known() -> None:
    model = residual()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    shape = load(model).model.graph.inputs[0].shape
    assert shape is not None
    assert shape.is_unknown_dim(0)


@pytest.mark.parametrize("is_converted", [False, True])
def test_float16_is_kept_or_converted(is_converted: bool) -> None:
    net = Net(17, dtype=np.float16)
    net.input("x", (1, 2, 4, 4))
    y = net.batch_norm(net.conv("x", (2, 40)), 40)
    wide = net.node("Exp", net.node("Cast", y, to=TensorProto.FLOAT))
    filled = net.node(
        "ConstantOfShape", net.integers([1]), value=helper.make_tensor("v", TensorProto.FLOAT16, [1], [2.0])
    )
    net.node("Add", net.node("Cast", wide, to=TensorProto.FLOAT16), filled, output="y")
    model = net.model("y")
    loaded = load(model, LoadOptions(has_fp16_converted=is_converted))
    dtypes = {value.dtype for node in loaded.model.graph for value in node.outputs}
    dtypes |= {value.dtype for value in loaded.model.graph.inputs}
    feed = random_feed(model)
    if not is_converted:
        assert ir.DataType.FLOAT16 in dtypes
        _same_output(model, loaded)
        return
    assert ir.DataType.FLOAT16 not in dtypes
    assert any("float16" in remark for remark in loaded.remarks)
    got = run_model(_proto(loaded), {"x": feed["x"].astype(np.float32)})["y"]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, run_model(model, feed)["y"], rtol=2e-2, atol=2e-2)


def test_inputs_left_out_at_the_end_of_a_node_are_gone() -> None:
    net = Net()
    y = net.node("LayerNormalization", net.input("x", (2, 8)), net.weight(8), "", axis=-1)
    loaded = load(net.model(net.node("Clip", y, "", "")))
    assert [len(node.inputs) for node in loaded.model.graph] == [2, 1]


def test_sizes_of_outputs_are_fixed_by_name():
    net = Net()
    x = net.input("x", ["N", 4])
    model = net.model(net.node("Reshape", net.node("Relu", x), net.input("shape", [2], np.int64), output="y"))
    loaded = load(model, LoadOptions(fixed_shapes=(("x", (2, 4)), ("y", (4, 2)))))
    assert list(loaded.model.graph.outputs[0].shape) == [4, 2]
    assert "shape of output 'y' fixed to [4, 2]" in loaded.remarks
    relu = Net()
    model = relu.model(relu.node("Relu", relu.input("x", ["N", 4]), output="y"))
    with pytest.raises(InvalidValueError, match=r"\[3, 4\] for output 'y', which is \[2, 4\]"):
        load(model, LoadOptions(fixed_shapes=(("y", (3, 4)), ("x", (2, 4)))))
    with pytest.raises(UnknownNameError, match="input or output of the model 'z'"):
        load(model, LoadOptions(fixed_shapes=(("z", (3, 4)),)))
