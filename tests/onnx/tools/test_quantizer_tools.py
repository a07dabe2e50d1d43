"""Tools that remove quantizers, put operators on codes in their place, list them, or quantize with random numbers."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace

import numpy as np
import onnx
import pytest
from written_models import NUMBERS, RNG, build, numbers, operators, outputs

from quark.errors import InvalidValueError, ModelError
from quark.onnx import quantize
from quark.onnx.convert.quantizers import convert_qdq_to_qop, graph_of_model, remove_qdq
from quark.onnx.plan_reader import read_plan
from quark.onnx.tools import random_quantize
from quark.onnx.tools.convert_quant_to_float import (
    convert_initializers_to_float,
    convert_quant_to_float,
    remove_quantize_dequantize_nodes,
)
from quark.onnx.tools.print_a16w8_a8w8_nodes import TOOL as PRINT
from quark.onnx.tools.print_a16w8_a8w8_nodes import a16w8_a8w8_nodes
from quark.onnx.tools.remove_qdq_between_ops import find_node_by_output, remove_qdq_between_ops
from quark.onnx.tools.remove_qdq_mul_add import remove_qdq_mul_add

F32 = np.float32
QUANTIZERS = {"s": F32(0.1), "z": np.int8(2)}

# the input and a graph output share a quantizer, a branch reads another
NET = """net (float[1, 2, 4, 4] x, bool[1] t) => (float[1, 2, 4, 4] x1, float[1, 2, 4, 4] y, float[1, 2, 4, 4] u)
{
    xq = QuantizeLinear(x, s, z)
    x1 = DequantizeLinear(xq, s, z)
    wd = DequantizeLinear <axis = 0> (w_quantized, ws, wz)
    bd = DequantizeLinear <axis = 0> (b_quantized, bs)
    c = Conv <pads = [1, 1, 1, 1]> (x1, wd, bd)
    cq = QuantizeLinear(c, s, z)
    cd = DequantizeLinear(cq, s, z)
    y = If (t) <
        then_branch = a () => (float[1, 2, 4, 4] p) { p = Relu(cd) },
        else_branch = b () => (float[1, 2, 4, 4] cd2) { cd2 = DequantizeLinear(cq, s, z) }
    >
    z0 = Identity(x1)
    zq = QuantizeLinear(z0, s, z)
    u = DequantizeLinear(zq, s, z)
}"""


def net():
    return build(
        NET, **QUANTIZERS, w_quantized=RNG.integers(-128, 128, (2, 2, 3, 3)).astype(np.int8), ws=F32([0.02, 0.3]),
        wz=np.int8([1, -7]), b_quantized=np.int32([100, -(2**24) - 1]), bs=F32([0.002, 0.03]),
    )  # fmt: skip


def float_net(model):
    """`net` without any rounding, computed by hand."""
    codes, zero = numbers(model, "w_quantized").astype(F32), numbers(model, "wz").astype(F32)
    return build(
        """net (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] x1, float[1, 2, 4, 4] y, float[1, 2, 4, 4] u)
        { x1 = Identity(x) y = Conv <pads = [1, 1, 1, 1]> (x, w, b) u = Identity(x) }""",
        w=(codes - zero.reshape(2, 1, 1, 1)) * F32([0.02, 0.3]).reshape(2, 1, 1, 1),
        b=numbers(model, "b_quantized").astype(F32) * F32([0.002, 0.03]),
    )


@pytest.mark.parametrize("convert", [remove_qdq, convert_quant_to_float])
def test_nothing_is_rounded_and_the_interface_stays(convert):
    model = net()
    converted = convert(model)
    feeds = {"x": NUMBERS.reshape(1, 2, 4, 4), "t": np.array([False])}
    expected = outputs(float_net(model), x=feeds["x"])
    for before, after in zip(expected, outputs(converted, **feeds), strict=True):
        np.testing.assert_array_equal(before, after)
    assert [each.name for each in converted.graph.output] == ["x1", "y", "u"]
    assert "QuantizeLinear" not in operators(converted)
    assert operators(model).count("QuantizeLinear") == 3, "the model that was passed does not change"


def test_float_weights_have_their_names_and_the_exact_values_of_the_codes():
    model = net()
    converted = convert_quant_to_float(model)
    np.testing.assert_array_equal(numbers(converted, "w"), numbers(float_net(model), "w"))
    np.testing.assert_array_equal(numbers(converted, "b"), numbers(float_net(model), "b"))
    assert {each.name for each in converted.graph.initializer} == {"w", "b"}
    bare, conversions = remove_quantize_dequantize_nodes(model)
    assert {name: (code["scale"], code["zero_point"]) for name, code in conversions.items()} == {
        "w": ("ws", "wz"), "b": ("bs", ""),
    }  # fmt: skip
    assert numbers(bare, "w").dtype == np.int8
    assert convert_initializers_to_float(bare, conversions) == converted
    with pytest.raises(ModelError, match="'v' is not an initializer"):
        convert_initializers_to_float(bare, {"v": {"scale": "ws", "zero_point": "wz"}})


def test_codes_with_two_meanings_become_two_weights():
    text = """net (float[4, 8] x) => (float[4, 8] y)
    {
        a = DequantizeLinear(c, s)
        b = DequantizeLinear(c, r)
        d = Add(x, a)
        y = Mul(d, b)
    }"""
    model = build(text, c=np.int8([3]), s=F32(0.5), r=F32(2))
    converted = convert_quant_to_float(model)
    assert sorted(numbers(converted, each.name).item() for each in converted.graph.initializer) == [1.5, 6.0]
    np.testing.assert_array_equal(outputs(model)[0], outputs(converted)[0])


@pytest.mark.parametrize("preset", ["MXINT8", "BF16", "MX9_INT8"])
def test_other_formats_go_back_to_float_too(preset, tmp_path):
    weight = RNG.standard_normal((8, 999)).astype(F32)
    model = build("net (float[4, 8] x) => (float[4, 999] y) { h = MatMul(x, w) y = Relu(h) }", w=weight)
    quantized = quantize(model, [{"x": NUMBERS.reshape(4, 8)}], preset)
    path = quantized.save(tmp_path / "q.onnx", pack="portable" if preset == "MXINT8" else None)
    assert convert_quant_to_float(path, tmp_path / "f.onnx") is None
    converted = onnx.load(tmp_path / "f.onnx")
    assert operators(converted) == ["MatMul", "Relu"]
    assert not converted.functions
    assert [opset.domain for opset in converted.opset_import] == [""]
    np.testing.assert_allclose(numbers(converted, "w"), weight, atol=np.abs(weight).max() / 64)
    product = np.maximum(NUMBERS.reshape(4, 8) @ numbers(converted, "w"), 0)
    np.testing.assert_allclose(outputs(converted)[0], product, atol=1e-5)


def test_operators_on_codes_cannot_go_back():
    text = """net (float[4, 8] x) => (float[4, 8] y)
    { q = QuantizeLinear(x, s, z) p = QLinearMatMul(q, s, z, w, s, z, s, z) y = DequantizeLinear(p, s, z) }"""
    model = build(text, **QUANTIZERS, w=np.ones((8, 8), np.int8))
    with pytest.raises(ModelError, match=r"'p' \(QLinearMatMul\) computes with codes"):
        convert_quant_to_float(model)


# conv and relu: alone; with another DequantizeLinear; with another reader of the same; with a graph output
BETWEEN = """net (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y, float[1, 2, 4, 4] d4, float[1, 2, 4, 4] v)
{
    c1 = Conv(x, w) q1 = QuantizeLinear(c1, s, z) d1 = DequantizeLinear(q1, s, z) r1 = Relu(d1)
    c2 = Conv(r1, w) q2 = QuantizeLinear(c2, s, z) d2 = DequantizeLinear(q2, s, z) r2 = Relu(d2)
    e2 = DequantizeLinear(q2, s, z) v = Neg(e2)
    c3 = Conv(r2, w) q3 = QuantizeLinear(c3, s, z) d3 = DequantizeLinear(q3, s, z) r3 = Relu(d3) n3 = Add(r3, d3)
    c4 = Conv(n3, w) q4 = QuantizeLinear(c4, s, z) d4 = DequantizeLinear(q4, s, z) r4 = Relu(d4)
    m = Mul(r4, r4) mq = QuantizeLinear(m, s, z) md = DequantizeLinear(mq, s, z) y = Add(md, md)
}"""


def test_quantizers_between_operators_go_where_nobody_else_reads_them(caplog):
    model = build(BETWEEN, **QUANTIZERS, w=RNG.standard_normal((2, 2, 1, 1)).astype(F32))
    with caplog.at_level("DEBUG", logger="quark"):
        converted = remove_qdq_between_ops(model, [("Conv", "Relu"), ("Mul", "Add")])
    left = [message for message in caplog.messages if message.startswith("Skip pattern match: output of Dequantize")]
    assert [message.partition("'")[2][:2] for message in left] == ["d3", "d4"]
    reads = {node.output[0]: list(node.input) for node in converted.graph.node}
    assert [reads[f"r{index}"] for index in (1, 2, 3, 4)] == [["c1"], ["c2"], ["d3"], ["d4"]]
    assert reads["v"] == ["e2"]
    assert "d2" not in reads, "the other DequantizeLinear keeps its QuantizeLinear"
    assert reads["y"] == ["m", "m"]
    assert [output.shape for output in outputs(converted)] == [(1, 2, 4, 4)] * 3
    only = remove_qdq_mul_add(model)
    assert operators(only).count("QuantizeLinear") == 4
    assert find_node_by_output(only.graph.node, "y").input == ["m", "m"]
    assert find_node_by_output(only.graph.node, "nowhere") is None


@pytest.mark.parametrize("between", ["Conv,Relu", [("Conv",)], [("Conv", 3)], ("Conv", "Relu")])
def test_pairs_of_operators_are_checked(between):
    with pytest.raises(InvalidValueError, match="expected a list of pairs"):
        remove_qdq_between_ops(net(), between)


def test_operators_on_codes_compute_the_same():
    text = """net (float[4, 8] x) => (float[4, 8] y)
    {
        q = QuantizeLinear(x, s, z)
        d = DequantizeLinear(q, s, z)
        wd = DequantizeLinear(w, ws, wz)
        m = MatMul(d, wd)
        mq = QuantizeLinear(m, r, z)
        y = DequantizeLinear(mq, r, z)
    }"""
    codes = RNG.integers(-127, 128, (8, 8)).astype(np.int8)
    model = build(text, opset=17, **QUANTIZERS, r=F32(0.5), w=codes, ws=F32(0.01), wz=np.int8(0))
    converted = convert_qdq_to_qop(model)
    assert operators(converted) == ["QuantizeLinear", "QLinearMatMul", "DequantizeLinear"]
    np.testing.assert_array_equal(outputs(model)[0], outputs(converted)[0])


def test_layers_are_listed_by_the_width_of_their_data(tmp_path, capsys):
    text = """net (float[4, 8] x) => (float[4, 8] y)
    {
        q = QuantizeLinear(x, s, z)
        d = DequantizeLinear(q, s, z)
        wd = DequantizeLinear(w, s, z)
        m = MatMul(d, wd)
        h = QuantizeLinear(m, s, zz)
        e = DequantizeLinear(h, s, zz)
        g = Gemm(e, wd)
        t = Transpose(e)
        a = MatMul(e, t)
        y = MatMul(a, g)
    }"""
    model = build(text, **QUANTIZERS, zz=np.uint16(9), w=np.ones((8, 8), np.int8))
    for node in model.graph.node:
        node.name = f"node_{node.output[0]}"
    onnx.save(model, tmp_path / "q.onnx")
    assert a16w8_a8w8_nodes(tmp_path / "q.onnx") == (["node_m"], ["node_g"])
    onnx.save(float_net(net()), tmp_path / "f.onnx")
    assert a16w8_a8w8_nodes(tmp_path / "f.onnx") == ([], [])
    PRINT.run([str(tmp_path / "q.onnx")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "int8 activation node names:", "node_m", "int16 activation node names:", "node_g",
        "int8 activation node count:  1", "int16 activation node count:  1",
    ]  # fmt: skip


def test_weights_that_were_not_loaded_are_not_read_from_files():
    model = net()
    model.graph.initializer[2].data_location = onnx.TensorProto.EXTERNAL
    model.graph.initializer[2].external_data.add(key="location", value="/etc/hostname")
    with pytest.raises(ModelError, match="were not loaded"):
        graph_of_model(model)


# ---- random_quantize ----


def test_random_quantize_leaves_out_nodes_and_subgraphs(tmp_path):
    text = """net (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y)
    { a = Conv(x, w) b = Relu(a) c = Conv(b, w) y = Conv(c, w) }"""
    model = build(text, w=RNG.standard_normal((2, 2, 1, 1)).astype(F32))
    for node, name in zip(model.graph.node, ("one", "two", "three", "four"), strict=True):
        node.name = name
    onnx.save(model, tmp_path / "f.onnx")
    args = random_quantize.parse_args(
        [
            *("--input_model", str(tmp_path / "f.onnx"), "--quantized_model_path", str(tmp_path / "q.onnx")),
            *("--config", "A8W8", "--exclude_nodes", "four", "--exclude_subgraphs", "[one], [two]"),
        ]
    )
    assert isinstance(args, Namespace)
    random_quantize.main(args)
    quantized = read_plan(tmp_path / "q.onnx")
    assert {node.node for node in quantized.skipped} == {"one", "four"}
    assert {reader.node for row in quantized.tensors for reader in row.readers if row.tensor == "w"} == {"three"}


@pytest.mark.parametrize("text", ["[a]", "a, b", "[a], [b], [c]", "[a], []"])
def test_subgraphs_are_checked(text):
    assert random_quantize.parse_subgraphs_list("[a, b], [c]; [d],[e]") == [(["a", "b"], ["c"]), (["d"], ["e"])]
    with pytest.raises(InvalidValueError, match="exclude_subgraphs"):
        random_quantize.parse_subgraphs_list(text)


def test_a_module_run_as_a_program_ends_with_status_1_and_one_line(tmp_path):
    words = ["quark.onnx.tools.convert_qdq_to_qop", "--input_model", "none.onnx", "--output_model", "out.onnx"]
    run = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith("Error: ")
    assert run.stderr.count("\n") == 1
