"""The tools on float types and custom operators: numbers, node forms, and files that stay whole."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from quark.errors import InvalidValueError, ModelError
from quark.formats import get_format
from quark.formats.block import BlockQuantizer
from quark.onnx.convert.float_presets import BF16_FORMATS, bfloat16_model, block_float_model
from quark.onnx.convert.floats import convert_to_bf16, to_bfloat16, to_float16, to_float32
from quark.onnx.session import open_session
from quark.onnx.tools.convert_custom_ops import NAME_MAPPING, OLD_DOMAIN, convert_custom_ops
from quark.onnx.tools.convert_customqdq_to_qdq import convert_customqdq_to_qdq, custom_ops_infer_shapes
from quark.onnx.tools.convert_fp16_to_bf16 import add_fp16_input_output_cast
from quark.onnx.tools.convert_lstm_to_customlstm import convert_lstm_to_customlstm
from quark.onnx.tools.insert_clip_bfloat16_qdq import insert_clip_bfloat16_qdq
from quark.onnx.tools.remove_bf16_cast import float32_to_bfloat16, remove_bf16_cast
from quark.onnx.tools.replace_bfloat16_qdq_cast import replace_bfloat16_qdq_cast
from quark.onnx.tools.replace_inf_weights import replace_inf_in_onnx_weights
from quark.ops.onnx_nodes import make_block_node
from quark.ops.portable_functions import add_portable_functions

FLOAT, FLOAT16, BFLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16


def network(kind="float", size=8):
    """A layer, an If whose branches capture its result, a second output, and an input with two readers."""
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        net ({kind}[2,{size}] x, bool c) => ({kind}[2,{size}] y, {kind}[2,{size}] m) {{
            m = MatMul(x, w)
            b = If <then_branch = one () => ({kind}[2,{size}] t) {{ t = Relu(m) }},
                    else_branch = two () => ({kind}[2,{size}] e) {{ e = Mul(m, k) }}> (c)
            y = Add(b, x)
        }}"""
    )
    for index, node in enumerate(model.graph.node):
        node.name = f"node{index}"
    random, dtype = np.random.default_rng(0), np.float16 if kind == "float16" else np.float32
    numbers = {"w": random.standard_normal((size, size)), "k": np.array(0.3)}
    model.graph.initializer.extend(
        numpy_helper.from_array(number.astype(dtype), name) for name, number in numbers.items()
    )
    return model


def outputs(model, x, branch=False, **options):
    feeds = {"x": x, "c": np.array(branch)}
    session = open_session(model.SerializeToString(), threads=1, **options)
    return session.run(None, {input_.name: feeds[input_.name] for input_ in session.get_inputs()})


def weights(model):
    return {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}


def types(infos):
    return [info.type.tensor_type.elem_type for info in infos]


def operators(model):
    return [node.op_type for node in model.graph.node]


X = np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)


@pytest.mark.parametrize("branch", [False, True])
def test_float16_to_float32_computes_what_float16_weights_say(branch):
    wide = to_float32(network("float16"))
    assert types([*wide.graph.input, *wide.graph.output]) == [FLOAT, TensorProto.BOOL, FLOAT, FLOAT]
    assert {weight.dtype for weight in weights(wide).values()} == {np.dtype(np.float32)}
    w = weights(network("float16"))["w"].astype(np.float32)
    y, m = outputs(wide, X, branch)
    np.testing.assert_allclose(m, X @ w, rtol=1e-5)
    np.testing.assert_array_equal(y, (np.maximum(m, 0) if branch else m * np.float32(np.float16(0.3))) + X)


def test_only_the_nodes_between_two_become_float32():
    model = to_float32(network("float16"), subgraphs_to_include=[(["node0"], ["node1"])])
    onnx.checker.check_model(model, full_check=True)
    assert types(model.graph.output) == [FLOAT16, FLOAT16]
    assert operators(model).count("Cast") == 3  # x, then what leaves: m and b
    assert weights(model)["w"].dtype == np.float32
    assert outputs(model, X.astype(np.float16))[0].dtype == np.float16
    with pytest.raises(InvalidValueError, match="no node 'node7'"):
        to_float32(network("float16"), subgraphs_to_include=[(["node7"], [])])


