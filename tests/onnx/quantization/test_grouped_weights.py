"""Weights of 4 bits in groups: Conv, ConvTranspose, Gemm and MatMul, with integer activations and alone."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper
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
    return {tensor.readers[0].node: tensor.choice for tensor in result.plan if tensor.role is Role.WEIGHT}


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


INNER, GROUPED_INNER = 320, 160  # no multiples of 64, 128 and 256: the last group is shorter
INNER_AXES = {"matmul_w": 0, "gemm_w": 1, "plain_gemm_w": 0, "conv_w": 1, "grouped_w": 1}
INPUTS = {"rows": (2, INNER), "image": (1, INNER, 4, 4)}


def heads():
    """A layer of every kind, each with an output of its own."""
    net = Net()
    rows, image = (net.input(name, shape) for name, shape in INPUTS.items())
    made = [
        net.node("MatMul", rows, net.weight(INNER, 24, name="matmul_w")),
        net.node("Gemm", rows, net.weight(24, INNER, name="gemm_w"), net.weight(24), transB=1),
        net.node("Gemm", rows, net.weight(INNER, 24, name="plain_gemm_w")),
        net.node("Conv", image, net.weight(12, INNER, 3, 3, name="conv_w"), net.weight(12)),
        net.node("Conv", image, net.weight(12, GROUPED_INNER, 1, 1, name="grouped_w"), group=2),
    ]
    return net.model(*made)


def eighths(highest=255):
    """Inputs that 8 bits with the range from 0 to 1 hold exactly; both ends are there if `highest` is 255."""
    made = {name: RANDOM.integers(0, highest + 1, shape).astype(np.float32) for name, shape in INPUTS.items()}
    for each in made.values():
        each.flat[:2] = 0, highest
    return {name: each / np.float32(255) for name, each in made.items()}


def with_rounded_weights(model, plan):
    """The float network with the weights that the plan says, and those weights' choices."""
    choices = {tensor.tensor: tensor.choice for tensor in plan if tensor.role is Role.WEIGHT}
    expected = onnx.ModelProto()
    expected.CopyFrom(model)
    for tensor in expected.graph.initializer:
        if tensor.name in choices:
            numbers = rounded(numpy_helper.to_array(tensor), choices[tensor.name])
            tensor.CopyFrom(numpy_helper.from_array(numbers, tensor.name))
    return expected, choices


def run_stock(model, feed):
    """What ONNX Runtime computes with no library registered."""
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, feed)


# The share of an output's largest magnitude that rounding of activations may change. With weights alone, ONNX Runtime
# makes a MatMul behind grouped weights a MatMulNBits, and rounds its input to 8 bits by itself.
TOLERANCE = {"A8W4": 0.01, "A16W4": 2e-4, "INT4_WEIGHT_ONLY": 0.01}


@pytest.mark.parametrize("preset", TOLERANCE)
@pytest.mark.parametrize("size", [16, 32, 64, 128, 256, None], ids=str)
@pytest.mark.parametrize("quant_type", [QuantType.QInt4, QuantType.QUInt4], ids=lambda each: each.name)
def test_every_layer_size_and_type_runs_on_stock_onnxruntime_as_the_plan_says(preset, size, quant_type, tmp_path):
    model, is_signed = heads(), quant_type is QuantType.QInt4
    config = get_default_config(preset)
    if preset == "INT4_WEIGHT_ONLY":
        given = {"Form": "dequantize_linear", "GroupSize": size or -1, "Symmetric": is_signed}
        config.extra_options["MatMulNBitsParams"] |= given
    else:
        config.weight_type = quant_type
        config.extra_options["BiasCorrection"] = False  # biases stay those of the network compared with
        config.extra_options["WeightGroupSize"] = size
        if size is None:
            del config.extra_options["WeightGroupSize"]
            config.per_channel = True
    result = quantize(model, [eighths() for _ in range(3)], config)
    expected, choices = with_rounded_weights(model, result.plan)
    assert {name: choice.format for name, choice in choices.items()} == dict.fromkeys(
        INNER_AXES, "int4" if is_signed else "uint4"
    )

    feed = eighths(highest=120)  # nothing leaves the calibrated ranges
    for found, wanted in zip(run_stock(result.model, feed), run_stock(expected, feed), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE[preset] * np.abs(wanted).max())

    held = {each.name: each for each in result.model.graph.initializer}
    most = 0
    for each in model.graph.initializer:
        codes = held.get(f"{each.name}_quantized")
        if each.name not in INNER_AXES:
            most += 8 * int(np.prod(each.dims))  # a bias of 32 bits, and its scale
            continue
        assert codes.data_type == (TensorProto.INT4 if is_signed else TensorProto.UINT4)
        shape = list(each.dims)
        values = int(np.prod(shape))
        assert len(codes.raw_data) == values // 2
        inner = INNER_AXES[each.name]
        groups = values // shape[inner] * -(-shape[inner] // size) if size else 24
        assert len(choices[each.name].scale) == groups if size else len(choices[each.name].scale) in (12, 24)
        most += values // 2 + groups * 9 // 2 + 1  # a scale of 32 bits and a zero point of 4
    graph = 10_000  # names, nodes and the card; codes in 8 bits would take 29 000 more
    assert result.save(tmp_path / "made.onnx").stat().st_size < most + graph


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
    assert {opset.domain for opset in result.model.opset_import} == {""}


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
