"""Options that change what is written: scales, layouts, pairs of nodes, bfloat16 for its compiler, MatMulNBits."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx_models import Net, run_model, transformer_block

from quark.onnx import Int8Spec, Int16Spec, QConfig, QLayerConfig, get_default_config, quantize
from quark.onnx.plan_reader import read_plan
from quark.onnx.quantization.config import QuantizationConfig
from quark.onnx.quantization.config.quant_types import CalibrationMethod, Int16Method

RANDOM = np.random.default_rng(7)
SHAPE = (1, 3, 8, 8)


def network(dtype=np.float32):
    net = Net(dtype=dtype)
    y = net.node("Relu", net.conv(net.input("x", SHAPE), (3, 4), 3, pads=[1] * 4), name="relu")
    y = net.node("Sigmoid", net.conv(y, (4, 4), 3, pads=[1] * 4), name="sigmoid")
    return net.model(net.node("Conv", y, net.weight(2, 4, 1, 1, name="last_w"), name="last", output="y"))


def data(dtype=np.float32):
    return [{"x": RANDOM.standard_normal(SHAPE).astype(dtype)} for _ in range(4)]


def with_options(preset="A8W8", **options):
    config = get_default_config(preset)
    config.extra_options.update({"Protect": "none", **options})
    return config


def tensors(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize(
    "config",
    [
        QuantizationConfig(calibrate_method=Int16Method.MinMax),
        QuantizationConfig(calibrate_method=CalibrationMethod.MinMax, extra_options={"Int16Scale": True}),
        QuantizationConfig(per_channel=True, extra_options={"Int16Scale": True}),
    ],
    ids=["method", "option", "per channel"],
)
def test_every_scale_is_16_bits_over_a_power_of_two(config):
    model = quantize(network(), data(), config).model
    scales = {name: tensor for name, tensor in tensors(model).items() if name.endswith("_scale")}
    biases = {node.input[1] for node in model.graph.node if node.op_type == "DequantizeLinear" and len(node.input) == 2}
    assert len(scales) > len(biases)  # a bias has the product of two
    for name in scales.keys() - biases:
        wide = scales[name].astype(np.float64).ravel() * 2.0**16
        assert (wide == np.round(wide)).all()


def test_a_float16_model_with_float32_scales_keeps_float16_ports():
    config = QuantizationConfig(extra_options={"UseFP32Scale": True, "QuantizeFP16": True})
    model = quantize(network(np.float16), data(np.float16), config).model
    ports = [each.type.tensor_type.elem_type for each in (*model.graph.input, *model.graph.output)]
    assert ports == [TensorProto.FLOAT16] * 2
    assert ops(model).count("Cast") == 2
    scales = [tensor for name, tensor in tensors(model).items() if name.endswith("_scale")]
    assert scales
    assert all(scale.dtype == np.float32 for scale in scales)


def test_channels_last_changes_nothing_but_the_layout():
    samples = data()
    config = with_options("XINT8")
    plain = quantize(network(), samples, config).model
    config.convert_nchw_to_nhwc = True
    model = quantize(network(), samples, config).model
    assert [[d.dim_value for d in each.type.tensor_type.shape.dim] for each in model.graph.input] == [[1, 8, 8, 3]]
    (expected,) = run_model(plain, samples[0]).values()
    (actual,) = run_model(model, {"x": samples[0]["x"].transpose(0, 2, 3, 1)}).values()
    np.testing.assert_array_equal(actual.transpose(0, 3, 1, 2), expected)


def test_bfloat16_for_its_compiler_has_casts_at_inputs_only():
    model = quantize(network(), data(), with_options("BF16", EnableVaimlBF16=True)).model
    assert ops(model) == ["Cast", "Cast", "Conv", "Relu", "Conv", "Sigmoid", "Conv"]
    weights = [tensors(model)[node.input[1]] for node in model.graph.node if node.op_type == "Conv"]
    for weight in weights:
        assert weight.dtype == np.float32
        assert not (weight.view(np.uint32) & 0xFFFF).any()


def test_two_pairs_between_two_types_are_read_back():
    wide = QLayerConfig(input_tensors=Int16Spec(), weight=Int8Spec())
    config = QConfig(
        QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()),
        specific_layer_config={wide: ["sigmoid"]},
        extra_options={"EnableDualQuantNodePairs": True},
    )
    result = quantize(network(), data(), config)
    doubled = {
        tensor.tensor: (tensor.first, tensor.choice) for tensor in read_plan(result.model) if tensor.first is not None
    }
    assert [tuple(each.format for each in pair) for pair in doubled.values()] == [("int8", "int16"), ("int16", "int8")]
    planned = {
        tensor.tensor: (tensor.first, tensor.choice) for tensor in result.report.plan if tensor.first is not None
    }
    assert {name: pair[0].format for name, pair in planned.items()} == {
        name: pair[0].format for name, pair in doubled.items()
    }


@pytest.mark.parametrize(("is_adjusted", "saturated"), [(True, 0), (False, 4)])
def test_a_bias_beyond_32_bits(is_adjusted, saturated):
    net = Net()
    weight = net.constant((RANDOM.random((4, 1, 3, 3)) * 0.01).astype(np.float32), "w")
    bias = net.constant(np.full(4, 1e5, np.float32), "b")
    model = net.model(net.node("Conv", net.input("x", (1, 1, 8, 8)), weight, bias, name="c"))
    config = QConfig(
        QLayerConfig(activation=Int16Spec(), weight=Int8Spec()),
        extra_options={"Int32Bias": True, "AdjustWeightScaleForInt32Bias": is_adjusted},
    )
    result = quantize(model, [{"x": RANDOM.random((1, 1, 8, 8)).astype(np.float32)}], config).model
    (codes,) = (tensor for tensor in tensors(result).values() if tensor.dtype == np.int32)
    assert int((codes == np.iinfo(np.int32).max).sum()) == saturated


def test_types_to_add_that_the_model_lacks_are_remarked_on():
    result = quantize(network(), data(), with_options(ExtraOpTypesToQuantize=["Relu", "Convv"]))
    assert "extra_op_types_to_quantize: the model has no Convv" in result.report.remarks


def test_presets_for_transformers_quantize_products_with_weights():
    proto = transformer_block()
    shape = [each.dim_value for each in proto.graph.input[0].type.tensor_type.shape.dim]
    name = proto.graph.input[0].name
    samples = [{name: RANDOM.standard_normal(shape).astype(np.float32)} for _ in range(3)]
    result = quantize(proto, samples, get_default_config("INT16_TRANSFORMER_DEFAULT"))
    kinds = result.report.op_types
    written = {node.output[0]: node for node in proto.graph.node}
    for tensor in result.report.plan:
        nodes = {reader.node for reader in tensor.readers if reader.node} | (
            {written[tensor.tensor].name} if tensor.tensor in written else set()
        )
        assert {kinds[node] for node in nodes} & {"MatMul", "Gemm"}, tensor.tensor
    assert ops(result.model).count("Softmax") == 1


# ---------------------------------------------------------------- MatMulNBits
def product(rows=256):
    net = Net(21)
    return net.model(net.node("MatMul", net.input("x", (1, rows)), net.weight(rows, 24, name="w"), name="p"))


def packed(model: onnx.ModelProto) -> list[np.ndarray]:
    (node,) = (each for each in model.graph.node if each.op_type == "MatMulNBits")
    return [tensors(model)[name] for name in node.input[1:]]


def test_hqq_has_other_scales():
    params = {"GroupSize": 128, "Symmetric": True, "Bits": 4}
    plain, refined = (
        packed(quantize(product(), None, with_options("MATMUL_NBITS", MatMulNBitsParams={**params, **more})).model)
        for more in ({}, {"Algorithm": "HQQ"})
    )
    assert (plain[1] != refined[1]).mean() > 0.5
