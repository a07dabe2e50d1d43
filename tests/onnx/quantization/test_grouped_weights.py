"""Weights of 4 bits in groups: Conv, ConvTranspose, Gemm and MatMul, with integer activations and alone."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx_models import Net

from quark.onnx import (
    Int4Spec,
    Int8Spec,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    UInt4Spec,
    get_default_config,
    quantize,
)
from quark.onnx.quantization.config.quant_types import QuantType
from quark.plan import Role
from quark.rounded import rounded

RANDOM = np.random.default_rng(5)


def network():
    net = Net()
    x = net.input("x", (1, 3, 8, 8))
    y = net.node("Relu", net.node("Conv", x, net.weight(32, 3, 3, 3), net.weight(32), name="stem"))
    y = net.node("Relu", net.node("Conv", y, net.weight(32, 1, 3, 3), net.weight(32), name="depthwise", group=32))
    y = net.node("Relu", net.node("Conv", y, net.weight(64, 32, 1, 1), net.weight(64), name="pointwise"))
    y = net.node("Relu", net.node("Conv", y, net.weight(64, 16, 3, 3), name="grouped", group=4))
    y = net.node("ConvTranspose", y, net.weight(64, 16, 2, 2), name="transposed")
    y = net.node("Gemm", net.node("Flatten", y), net.weight(40, 144), net.weight(40), name="gemm", transB=1)
    return net.model(net.node("MatMul", y, net.weight(40, 10), name="matmul"))


def samples(count=4):
    return [{"x": RANDOM.standard_normal((1, 3, 8, 8)).astype(np.float32)} for _ in range(count)]


def weights(result):
    return {each.readers[0].node: each.choice for each in result.plan if each.role is Role.WEIGHT}


def changed(preset, **options):
    config = get_default_config(preset)
    config.extra_options.update(options)
    return config


@pytest.mark.parametrize("preset", ["A8W4", "A16W4"])
def test_groups_go_along_the_summed_axis(preset):
    data = samples()
    result = quantize(network(), data, preset)
    found = weights(result)
    axes = {"pointwise": 1, "grouped": 1, "transposed": 0, "gemm": 1, "matmul": 0}
    assert {name: found[name].axis for name in axes} == axes
    assert all((found[name].format, found[name].group_size) == ("int4", 32) for name in axes)
    session = onnxruntime.InferenceSession(result.model.SerializeToString())
    assert np.isfinite(session.run(None, data[0])[0]).all()


def test_axes_too_short_for_a_group_have_eight_bits_per_channel():
    found = weights(quantize(network(), samples(), "A8W4"))
    assert {name: str(found[name]) for name in ("stem", "depthwise")} == dict.fromkeys(
        ("stem", "depthwise"), "int8 per channel"
    )


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("quant_type", [QuantType.QInt4, QuantType.QUInt4])
def test_every_size_of_both_types_runs_as_the_plan_says(size, quant_type):
    net = Net()
    weight = RANDOM.standard_normal((6, 80, 1, 1)).astype(np.float32)
    net.constant(weight, "w")
    model = net.model(net.node("Conv", net.input("x", (1, 80, 4, 4)), "w", name="conv"))
    config = changed("A16W4", WeightGroupSize=size, BiasCorrection=False)
    config.weight_type = quant_type
    data = [{"x": RANDOM.standard_normal((1, 80, 4, 4)).astype(np.float32)} for _ in range(3)]
    result = quantize(model, data, config)
    choice = weights(result)["conv"]
    assert (choice.format, choice.group_size) == ("int4" if quant_type is QuantType.QInt4 else "uint4", size)
    assert len(choice.scale) == 6 * -(-80 // size)
    found = onnxruntime.InferenceSession(result.model.SerializeToString()).run(None, {"x": data[0]["x"] / 2})[0]
    expected = np.einsum("oi,bihw->bohw", rounded(weight, choice)[:, :, 0, 0], data[0]["x"] / 2)
    np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max())


def test_a_file_has_its_true_size_without_packing():
    net = Net()
    model = net.model(net.node("Conv", net.input("x", (1, 256, 2, 2)), net.weight(512, 256, 1, 1), name="conv"))
    data = [{"x": RANDOM.standard_normal((1, 256, 2, 2)).astype(np.float32)} for _ in range(2)]
    result = quantize(model, data, "A8W4")
    codes, scales = 512 * 256 / 2, 512 * 8 * 4.5
    assert result.model.ByteSize() < codes + scales + 8000


@pytest.mark.parametrize("spec", [Int4Spec, UInt4Spec])
def test_a_spec_says_the_size(spec):
    weight = spec(quant_granularity=QuantGranularity.Group, group_size=64)
    config = QConfig(QLayerConfig(activation=Int8Spec(), weight=weight))
    assert weights(quantize(network(), samples(), config))["gemm"].group_size == 64
    assert QConfig.from_dict(config.to_dict()).global_config.weight.group_size == 64


def test_weights_alone_in_standard_operators_include_convolutions():
    config = get_default_config("INT4_WEIGHT_ONLY")
    config.extra_options["MatMulNBitsParams"] = {
        **config.extra_options["MatMulNBitsParams"],
        "Form": "dequantize_linear",
    }
    result = quantize(network(), samples(), config)
    found = weights(result)
    assert found["pointwise"].group_size == found["transposed"].group_size == 32
    assert str(found["depthwise"]) == "int8 per channel"
    assert {each.domain for each in result.model.opset_import} == {""}


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_matmul_nbits_of_every_width_computes_what_the_plan_says(bits):
    net = Net()
    weight = RANDOM.standard_normal((64, 24)).astype(np.float32)
    net.constant(weight, "w")
    model = net.model(net.node("MatMul", net.input("x", (2, 64)), "w", name="product"))
    config = get_default_config("MATMUL_NBITS")
    config.extra_options["MatMulNBitsParams"] = {"Bits": bits, "GroupSize": 32, "AccuracyLevel": 1}
    x = RANDOM.standard_normal((2, 64)).astype(np.float32)
    result = quantize(model, [{"x": x}], config)
    found = onnxruntime.InferenceSession(result.model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(found, x @ rounded(weight, weights(result)["product"]), rtol=1e-4, atol=1e-4)
