"""Files and models that cannot be quantized: each a ModelError that names the culprit, and the input is untouched."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import Net, conv_bn_relu, residual
from PIL import Image

from quark.errors import ModelError, QuarkError, UnsupportedTypeError
from quark.onnx.load import load


def _refused(source: object, *words: str) -> str:
    with pytest.raises(ModelError) as caught:
        load(source)
    message = str(caught.value)
    for word in words:
        assert word in message
    return message


def test_a_missing_file(tmp_path: Path) -> None:
    _refused(tmp_path / "nowhere.onnx", "no such file", "nowhere.onnx")
    _refused(str(tmp_path / "nowhere.onnx"), "nowhere.onnx")


def test_what_is_no_file(tmp_path: Path) -> None:
    _refused("a\0b.onnx", "is not a path")
    os.mkfifo(tmp_path / "pipe.onnx")
    _refused(tmp_path / "pipe.onnx", "pipe.onnx", "device or pipe")


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "inside.onnx").touch()
    _refused(tmp_path, "is a folder", "inside.onnx")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").touch()
    _refused(tmp_path / "empty.onnx", "empty.onnx", "0 bytes")
    _refused(b"", "0 bytes")


@pytest.mark.parametrize("kind", ["text", "png", "noise", "zeros", "json"])
def test_a_file_that_is_something_else(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"{kind}.onnx"
    if kind == "png":
        Image.new("RGB", (9, 9)).save(path, format="png")
    else:
        noise = np.random.default_rng(0).bytes(5000)
        contents = {"text": b"hello\n" * 99, "noise": noise, "zeros": bytes(999), "json": b'{"a": 1}'}
        path.write_bytes(contents[kind])
    before = path.read_bytes()
    _refused(path, f"'{kind}.onnx' is not an ONNX model")
    assert path.read_bytes() == before


def test_every_truncation_is_an_error_of_ours() -> None:
    content = conv_bn_relu().SerializeToString()
    for length in range(1, len(content), 7):
        with pytest.raises(QuarkError):
            load(content[:length])


def test_a_truncated_file_says_that_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "cut.onnx"
    path.write_bytes(residual().SerializeToString()[:-200])
    _refused(path, "cut.onnx", "damaged")


def test_flipped_bytes_never_crash() -> None:
    content = bytearray(conv_bn_relu().SerializeToString())
    random = np.random.default_rng(0)
    for _ in range(300):
        position, byte = int(random.integers(len(content))), int(random.integers(256))
        damaged = bytes(content[:position]) + bytes([byte]) + bytes(content[position + 1 :])
        with contextlib.suppress(QuarkError):
            load(damaged)


def test_a_module_of_pytorch_is_sent_to_the_other_road() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(
        UnsupportedTypeError, match=r"got Linear\. PyTorch modules are for quark\.torch\.ModelQuantizer"
    ):
        load(torch.nn.Linear(3, 3))


def test_no_model_at_all() -> None:
    with pytest.raises(UnsupportedTypeError, match="int"):
        load(3)


def _no_nodes(net: Net) -> None:
    net.nodes.clear()


def test_no_outputs() -> None:
    model = conv_bn_relu()
    del model.graph.output[:]
    _refused(model, "the graph has no outputs")


def test_an_unknown_operator_is_like_no_other() -> None:
    net = Net()
    model = net.model(net.node("Frobnicate", net.input("x", (1, 4)), name="f"))
    assert "Did you mean" not in _refused(model, "'Frobnicate'")


def _output_twice(net: Net) -> None:
    net.nodes.append(helper.make_node("Relu", ["x"], ["y"], name="again"))


def _output_is_an_input(net: Net) -> None:
    net.nodes.append(helper.make_node("Neg", ["y"], ["x"], name="again"))


def _circle(net: Net) -> None:
    net.nodes.append(helper.make_node("Add", ["x", "b"], ["a"], name="first"))
    net.nodes.append(helper.make_node("Relu", ["a"], ["b"], name="second"))


def _unmade_input(net: Net) -> None:
    net.nodes.append(helper.make_node("Relu", ["ghost"], ["z"], name="reader"))


def _unknown_operator(net: Net) -> None:
    net.nodes.append(helper.make_node("Relux", ["x"], ["z"], name="typo"))


def _operator_of_another_opset(net: Net) -> None:
    net.nodes.append(helper.make_node("Gelu", ["x"], ["z"], name="early"))


def _unknown_domain(net: Net) -> None:
    net.nodes.append(helper.make_node("Magic", ["x"], ["z"], name="wand", domain="com.example"))


def _unknown_operator_in_a_branch(net: Net) -> None:
    out = helper.make_tensor_value_info("o", TensorProto.FLOAT, None)
    branch = helper.make_graph([helper.make_node("Magic", ["x"], ["o"], name="deep")], "b", [], [out])
    net.constant(np.array(True), "flag")
    net.nodes.append(helper.make_node("If", ["flag"], ["z"], name="if", then_branch=branch, else_branch=branch))


def _unmade_input_in_a_branch(net: Net) -> None:
    out = helper.make_tensor_value_info("o", TensorProto.FLOAT, None)
    branch = helper.make_graph([helper.make_node("Relu", ["ghost"], ["o"], name="deep")], "b", [], [out])
    net.constant(np.array(True), "flag")
    net.nodes.append(helper.make_node("If", ["flag"], ["z"], name="if", then_branch=branch, else_branch=branch))


def _negative_size(net: Net) -> None:
    net.initializers.append(TensorProto(name="w", dims=[-4], data_type=TensorProto.FLOAT, raw_data=bytes(16)))


def _huge_size(net: Net) -> None:
    net.initializers.append(TensorProto(name="w", dims=[2**40, 2**40], data_type=TensorProto.FLOAT, raw_data=bytes(16)))


def _too_few_bytes(net: Net) -> None:
    net.initializers.append(TensorProto(name="w", dims=[2**30], data_type=TensorProto.FLOAT, raw_data=bytes(4096)))


def _too_few_values(net: Net) -> None:
    net.initializers.append(TensorProto(name="w", dims=[2**30], data_type=TensorProto.FLOAT, float_data=[1.0]))


def _unknown_type(net: Net) -> None:
    net.initializers.append(TensorProto(name="w", dims=[4], data_type=99, raw_data=bytes(4)))


def _wrong_constant(net: Net) -> None:
    tensor = TensorProto(name="w", dims=[2**30], data_type=TensorProto.FLOAT, raw_data=bytes(4))
    net.nodes.append(helper.make_node("Constant", [], ["z"], name="c", value=tensor))


def _sparse_constant(net: Net) -> None:
    values, indices = (helper.make_tensor("w", kind, [1], [1]) for kind in (TensorProto.FLOAT, TensorProto.INT64))
    sparse = helper.make_sparse_tensor(values, indices, [4])
    net.nodes.append(helper.make_node("Constant", [], ["z"], name="sparse", sparse_value=sparse))


def _unknown_attribute(net: Net) -> None:
    net.nodes.append(helper.make_node("Softmax", ["x"], ["z"], name="odd", axes=[1]))


def _too_many_inputs(net: Net) -> None:
    net.nodes.append(helper.make_node("Relu", ["x", "x"], ["z"], name="odd"))


def _initializer_twice(net: Net) -> None:
    net.weight(3, name="w")
    net.weight(3, name="w")


def _negative_input(net: Net) -> None:
    net.input("z", (-5, 2))


def _huge_input(net: Net) -> None:
    net.input("z", (2**40, 2**40))


def _branch_without_a_graph(net: Net) -> None:
    net.constant(np.array(True), "flag")
    node = helper.make_node("If", ["flag"], ["z"], name="hollow")
    node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH)
    net.nodes.append(node)


def _attribute_of_no_function(net: Net) -> None:
    node = helper.make_node("Softmax", ["x"], ["z"], name="stray")
    node.attribute.add(name="axis", type=onnx.AttributeProto.INT, ref_attr_name="axis")
    net.nodes.append(node)


BAD: dict[Callable[[Net], None], tuple[str, ...]] = {
    _branch_without_a_graph: ("'hollow'", "'then_branch'", "no graph"),
    _attribute_of_no_function: ("'stray'", "'axis'", "function"),
    _no_nodes: ("no nodes",),
    _output_twice: ("'again'", "'y'"),
    _output_is_an_input: ("'again'", "'x'"),
    _circle: ("cycle", "'first'"),
    _unmade_input: ("'reader'", "'ghost'"),
    _unknown_operator: ("'typo'", "Relux", "Did you mean Relu"),
    _operator_of_another_opset: ("'early'", "opset 17"),
    _unknown_domain: ("'wand'", "'com.example'"),
    _unknown_operator_in_a_branch: ("'deep'", "Magic"),
    _unmade_input_in_a_branch: ("'deep'", "'ghost'", "If 'if'"),
    _negative_size: ("'w'", "-4"),
    _huge_size: ("'w'",),
    _too_few_bytes: ("'w'", "4096", str(2**32)),
    _too_few_values: ("'w'", str(2**30)),
    _unknown_type: ("'w'", "99"),
    _wrong_constant: ("'w'", str(2**32)),
    _sparse_constant: ("'sparse'", "dense"),
    _unknown_attribute: ("'odd'", "axes"),
    _too_many_inputs: ("'odd'",),
    _initializer_twice: ("'w'", "two initializers"),
    _negative_input: ("'z'", "-5"),
    _huge_input: ("'z'",),
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda each: each.__name__.strip("_"))
def test_a_model_that_is_wrong(spoil: Callable[[Net], None]) -> None:
    net = Net(17)
    net.input("x", (2, 3))
    net.node("Relu", "x", output="y")
    spoil(net)
    model = net.model("y")
    before = model.SerializeToString()
    _refused(model, "'net'", *BAD[spoil])
    assert model.SerializeToString() == before


def test_an_output_that_nothing_makes() -> None:
    net = Net(17)
    net.input("x", (2, 3))
    net.node("Relu", "x", output="y")
    _refused(net.model("y", "ghost"), "output 'ghost'")


@pytest.mark.parametrize(
    ("op_type", "domain", "count"),
    [
        ("QuantizeLinear", "", 3),
        ("DequantizeLinear", "", 3),
        ("DynamicQuantizeLinear", "", 1),
        ("QLinearConv", "", 8),
        ("ConvInteger", "", 2),
        ("MatMulInteger", "", 2),
        ("MatMulNBits", "com.microsoft", 3),
        ("QLinearAdd", "com.microsoft", 8),
        ("MXQuantizeDequantize", "com.amd.quark", 1),
    ],
)
def test_a_quantized_model_is_recognized(op_type: str, domain: str, count: int) -> None:
    net = Net(21)
    net.domains[domain] = 1 if domain else 21
    net.input("x", (2, 3))
    net.node(op_type, *(["x"] * count), domain=domain, name="culprit", output="y")
    message = _refused(net.model("y"), "already quantized", op_type, "'culprit'", "float model")
    assert "\n" not in message