def test_float16_clips_numbers_and_keeps_operators_without_float16_in_float32():
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> net (float[4] x) => (float[4] y)
        <float[4] w = {1e6, -1e6, 1e-12, 0.0}, float[1] k = {2.0}, float[1] j = {0.3}>
        { a = Mul(x, w) b = Max(a, k) f = Mul(b, j) d = ConstantOfShape(n) y = Add(f, d) }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array([4]), "n"))
    half = to_float16(model, is_simplified=False)
    onnx.checker.check_model(half, full_check=True)
    np.testing.assert_array_equal(weights(half)["w"], np.array([65504, -65504, 2.0**-24, 0], np.float16))
    assert operators(half) == ["Mul", "Cast", "Max", "Cast", "Mul", "ConstantOfShape", "Add"]
    assert weights(half)["k"].dtype == np.float32
    assert "ConstantOfShape" not in operators(to_float16(model))
    kept = to_float16(network(), keep_io_types=True)
    assert types(kept.graph.output) == [FLOAT, FLOAT]
    np.testing.assert_allclose(outputs(kept, X)[1], outputs(network(), X)[1], atol=0.02)


@pytest.mark.parametrize("kind", ["float", "float16"])
def test_bf16_format_computes_in_bfloat16_between_casts(kind):
    model = bfloat16_model(network(kind), "bf16", is_float16=kind == "float16")
    port = FLOAT16 if kind == "float16" else FLOAT
    onnx.checker.check_model(onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True))
    assert types([*model.graph.input, *model.graph.output]) == [port, TensorProto.BOOL, port, port]
    expected = weights(network(kind))["w"].astype(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(weights(model)["w"].view(np.uint16), expected.view(np.uint16))
    assert operators(model) == ["Cast", "MatMul", "If", "Add", "Cast", "Cast"]  # one Cast for all readers of x


def test_convert_to_bf16_takes_amds_arguments():
    constant = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g () => (float[2] y) { y = Constant <value = float[2] {1.0, 2.0}> () }'
    )
    converted = convert_to_bf16(constant, BFLOAT16)
    np.testing.assert_array_equal(open_session(converted.SerializeToString()).run(None, {})[0], [1, 2])
    with pytest.raises(InvalidValueError, match="BFLOAT16"):
        convert_to_bf16(constant, FLOAT16)
    old = network()
    old.opset_import[0].version = 12
    with pytest.raises(ModelError, match="opset 12"):
        to_bfloat16(old)


def test_three_formats_compute_with_the_same_bfloat16_weights():
    rounded = float32_to_bfloat16(weights(network())["w"])
    x = float32_to_bfloat16(X)
    m = x @ rounded
    simulated = bfloat16_model(network(), "simulate_bf16")
    np.testing.assert_allclose(outputs(simulated, X)[1], m, rtol=1e-5, atol=1e-6)
    casts, custom = (bfloat16_model(network(), value) for value in ("with_cast", "customqdq"))
    assert {"ExtendedQuantizeLinear"} <= set(operators(custom))
    assert "ExtendedQuantizeLinear" not in operators(casts)
    for one, other in zip(outputs(casts, X), outputs(custom, X), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, float32_to_bfloat16(one))
    for one, other in zip(outputs(remove_bf16_cast(casts), X), outputs(simulated, X), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(InvalidValueError, match="'fp8': expected one of bf16, customqdq"):
        bfloat16_model(network(), "fp8")


def test_float16_models_keep_their_ports():
    for fmt in BF16_FORMATS[1:]:
        model = bfloat16_model(network("float16"), fmt, is_float16=True)
        assert types(model.graph.output) == [FLOAT16, FLOAT16]
        assert outputs(model, X.astype(np.float16))[0].dtype == np.float16
    model = add_fp16_input_output_cast(network())
    assert types(model.graph.input) == [FLOAT16, TensorProto.BOOL]
    assert operators(model).count("Cast") == 3
    block = block_float_model(network("float16"), is_float16=True)
    assert "BFPQuantizeDequantize" in operators(block)
    assert outputs(block, X.astype(np.float16))[0].dtype == np.float16


def cast_model():
    """AMD's form: names that say nothing, a weight with a second reader, a pair before an output that is read too."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> net (float[2] x) => (float[2] y, float[2] z)
        <float[2] w = {1.001, 2.003}, float[2] v = {0.7, 0.3}>
        { p = Cast<to = 16>(x) q = Cast<to = 1>(p) r = Cast<to = 16>(w) s = Cast<to = 1>(r)
          a = Mul(q, s) b = Cast<to = 16>(a) d = Cast<to = 1>(b) e = Add(d, w) f = Cast<to = 16>(e) y = Cast<to = 1>(f)
          g = Cast<to = 16>(v) h = Cast<to = 1>(g) z = Sub(y, h) }"""
    )
    onnx.checker.check_model(model)
    return model


