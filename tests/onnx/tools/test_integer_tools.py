"""Conversions between types of codes: exact where they can be, rounded once where not, and never half-done."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from written_models import RNG, build, numbers, outputs

from quark.errors import ModelError
from quark.onnx.convert.integers import (
    convert_a8w8_npu_to_a8w8_cpu,
    convert_bias_int32_to_int16,
    convert_s8s8_to_u8s8,
    convert_u16s8_to_s16s8,
    narrow_to_uint8,
    resize_to_power_of_two,
    scale2pos,
)
from quark.onnx.tools.convert_resize_fs_to_pof2s import fs_to_pof2s
from quark.onnx.tools.convert_u16u8_to_u8u8 import convert_u16u8_to_u8u8

F32 = np.float32
W = RNG.integers(-127, 128, (2, 2, 3, 3)).astype(np.int8)

# zero point z is shared with the weight; c has one zero point for each channel; a branch dequantizes h, which the main
# graph quantized; the type of h is an attribute
AWKWARD = """net (float[1, 2, 4, 4] x, bool[1] t) => (float[1, 2, 4, 4] y, float[1, 2, 4, 4] v)
{
    xq = QuantizeLinear(x, s, z)
    xd = DequantizeLinear(xq, s, z)
    wd = DequantizeLinear(w, s, z)
    c = Conv <pads = [1, 1, 1, 1]> (xd, wd)
    cq = QuantizeLinear <axis = 1> (c, cs, cz)
    v = DequantizeLinear <axis = 1> (cq, cs, cz)
    hq = QuantizeLinear <TYPE> (v, cs0)
    y = If (t) <
        then_branch = a () => (float[1, 2, 4, 4] p) { p = DequantizeLinear(hq, cs0) },
        else_branch = b () => (float[1, 2, 4, 4] n) { m = DequantizeLinear(hq, cs0) n = Neg(m) }
    >
}"""


@pytest.mark.parametrize(
    ("convert", "source", "target", "offset"),
    [(convert_s8s8_to_u8s8, np.int8, np.uint8, 128), (convert_u16s8_to_s16s8, np.uint16, np.int16, -32768)],
)
def test_shifted_codes_keep_every_value(convert, source, target, offset):
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(source))
    middle = 0 if source is np.int8 else 32768
    model = build(
        AWKWARD.replace("<TYPE>", f"<output_dtype = {kind}>"),
        w=W.astype(source) if source is np.int8 else (W.astype(np.int32) + middle).astype(source),
        s=F32(0.02),
        z=np.array(middle + 3, source),
        cs=F32([0.3, 0.7]),
        cz=np.array([middle - 5, middle + 9], source),
        cs0=F32(0.9),
    )
    converted = convert(model)
    for t in (True, False):
        feeds = {"x": RNG.standard_normal((1, 2, 4, 4)).astype(F32), "t": np.array([t])}
        for before, after in zip(outputs(model, **feeds), outputs(converted, **feeds), strict=True):
            np.testing.assert_array_equal(before, after)
    codes = {node.output[0] for node in converted.graph.node if node.op_type == "QuantizeLinear"}
    types = {each.name: each.type.tensor_type.elem_type for each in converted.graph.value_info if each.name in codes}
    assert set(types.values()) <= {onnx.helper.np_dtype_to_tensor_dtype(np.dtype(target))}
    assert numbers(converted, "w").dtype == source, "the weight stays"
    assert numbers(converted, "z").dtype == source, "and so does its zero point"
    np.testing.assert_array_equal(numbers(converted, "cz"), numbers(model, "cz").astype(np.int64) + offset)


def test_uint16_called_symmetric_gets_zero_point_0():
    model = build(
        "net (float[32] x) => (float[32] y) { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }",
        s=F32(0.01),
        z=np.uint16(32767),
    )
    converted = convert_u16s8_to_s16s8(model)
    assert {each.name for each in converted.graph.initializer} == {"s", "int16_zp0"}
    assert numbers(converted, "int16_zp0") == np.int16(0)
    np.testing.assert_array_equal(outputs(model)[0], outputs(converted)[0])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("net (float[32] x) => (int8[32] q) { q = QuantizeLinear(x, s, z) }", "'x'"),
        (
            "net (float[32] x) => (float[32] y) { q = QuantizeLinear(x, s, z) r = Neg(q) y = DequantizeLinear(r, s) }",
            r"'x'.*\(Neg\)",
        ),
    ],
)
def test_codes_that_something_else_uses_are_named(text, name):
    with pytest.raises(ModelError, match=name):
        convert_s8s8_to_u8s8(build(text, s=F32(0.1), z=np.int8(0)))


U16U8 = """net (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y, float[1, 2, 1, 1] k)
{
    xq = QuantizeLinear(x, s, z)
    xd = DequantizeLinear(xq, s, z)
    wd = DequantizeLinear(w, s, wz)
    bd = DequantizeLinear(b, bs)
    c = Conv <pads = [1, 1, 1, 1]> (xd, wd, bd)
    kd = DequantizeLinear <axis = 1> (kc, ks, kz)
    fq = QuantizeLinear(f, fs, z)
    fd = DequantizeLinear(fq, fs, z)
    e = Add(c, fd)
    y = Add(e, kd)
    k = Identity(kd)
}"""


def test_narrow_codes_cover_the_same_range_and_biases_follow():
    s, bias = F32(0.0001), np.array([-40000, 123456], np.int32)
    arrays = {
        "s": s, "z": np.uint16(32768), "wz": np.uint8(128), "w": (W.astype(np.int32) + 128).astype(np.uint8),
        "b": bias, "bs": s * s, "kc": np.array([[[[1000]], [[65535]]]], np.uint16), "ks": F32([0.001, 0.002]),
        "kz": np.array([0, 65535], np.uint16), "f": F32([0.3]), "fs": F32(0.0002),
    }  # fmt: skip
    model = build(U16U8, **arrays)
    converted = convert_u16u8_to_u8u8(model)
    assert isinstance(converted, onnx.ModelProto)
    data, weight = (next(n for n in converted.graph.node if n.output[0] == name).input[1] for name in ("xd", "wd"))
    assert numbers(converted, weight) == s, "the weight shares its scale, which must not change"
    assert numbers(converted, data) == F32(np.float64(s) * 257)
    # 32768 / 257 = 127.5, 1000 / 257 = 3.9; 65535 is 255
    zero_point = next(n for n in converted.graph.node if n.output[0] == "xd").input[2]
    assert numbers(converted, zero_point) == np.uint8(128)
    np.testing.assert_array_equal(numbers(converted, "kc").ravel(), np.uint8([4, 255]))
    np.testing.assert_array_equal(numbers(converted, "kz"), np.uint8([0, 255]))
    new_scale = numbers(converted, next(n for n in converted.graph.node if n.output[0] == "bd").input[1])
    np.testing.assert_array_equal(numbers(converted, "b"), np.rint(bias * np.float64(s * s) / new_scale))
    np.testing.assert_allclose(new_scale, numbers(converted, data) * s, rtol=1e-7)
    assert not any(each.data_type == onnx.TensorProto.UINT16 for each in converted.graph.initializer)
    outputs(converted)


NPU = """net (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y, float[1, 2, 4, 4] z)
{
    xq = QuantizeLinear(x, s, zp)
    xd = DequantizeLinear(xq, s, zp)
    wd = DequantizeLinear <axis = 0> (w, ws, wz)
    w1 = DequantizeLinear(w, s, zp)
    bd = DequantizeLinear(b, bs, zp)
    fq = QuantizeLinear(f, bs, zp)
    fd = DequantizeLinear(fq, bs, zp)
    y0 = Conv <pads = [1, 1, 1, 1]> (xd, wd, bd)
    z = Conv <pads = [1, 1, 1, 1]> (xd, w1, bd)
    y1 = Conv <pads = [1, 1, 1, 1]> (xd, wd, fd)
    y = Add(y0, y1)
}"""


def npu_model():
    return build(
        NPU, s=F32(2**-5), zp=np.int8(0), w=W, ws=F32([2**-6, 2**-7]), wz=np.int8([0, 0]), b=np.int8([-128, 77]),
        bs=F32(2**-4), f=F32([0.61, -3.3]),
    )  # fmt: skip


def test_biases_for_a_cpu_are_int32_at_the_scale_of_their_sums():
    model = npu_model()
    converted = convert_a8w8_npu_to_a8w8_cpu(model)
    for before, after in zip(outputs(model), outputs(converted), strict=True):
        np.testing.assert_array_equal(before, after)  # powers of two: exact
    layers = [node for node in converted.graph.node if node.op_type == "Conv"]
    biases = [next(n for n in converted.graph.node if n.output[0] == layer.input[2]) for layer in layers]
    assert {numbers(converted, bias.input[0]).dtype for bias in biases} == {np.dtype(np.int32)}
    assert [numbers(converted, bias.input[1]).tolist() for bias in biases] == [
        [2**-11, 2**-12] if "wd" in layer.input else 2**-10 for layer in layers
    ]
    assert numbers(model, "b").dtype == np.int8, "the model that was passed does not change"


def test_biases_of_16_bits_are_exact_or_have_a_larger_power_of_two(caplog):
    text = """net (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y)
    {
        b1 = DequantizeLinear <axis = 0> (b, bs)
        b2 = DequantizeLinear(c, cs, cz)
        y0 = Conv <pads = [1, 1, 1, 1]> (x, w, b1)
        y = Conv <pads = [1, 1, 1, 1]> (y0, w, b2)
    }"""
    model = build(
        text, opset=17, w=W.astype(F32), b=np.int32([40001, -32768]), bs=F32([0.5, 0.25]), c=np.int32([1, 32767]),
        cs=F32(0.125), cz=np.int32(0),
    )  # fmt: skip
    with caplog.at_level("WARNING", logger="quark"):
        converted, has_int32_bias = convert_bias_int32_to_int16(model)
    assert has_int32_bias
    assert "need more than 16 bits were rounded to a larger scale: b\n" in caplog.text
    np.testing.assert_array_equal(numbers(converted, "b"), np.int16([20000, -32768]))  # 20000.5 to even
    np.testing.assert_array_equal(numbers(converted, "bs"), F32([1.0, 0.25]))
    np.testing.assert_array_equal(numbers(converted, "c"), np.int16([1, 32767]))
    assert numbers(converted, "cs") == F32(0.125)
    assert converted.opset_import[0].version == 21
    outputs(converted)
    assert convert_bias_int32_to_int16(converted) == (converted, False)


RESIZE = """net (float[1, 2, 4, 4] x) => (float[1, 2, 8, 8] y, float[1, 2, 4, 4] v)
{
    xq = QuantizeLinear(x, s, z)
    xd = DequantizeLinear(xq, s, z)
    v = DequantizeLinear(xq, s, z)
    r = Resize(xd, , k)
    rq = QuantizeLinear(r, rs, rz)
    rd = DequantizeLinear(rq, rs, rz)
    wd = DequantizeLinear(w, s, wz)
    bd = DequantizeLinear(b, bs)
    y = Conv <pads = [1, 1, 1, 1]> (rd, wd, bd)
}"""


def test_resize_gets_power_of_two_scales_that_lose_nothing_of_the_range():
    arrays = {
        "s": F32(0.03), "z": np.uint8(10), "k": F32([1, 1, 2, 2]), "rs": F32(0.02), "rz": np.int8(-4), "w": W,
        "wz": np.int8(0), "b": np.int32([1000, -2001]), "bs": F32(0.02) * F32(0.03),
    }  # fmt: skip
    model = build(RESIZE, **arrays)
    converted = resize_to_power_of_two(model)
    by_output = {node.output[0]: node for node in converted.graph.node}
    # 245 * 0.03 / 128 = 0.057 becomes 1/16, 131 * 0.02 / 128 = 0.0205 becomes 1/32
    assert numbers(converted, by_output["xq"].input[1]) == numbers(converted, by_output["v"].input[1]) == 2**-4
    assert numbers(converted, by_output["rd"].input[1]) == 2**-5
    assert numbers(converted, by_output["xd"].input[2]) == np.int8(0)
    assert numbers(converted, by_output["wd"].input[1]) == F32(0.03)
    assert numbers(converted, by_output["bd"].input[1]) == F32(2**-5) * F32(0.03)
    np.testing.assert_array_equal(numbers(converted, "b"), np.rint([1000 * 0.64, -2001 * 0.64]))
    outputs(converted)


@pytest.mark.parametrize("exponent", [-20, -1, 0, 7])
def test_positions_are_exact_next_to_powers_of_two(exponent):
    power = 2.0**exponent
    assert scale2pos(power) == -exponent
    assert scale2pos(np.nextafter(power, 0)) == -exponent
    assert scale2pos(np.nextafter(power, np.inf)) == -exponent - 1
    assert (scale2pos(0.0), scale2pos(1e300)) == (127, -127)


def test_one_quantizer_in_place():
    node = onnx.helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])
    tensors = {"s": numpy_helper.from_array(F32(0.02), "s"), "z": numpy_helper.from_array(np.int8(-4), "z")}
    fs_to_pof2s(node, tensors)
    assert numpy_helper.to_array(tensors["s"]) == 2**-5
    assert numpy_helper.to_array(tensors["z"]) == np.int8(0)


TOOLS = {
    "convert_a8w8_npu_to_a8w8_cpu": ("input", "output"),
    "convert_bias_int32_to_int16": ("input_model_path", "output_model_path"),
    "convert_qdq_to_qop": ("input_model", "output_model"),
    "convert_quant_to_float": ("input", "output"),
    "convert_resize_fs_to_pof2s": ("input_model", "output_model"),
    "convert_s8s8_to_u8s8": ("input", "output"),
    "convert_u16s8_to_s16s8": ("input", "output"),
    "convert_u16u8_to_u8u8": ("input", "output"),
    "remove_qdq": ("input_model", "output_model"),
    "remove_qdq_between_ops": ("input_model", "output_model"),
    "remove_qdq_mul_add": ("input_model", "output_model"),
}


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_converts_a_file_and_refuses_others_in_one_line(name, tmp_path, capsys):
    tool = import_module(f"quark.onnx.tools.{name}").TOOL
    flags = [f"--{each}" for each in TOOLS[name]]
    others = ["--between_ops", "Conv,Relu"] if name == "remove_qdq_between_ops" else []
    source, plain, text, target = (tmp_path / value for value in ("q.onnx", "f.onnx", "t.onnx", "out.onnx"))
    onnx.save(npu_model(), source)
    onnx.save(build("net (float[32] x) => (float[32] y) { y = Relu(x) }"), plain)
    text.write_text("not a model")

    def run(read: Path, written: Path) -> None:
        tool.run([flags[0], str(read), flags[1], str(written), *others])

    for read, written, words in (
        (plain, target, "quantize"), (text, target, "not an ONNX model"), (tmp_path / "none.onnx", target, "none.onnx"),
        (source, source, "is the input model"), (source, tmp_path / "no" / "out.onnx", "no"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ending:
            run(read, written)
        assert words in str(ending.value)
        assert str(ending.value).count("\n") == 0
        assert not target.exists()
    run(source, target)
    assert str(source) in capsys.readouterr().out
    if name != "convert_bias_int32_to_int16":  # it has none
        onnx.checker.check_model(onnx.load(target), full_check=True)


def test_narrowing_takes_and_writes_files(tmp_path):
    onnx.save(npu_model(), tmp_path / "q.onnx")
    assert convert_u16u8_to_u8u8(tmp_path / "q.onnx", tmp_path / "out.onnx") is None
    converted = convert_u16u8_to_u8u8(str(tmp_path / "q.onnx"))
    assert converted == onnx.load(tmp_path / "out.onnx") == narrow_to_uint8(npu_model())
