"""What `lint` finds in a file, by breaking one thing at a time in a file in which it finds nothing."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np
import onnx
import pytest
from npu_models import npu_file, npu_net, with_initializer
from onnx import helper
from onnx_models import Net, conv_bn_relu, random_feed

from quark.demo import network_path
from quark.errors import ModelError, UnsupportedTypeError
from quark.inspect.lint import places
from quark.npu import RULE_NAMES
from quark.onnx import QuantFormat, get_default_config, quantize
from quark.onnx.lint import Level, lint


def rules(findings):
    return {finding.rule for finding in findings}


def only(findings):
    (found,) = findings
    return found


def test_nothing_is_found_where_nothing_is_wrong():
    assert lint(npu_file()) == ()


def test_a_finding_says_where_what_and_what_to_do():
    found = only(lint(npu_file(w=17)))
    assert (found.rule, found.node, found.tensor, found.level) == ("AdjustShiftCut", "conv", "w_quantized", "error")
    assert found.message == "shift_cut = wpos + ipos - opos = 17, expected 0 to 16"
    assert "AdjustShiftCut" in found.fix
    assert "from 17 to 16" in found.fix
    assert str(found).startswith("error: AdjustShiftCut: 'conv' 'w_quantized': shift_cut")
    with pytest.raises(FrozenInstanceError):
        found.rule = "other"


@pytest.mark.parametrize(("rule", "node", "positions"), [
    ("AlignConcat", "join", {"j": 4}), ("AlignPool", "pool", {"m": 4}), ("AlignPad", "pad", {"p": 6}),
    ("AlignSlice", "slice", {"s": 6}), ("AdjustShiftRead", "add", {"k": 13}), ("AdjustShiftWrite", "add", {"a": 13}),
    ("AdjustShiftCut", "conv", {"w": -1}), ("AdjustShiftBias", "conv", {"b": -4}),
    ("AdjustShiftBias", "conv", {"b": 13}), ("AdjustHardSigmoid", "gate", {"g": 6}),
    ("AdjustShiftSwish", "swish", {"y": -4}),
])  # fmt: skip
def test_positions(rule, node, positions):
    findings = lint(npu_file(**positions))
    assert (rule, node) in {(finding.rule, finding.node) for finding in findings}
    assert rules(findings) <= set(RULE_NAMES)
    assert all(finding.level is Level.ERROR for finding in findings)


def test_scales():
    clean = npu_file()
    found = only(lint(with_initializer(clean, "w_scale", np.array(0.01, np.float32))))
    assert (found.rule, found.node, found.tensor) == ("PowerOfTwoScale", "conv", "w_quantized")
    assert "0.01" in found.message.replace("0.00999999978", "0.01")
    found = only(lint(with_initializer(clean, "r_scale", np.array(0.03, np.float32))))
    assert (found.rule, found.node, found.tensor) == ("PowerOfTwoScale", "leaky", "r")
    channels = with_initializer(clean, "w_scale", np.full(4, 2.0**-7, np.float32))
    channels = with_initializer(channels, "w_zero_point", np.zeros(4, np.int8))
    found = only(lint(channels))
    assert (found.rule, found.message) == ("PerTensor", "4 scales, expected one for the tensor")
    assert "per_channel" in found.fix


def as_uint8(model, tensor, zero_point):
    return with_initializer(model, f"{tensor}_zero_point", np.array(zero_point, np.uint8))


def test_zero_points():
    clean = npu_file()
    assert lint(as_uint8(clean, "r", 128)) == ()
    found = only(lint(as_uint8(clean, "r", 0)))
    assert (found.rule, found.message) == ("Symmetric", "zero point 0 of uint8, expected 128")
    assert "UseUnsignedReLU" in found.fix
    found = only(lint(with_initializer(clean, "r_zero_point", np.array(3, np.int8))))
    assert "ActivationSymmetric" in found.fix
    found = only(lint(with_initializer(clean, "w_zero_point", np.array(3, np.int8))))
    assert (found.rule, found.message) == ("Symmetric", "zero point 3 of int8, expected 0")
    assert "WeightSymmetric" in found.fix


def test_types():
    model = with_initializer(npu_file(), "w_quantized", np.zeros((4, 4, 3, 3), np.uint8))
    found = only(lint(as_uint8(model, "w", 128)))
    assert (found.rule, found.message) == ("Int8", "weight of uint8, expected int8")
    operand = with_initializer(npu_file(), "k_quantized", np.zeros((1, 4, 1, 1), np.uint8))
    assert lint(as_uint8(operand, "k", 128)) == ()  # an operand of Add may have the type of activations
    bias = with_initializer(npu_file(), "b_quantized", np.zeros(4, np.int32))
    found = only(lint(with_initializer(bias, "b_zero_point", np.array(0, np.int32))))
    assert (found.rule, found.message) == ("Int8", "bias of int32, expected int8")
    assert "Int32Bias" in found.fix


def test_tensors_left_in_float():
    assert ("FloatTensor", "conv", "x", Level.ERROR) in parts(lint(npu_file(without="x")))
    assert parts(lint(npu_file(without="w"))) == {("FloatTensor", "conv", "w", Level.ERROR)}
    assert parts(lint(npu_file(without="b"))) == {("FloatTensor", "conv", "b", Level.ERROR)}
    assert parts(lint(npu_file(without="p"))) == {("FloatTensor", "slice", "p", Level.WARNING)}
    assert parts(lint(npu_file(without="y"))) == {("FloatTensor", "swish", "y", Level.WARNING)}


def parts(findings):
    return {(finding.rule, finding.node, finding.tensor, finding.level) for finding in findings}


def test_pairs_of_one_tensor_agree():
    model = npu_file()
    pair = [node for node in model.graph.node if node.name.startswith("m_")]
    for node in pair:
        copy = model.graph.node.add()
        copy.CopyFrom(node)
        copy.name = f"{node.name}_again"
        copy.output[0] = f"{node.output[0]}_again"
        if node.op_type == "DequantizeLinear":
            copy.input[0] += "_again"
        copy.input[1] = "k_scale"
    model.graph.node.sort(key=lambda node: node.name == "none")
    next(node for node in model.graph.node if node.name == "add").input[0] = f"{pair[1].output[0]}_again"
    assert "OneScale" in rules(lint(model))


@pytest.mark.parametrize(("opset", "level"), [
    (10, Level.ERROR), (11, Level.WARNING), (13, None), (17, None), (20, None), (21, Level.WARNING), (23, Level.ERROR),
])  # fmt: skip
def test_opsets(opset, level):
    model = npu_file()
    model.opset_import[0].version = opset
    findings = [each for each in lint(model) if each.rule == "Opset"]
    assert [finding.level for finding in findings] == ([] if level is None else [level])
    assert all("17" in finding.fix for finding in findings)


@pytest.mark.parametrize(("shape", "rule", "level"), [
    ((1, 4, 8, 8), None, None), (("N", 4, 8, 8), "Batch", Level.WARNING), ((2, 4, 8, 8), "Batch", Level.ERROR),
    ((1, 4, "H", 8), "FixedShape", Level.ERROR), (("N", 4, "H", "W"), "FixedShape", Level.ERROR),
    (None, "FixedShape", Level.ERROR),
])  # fmt: skip
def test_shapes(shape, rule, level):
    model = npu_file()
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape))
    del model.graph.value_info[:]
    findings = [each for each in lint(model) if each.rule in ("Batch", "FixedShape")]
    assert [(finding.rule, finding.level, finding.tensor) for finding in findings] == (
        [] if rule is None else [(rule, level, "x")]
    )
    if level is Level.WARNING:
        assert "FixShapes: 'x:[1,4,8,8]'" in findings[0].fix


def quantized(model, preset="XINT8", **changes):
    config = get_default_config(preset)
    for name, value in changes.items():
        setattr(config, name, value)
    return quantize(model, [random_feed(model, seed) for seed in range(4)], config).model


def behind_conv(op_type, *constants, **attributes):
    net = Net()
    y = net.conv(net.input("x", (1, 4, 8, 8)), (4, 4))
    y = net.node(
        op_type, y, *(net.constant(np.array(constant, np.float32)) for constant in constants), name="it", **attributes
    )
    return net.model(net.conv(y, (4, 4)))


def test_operators():
    found = next(each for each in lint(quantized(behind_conv("Sin"))) if each.rule == "Operator")
    assert (found.node, found.level) == ("it", Level.ERROR)
    assert "Sin" in found.message
    bounds = np.arange(1, 5, dtype=np.float32).reshape(1, 4, 1, 1)
    found = next(each for each in lint(quantized(behind_conv("Min", bounds))) if each.rule == "Operator")
    assert "4 channels" in found.message
    assert "CLEClip" in found.fix
    assert "Operator" not in rules(lint(quantized(behind_conv("Min", 3.0))))


def test_other_kinds_of_files():
    model = conv_bn_relu(batch=1)
    found = only(lint(model))
    assert (found.rule, found.level) == ("Quantized", Level.ERROR)
    assert "XINT8" in found.fix
    assert rules(lint(quantized(model, "MXINT8"))) == {"CustomDomain"}
    assert rules(lint(quantized(model, "A8W8"))) >= {"PowerOfTwoScale", "PerTensor", "Int8"}
    assert rules(lint(quantized(model, "A16W8"))) >= {"CustomDomain", "PowerOfTwoScale", "Int8"}
    on_codes = quantized(model, "U8S8_AAWS", quant_format=QuantFormat.QOperator)
    assert any("QLinearConv" in each.message for each in lint(on_codes))
    assert any("ConvInteger" in each.message for each in lint(quantized(model, "UINT8_DYNAMIC_QUANT")))


@pytest.mark.parametrize(("node", "option"), [
    ("leaky", "ConvertLeakyReluToDPUVersion"), ("gate", "ConvertSigmoidToHardSigmoid"),
])  # fmt: skip
def test_constants_that_the_npu_has_otherwise(node, option):
    findings = {each.node: each for each in lint(npu_file(is_simulated=False))}
    assert set(findings) == {"leaky", "gate"}
    assert findings[node].level is Level.WARNING
    assert option in findings[node].fix


def test_factors_behind_means():
    model = behind_conv("AveragePool", kernel_shape=[3, 3])
    assert "NpuConstant" not in rules(lint(quantized(model)))
    without = quantized(model, extra_options={"ActivationSymmetric": True, "ConvertAvgPoolToDPUVersion": False})
    found = only(lint(without))
    assert (found.rule, found.node) == ("NpuConstant", "it")
    assert f"{9 * 7 / 64:.6g}" in found.message


def test_files_by_others():
    """Constants as nodes, nodes without names or with the same one, `ai.onnx` written out."""
    model = npu_file()
    for tensor in list(model.graph.initializer):
        if tensor.name.endswith(("_scale", "_factor")):
            model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
            model.graph.initializer.remove(tensor)
    for node in model.graph.node:
        node.name = "" if node.op_type in ("Constant", "Conv") else "same"
        node.domain = "ai.onnx"
    assert lint(model) == ()
    broken = with_initializer(model, "w_zero_point", np.array(3, np.int8))
    assert only(lint(broken)).node == "c"  # what it makes, where it has no name


def test_sources(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(npu_file(w=17), path, save_as_external_data=True, size_threshold=0, location="model.data")
    assert only(lint(path)).rule == "AdjustShiftCut"
    assert only(lint(str(path))).rule == "AdjustShiftCut"
    assert only(lint(npu_file(w=17).SerializeToString())).rule == "AdjustShiftCut"
    (tmp_path / "model.data").unlink()
    with pytest.raises(ModelError, match=r"model\.data"):
        lint(path)


def test_what_is_no_model(tmp_path):
    (tmp_path / "text.onnx").write_text("nothing of the kind")
    for bad in (tmp_path / "text.onnx", tmp_path / "absent.onnx", tmp_path, b"", b"nonsense", onnx.ModelProto()):
        with pytest.raises(ModelError):
            lint(bad)
    with pytest.raises(UnsupportedTypeError):
        lint(3)
    nameless = npu_net()
    del nameless.opset_import[:]
    with pytest.raises(ModelError, match="opset"):
        lint(nameless)


def bfloat16_file(*nodes, domain=""):
    """Nodes in a row, behind a Cast to bfloat16 and back."""
    chain, last = [], "x"
    casts = [("Cast", {"to": onnx.TensorProto.BFLOAT16}), ("Cast", {"to": onnx.TensorProto.FLOAT})]
    for index, (op_type, attributes) in enumerate([*casts, *((node, {}) for node in nodes)]):
        of = domain if index > 1 else ""
        chain.append(onnx.helper.make_node(op_type, [last], [f"t{index}"], f"n{index}", domain=of, **attributes))
        last = f"t{index}"
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 4, 8]) for name in ("x", last)]
    imports = [onnx.helper.make_opsetid("", 17), *([onnx.helper.make_opsetid(domain, 1)] if domain else [])]
    graph = onnx.helper.make_graph(chain, "g", values[:1], values[1:])
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize(
    ("node", "domain", "rule", "where"),
    [
        ("Sigmoid", "", None, "NPU"),
        ("Softmax", "", "Unlisted", "unknown"),
        ("Relu", "", "Unlisted", "unknown"),
        ("Acosh", "", "Operator", "CPU"),
        ("Softmax", "com.example", "Operator", "CPU"),
        ("RotaryEmbedding", "com.microsoft", "Operator", "CPU"),
    ],
)
def test_what_the_compiler_does_with_a_node_in_bfloat16(node, domain, rule, where):
    model = bfloat16_file(node, domain=domain)
    findings = lint(model)
    assert [finding.rule for finding in findings] == ([] if rule is None else [rule])
    assert [(place.op_type, place.where.value) for place in places(model, findings)] == [(node, where)]


def test_bfloat16_in_quantizers_of_our_own_is_an_error():
    result = quantize(network_path(), None, "BF16", use_random_data=True).model
    assert {each.rule for each in lint(result) if each.level is Level.ERROR} == {"CustomDomain"}
    config = get_default_config("BF16")
    config.extra_options["BF16QDQToCast"] = True
    assert {each.rule for each in lint(quantize(network_path(), None, config, use_random_data=True).model)} == {
        "Batch",
        "Unlisted",
    }


@pytest.mark.parametrize("before", ["Softmax", "Relu"])
def test_attention_in_8_bits_is_a_warning(before):
    nodes = [
        helper.make_node(before, ["x"], ["p"]),
        helper.make_node("QuantizeLinear", ["p", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("MatMul", ["d", "v"], ["y"], "product"),
    ]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 4, 4]) for name in "xvy"]
    constants = [
        onnx.numpy_helper.from_array(np.float32(0.5), "s"),
        onnx.numpy_helper.from_array(np.int8(0), "z"),
    ]
    graph = helper.make_graph(nodes, "g", values[:2], values[2:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    found = [each.node for each in lint(model) if each.rule == "Transformer"]
    assert found == (["product"] if before == "Softmax" else [])