def test_remove_bf16_cast_keeps_inputs_shared_weights_and_outputs():
    model = remove_bf16_cast(cast_model())
    onnx.checker.check_model(model)
    assert operators(model) == ["Cast", "Cast", "Mul", "Add", "Sub"]
    assert sorted(weights(model)) == ["v_bf16", "w", "w_bf16"]
    x, w, v = np.array([0.1, 3.3], np.float32), *(np.array(value, np.float32) for value in ([1.001, 2.003], [0.7, 0.3]))
    y = float32_to_bfloat16(x) * float32_to_bfloat16(w) + w
    results = outputs(model, x)
    np.testing.assert_array_equal(results[0], y)
    np.testing.assert_array_equal(results[1], y - float32_to_bfloat16(v))


def custom_model(scale, zero_point, axis=None, zero_type=BFLOAT16):
    """x, quantized and back."""
    attributes = {} if axis is None else {"axis": axis}
    nodes = [
        helper.make_node(
            f"Extended{half}Linear", [source, "s", "z"], [target], half, domain="com.amd.quark", **attributes
        )
        for half, source, target in (("Quantize", "x", "q"), ("Dequantize", "q", "y"))
    ]
    ports = [helper.make_tensor_value_info(name, FLOAT, [2, 3]) for name in "xy"]
    zero = helper.make_tensor("z", zero_type, np.shape(zero_point), np.ravel(zero_point))
    tensors = [numpy_helper.from_array(np.array(scale, np.float32), "s"), zero]
    graph = helper.make_graph(nodes, "custom", ports[:1], ports[1:], tensors)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.amd.quark", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


NUMBERS = np.array([[0.1, -2.7, 3.3], [1e3, -1e-3, 7.77]], np.float32)


@pytest.mark.parametrize(("scale", "axis"), [(1.0, None), (0.5, None), ([1.0, 0.25], 0), ([2.0, 1.0, 4.0], 1)])
def test_casts_do_what_the_bfloat16_quantizer_did(scale, axis):
    zeros = np.zeros(np.shape(scale))
    expected = outputs(custom_model(scale, zeros, axis), NUMBERS)[0]
    model = replace_bfloat16_qdq_cast(custom_model(scale, zeros, axis))
    assert set(operators(model)) == ({"Cast"} if scale == 1.0 else {"Cast", "Mul"})
    np.testing.assert_array_equal(outputs(model, NUMBERS, has_library=False)[0], expected)


def test_clip_keeps_large_numbers_finite_through_casts():
    model = insert_clip_bfloat16_qdq(custom_model(1.0, 0.0))
    assert operators(model)[0] == "Clip"
    x = np.full((2, 3), 3.4e38, np.float32)
    largest = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    assert (outputs(replace_bfloat16_qdq_cast(model), x)[0] == largest).all()
    assert np.isinf(outputs(replace_bfloat16_qdq_cast(custom_model(1.0, 0.0)), x)[0]).all()


def test_custom_integers_become_standard_quantizers_with_the_axis_they_had():
    model = custom_model([0.5, 0.03], [0, 0], zero_type=TensorProto.INT16)  # no axis: 0, where the standard has 1
    expected = outputs(model, NUMBERS)[0]
    converted = custom_ops_infer_shapes(convert_customqdq_to_qdq(model))
    assert {node.domain for node in converted.graph.node} == {"com.microsoft"}
    assert [(each.name, each.type.tensor_type.elem_type) for each in converted.graph.value_info] == [
        ("q", TensorProto.INT16)
    ]
    np.testing.assert_array_equal(outputs(converted, NUMBERS, has_library=False)[0], expected)
    stays = convert_customqdq_to_qdq(custom_model(1.0, 0.0))
    assert operators(stays) == ["ExtendedQuantizeLinear", "ExtendedDequantizeLinear"]


def test_vitis_names_and_back(tmp_path):
    tool = import_module("quark.onnx.tools.convert_custom_ops").TOOL
    paths = [str(tmp_path / f"{name}.onnx") for name in ("new", "old", "back")]
    onnx.save(custom_model(0.1, 3, zero_type=TensorProto.INT8), paths[0])
    tool.run(["--input_model", paths[0], "--output_model", paths[1]])
    tool.run(["--input_model", paths[1], "--output_model", paths[2], "--reverse_conversion", "True"])
    models = [onnx.load(path) for path in paths]
    assert operators(models[1]) == ["VitisQuantizeLinear", "VitisDequantizeLinear"]
    assert {node.domain for node in models[1].graph.node} == {OLD_DOMAIN}
    assert models[2].graph == models[0].graph
    results = [outputs(model, NUMBERS, has_library=index != 1)[0] for index, model in enumerate(models)]
    np.testing.assert_array_equal(results[1], results[0])  # in a runtime without any library
    standard = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[1] x) => (float[1] y) {y = Relu(x)}'
    )
    assert convert_custom_ops(standard, OLD_DOMAIN, {**NAME_MAPPING, "Relu": "Other"}) == standard


def lstm_model(random, *, batch=1, power_of_two=False):
    """A bidirectional LSTM whose tensors are quantized to uint16."""
    hidden, inputs, length = 4, 3, 6
    shapes = {"W": (2, 4 * hidden, inputs), "R": (2, 4 * hidden, hidden), "B": (2, 8 * hidden)}
    nodes, tensors = [], []

    def dequantize(source, name, result, low, high):
        scale = 2.0**-13 if power_of_two else (high - low) / 65535
        zero = np.uint16(32768 if power_of_two else round(-low / scale))
        tensors.extend(
            [numpy_helper.from_array(np.float32(scale), f"{name}_s"), numpy_helper.from_array(zero, f"{name}_z")]
        )
        nodes.append(helper.make_node("DequantizeLinear", [source, f"{name}_s", f"{name}_z"], [result], f"{name}_dq"))
        return np.float32(scale), zero

    for name, low, high in (("x", -3.0, 3.4), *((name, -2.0, 2.1) for name in shapes)):
        scale, zero = dequantize(f"{name}_q", name, f"{name}_d", low, high)
        if name in shapes:
            codes = np.clip(np.round(random.standard_normal(shapes[name]) * 0.5 / scale) + zero, 0, 65535)
            tensors.append(numpy_helper.from_array(codes.astype(np.uint16), f"{name}_q"))
    nodes.insert(0, helper.make_node("QuantizeLinear", ["x", "x_s", "x_z"], ["x_q"]))
    attributes = {"direction": "bidirectional", "hidden_size": hidden}
    nodes.append(helper.make_node("LSTM", ["x_d", "W_d", "R_d", "B_d"], ["h"], "lstm", **attributes))
    nodes.append(helper.make_node("QuantizeLinear", ["h", "h_s", "h_z"], ["h_q"]))
    dequantize("h_q", "h", "y", -1.0, 1.0)
    ports = [helper.make_tensor_value_info("x", FLOAT, [length, batch, inputs])]
    ports.append(helper.make_tensor_value_info("y", FLOAT, [length, 2, batch, hidden]))
    graph = helper.make_graph(nodes, "recurrent", ports[:1], ports[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(("batch", "power_of_two"), [(1, False), (3, False), (1, True)])
def test_custom_lstm_is_within_two_codes_of_the_quantized_one(batch, power_of_two):
    random = np.random.default_rng(batch)
    model = lstm_model(random, batch=batch, power_of_two=power_of_two)
    converted = convert_lstm_to_customlstm(model)
    node = next(each for each in converted.graph.node if each.op_type == "ExtendedLSTM")
    found = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    assert node.domain == "com.amd.quark"
    assert list(node.input) == ["x_d", "W_d", "R_d", "B_d"]
    assert found["hidden_size"] == 4
    assert found["x_zero_point"] == weights(model)["x_z"]
    assert found["y_scale"] == weights(model)["h_s"]
    x = random.standard_normal((6, batch, 3)).astype(np.float32)
    expected = outputs(model, x)[0]
    for has_library in (True, False):
        distance = np.abs(outputs(converted, x, has_library=has_library)[0] - expected).max()
        assert distance <= 2.1 * found["y_scale"]


def test_an_lstm_that_the_operator_cannot_express_stays(caplog):
    model = lstm_model(np.random.default_rng(0))
    next(node for node in model.graph.node if node.op_type == "LSTM").attribute.append(
        helper.make_attribute("clip", 3.0)
    )
    assert "LSTM" in operators(convert_lstm_to_customlstm(model))
    assert "LSTM 'lstm' stays: it has clip or input_forget" in caplog.text


def test_infinite_weights_of_both_signs_are_replaced(tmp_path):
    model = network()
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array([np.inf, -np.inf, 1], np.float32), "w"))
    onnx.save(model, tmp_path / "in.onnx")
    assert replace_inf_in_onnx_weights(tmp_path / "in.onnx", tmp_path / "out.onnx", 5.0) is None
    np.testing.assert_array_equal(weights(onnx.load(tmp_path / "out.onnx"))["w"], [5, -5, 1])
    result = replace_inf_in_onnx_weights(model)
    np.testing.assert_array_equal(weights(result)["w"], [10000, -10000, 1])
    half = network("float16")
    half.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array([np.inf], np.float16), "w"))
    with pytest.raises(InvalidValueError, match="replace_inf_value 100000: initializer 'w' is of float16"):
        replace_inf_in_onnx_weights(half, replace_inf_value=1e5)


TOOLS = {  # a model that there is nothing to do about, and what the tool says
    "convert_fp16_to_bf16": (network(), "no float16 tensors"),
    "convert_fp16_to_bfp16": (network(), "no float16 tensors"),
    "convert_fp16_to_fp32": (network(), "no float16 tensors"),
    "convert_fp32_to_bf16": (network("float16"), "no float32 tensors"),
    "convert_fp32_to_bfp16": (network("float16"), "no float32 tensors"),
    "convert_fp32_to_fp16": (network("float16"), "no float32 tensors"),
    "insert_clip_bfloat16_qdq": (network(), "no quantizers of com.amd.quark"),
    "replace_bfloat16_qdq_cast": (network(), "no quantizers of com.amd.quark"),
    "remove_bf16_cast": (network(), "no Casts to bfloat16"),
    "convert_custom_ops": (network(), "no operators of com.amd.quark"),
    "convert_customqdq_to_qdq": (network(), "no quantizers of com.amd.quark with integers"),
    "convert_lstm_to_customlstm": (network(), "no LSTM"),
}


@pytest.mark.parametrize("name", TOOLS)
def test_tools_end_with_one_line_and_write_nothing(name, tmp_path):
    tool, (model, complaint) = import_module(f"quark.onnx.tools.{name}").TOOL, TOOLS[name]
    flags = [f"--{argument.key}" for argument in tool.arguments[:2]]
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    (tmp_path / "text.onnx").write_text("no model")
    onnx.save(model, source)
    before = source.read_bytes()
    cases = [(source, target, complaint), (tmp_path / "text.onnx", target, "not an ONNX model")]
    cases += [(source, source, "not overwritten"), (tmp_path / "none.onnx", target, "no such file")]
    for read, written, words in cases:
        with pytest.raises(SystemExit) as stopped:
            tool.run([flags[0], str(read), flags[1], str(written)])
        assert words in str(stopped.value)
        assert "\n" not in str(stopped.value)
        assert not target.exists()
    assert source.read_bytes() == before


def test_portable_functions_follow_the_types():
    node = make_block_node(BlockQuantizer(get_format("mxint8")), 1, "x", "y")
    value = [helper.make_tensor_value_info(name, FLOAT, [2, 40]) for name in "xy"]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.amd.quark", 1)]
    graph = helper.make_graph([node], "g", value[:1], value[1:])
    model = add_portable_functions(helper.make_model(graph, opset_imports=imports, ir_version=9))
    x = np.random.default_rng(0).standard_normal((2, 40)).astype(np.float16)
    half = to_float16(model)
    (found,) = outputs(half, x, has_library=False)
    (expected,) = outputs(model, x.astype(np.float32), has_library=False)
    assert np.array_equal(found, expected.astype(np.float16))
    (back,) = outputs(to_float32(half), x.astype(np.float32), has_library=False)
    assert np.array_equal(back, expected)


def test_external_data_on_both_sides(tmp_path):
    model = network(size=64)
    onnx.save(model, tmp_path / "in.onnx", save_as_external_data=True, location="in.data", size_threshold=0)
    for name in ("convert_fp32_to_fp16", "convert_fp32_to_bf16"):
        tool, folder = import_module(f"quark.onnx.tools.{name}").TOOL, tmp_path / name
        folder.mkdir()
        tool.run(
            ["--input", str(tmp_path / "in.onnx"), "--output", str(folder / "out.onnx"), "--save_as_external_data"]
        )
        assert len(list(folder.glob("out-*.data"))) == 1
        assert weights(onnx.load(folder / "out.onnx"))


def test_a_tool_as_a_program(tmp_path):
    onnx.save(network(), tmp_path / "in.onnx")
    words = [sys.executable, "-m", "quark.onnx.tools.convert_fp32_to_fp16", "in.onnx", "out.onnx", "--keep_io_types"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("in.onnx -> out.onnx")
    assert types(onnx.load(tmp_path / "out.onnx").graph.output) == [FLOAT, FLOAT]
