"""8-bit floats with a scale: the numbers of ml_dtypes, files that ONNX Runtime opens as they are, and true sizes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx_models import Net

from quark.errors import InvalidValueError, ModelError
from quark.onnx import (
    FP8E4M3Spec,
    FP8E5M2Spec,
    Int8Spec,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    QuantizationConfig,
    get_default_config,
    quantize,
    read_plan,
)
from quark.onnx.quantization.config.quant_types import ExtendedQuantType, QuantType
from quark.plan import FloatChoice, Role
from quark.rounded import rounded

TYPES = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
PRESETS = {"FP8E4M3": "fp8_e4m3", "FP8E5M2": "fp8_e5m2"}
RANDOM = np.random.default_rng(3)


def reference(x, dtype, scale):
    """ONNX's QuantizeLinear with saturation and DequantizeLinear, by the conversion of ml_dtypes."""
    top = np.float32(ml_dtypes.finfo(dtype).max)
    return np.clip(x / scale, -top, top).astype(dtype).astype(np.float32) * scale


def edges(dtype):
    """Every number of the type, every midpoint, the numbers next to those, and what is beyond."""
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    numbers = np.unique(codes[np.isfinite(codes)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(middles, np.float32(side)).astype(np.float32) for side in (-np.inf, np.inf)]
    beyond = np.array([1e9, -1e9, np.inf, -np.inf, np.nan, -0.0, 1e-30], np.float32)
    return np.concatenate([numbers, middles, *near, beyond])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_rounding_is_that_of_ml_dtypes_at_every_edge(name, scale):
    x, step = edges(TYPES[name]), np.float32(scale)
    found = rounded(x * step, FloatChoice(name, True, (scale,)))
    np.testing.assert_array_equal(found, reference(x * step, TYPES[name], step))
    assert np.isnan(rounded(np.array([np.nan], np.float32), FloatChoice(name, True))[0])


def networks():
    """Products around which ONNX Runtime looks for integer kernels: with and without bias, activation and quantizer."""
    net = Net(opset=13)
    x = net.input("x", (2, 16, 8, 8))
    y = net.node("Conv", x, net.weight(16, 16, 3, 3), net.weight(16), name="linear", pads=[1, 1, 1, 1])
    y = net.node("Conv", y, net.weight(16, 1, 3, 3), name="depthwise", pads=[1, 1, 1, 1], group=16)
    y = net.node("Conv", net.node("Relu", y), net.weight(8, 16, 1, 1), net.weight(8), name="after_relu")
    y = net.node("MaxPool", y, kernel_shape=[2, 2], strides=[2, 2])
    y = net.node("Conv", y, net.weight(8, 8, 1, 1), name="after_pool")
    y = net.node("Gemm", net.node("Flatten", y), net.weight(128, 12), net.weight(12), name="gemm")
    z = net.node("MatMul", y, net.weight(12, 12), name="matmul")
    z = net.node("MatMul", z, net.node("Transpose", y, perm=[1, 0]), name="two_activations")
    return net.model(z)


def data(count=8):
    return RANDOM.standard_normal((count, 2, 16, 8, 8)).astype(np.float32)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_file_runs_on_onnx_runtime_alone_and_computes_what_the_plan_says(preset):
    samples = data()
    result = quantize(networks(), [{"x": sample} for sample in samples], preset)
    assert {(opset.domain, opset.version) for opset in result.model.opset_import} == {("", 21)}
    outputs = []
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        session = onnxruntime.InferenceSession(result.model.SerializeToString(), options)
        outputs.append(session.run(None, {"x": samples[0]})[0])
    np.testing.assert_allclose(outputs[0], outputs[1], atol=2e-2 * np.abs(outputs[0]).max())
    plan = read_plan(result.model)
    assert {tensor.choice.format for tensor in plan} == {PRESETS[preset]}
    assert all(tensor.choice.axis is not None for tensor in plan if tensor.role is Role.WEIGHT)
    assert all(tensor.role is not Role.BIAS for tensor in plan)


def agrees_without_optimizations(result, sample):
    """True if ONNX Runtime computes the file, and the same with and without its optimizations."""
    outputs = []
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        outputs.append(onnxruntime.InferenceSession(result.model.SerializeToString(), options).run(None, sample)[0])
    return np.abs(outputs[0] - outputs[1]).max() <= 1e-3 * np.abs(outputs[0]).max()


@pytest.mark.parametrize("weight", ["QBFloat16", "QFloat16"])
def test_weights_of_16_bits_stay_so_behind_8_bit_activations(weight):
    """ONNX Runtime would quantize such a weight to int8, and then find no kernel for the activation."""
    net = Net()
    x = net.input("x", (1, 1, 8, 8))
    y = net.node("Conv", x, net.weight(8, 1, 3, 3), name="one_channel", pads=[1, 1, 1, 1])
    y = net.node("Conv", y, net.weight(8, 8, 3, 3), net.weight(8), name="linear", pads=[1, 1, 1, 1])
    y = net.node("Conv", net.node("Relu", y), net.weight(4, 8, 1, 1), name="after_relu")
    model = net.model(net.node("Gemm", net.node("Flatten", y), net.weight(256, 12), net.weight(12), name="gemm"))
    config = get_default_config("FP8E4M3")
    config.weight_type = ExtendedQuantType[weight]
    config.per_channel = False
    config.extra_options = {}
    samples = [{"x": RANDOM.standard_normal((1, 1, 8, 8)).astype(np.float32)} for _ in range(4)]
    result = quantize(model, samples, config)
    assert agrees_without_optimizations(result, samples[0])
    formats = {tensor.choice.format for tensor in read_plan(result.model) if tensor.role is Role.WEIGHT}
    assert formats == {weight.removeprefix("Q").lower()}


@pytest.mark.parametrize(
    "op_type",
    ["Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "Sigmoid", "LeakyRelu", "Softmax", "MaxPool"],
)
def test_operators_between_8_bit_floats_run(op_type):
    net = Net()
    x = net.input("x", (1, 4, 8, 8))
    y = net.node("Relu", net.node("Conv", x, net.weight(4, 4, 3, 3), name="first", pads=[1, 1, 1, 1]))
    attributes = {"AveragePool": {"kernel_shape": [2, 2]}, "MaxPool": {"kernel_shape": [2, 2]}, "Concat": {"axis": 1}}
    operands = (
        [y, net.node("Conv", y, net.weight(4, 4, 1, 1), name="other")] if op_type in ("Add", "Mul", "Concat") else [y]
    )
    y = net.node(op_type, *operands, name="subject", **attributes.get(op_type, {}))
    channels = 8 if op_type == "Concat" else 4
    model = net.model(net.node("Conv", y, net.weight(4, channels, 1, 1), name="last"))
    config = get_default_config("FP8E4M3")
    config.extra_options = {"QuantizeAllOpTypes": True}
    samples = [{"x": RANDOM.standard_normal((1, 4, 8, 8)).astype(np.float32)} for _ in range(4)]
    result = quantize(model, samples, config)
    assert agrees_without_optimizations(result, samples[0])
    planned, read = (
        {(tensor.tensor, reader) for tensor in plan for reader in tensor.readers if reader.node == "subject"}
        for plan in (result.plan, read_plan(result.model))
    )
    assert len(planned) == len(operands)
    assert read == planned


def test_only_operands_of_products_are_quantized():
    result = quantize(networks(), [{"x": value} for value in data()], "FP8E4M3")
    products = {"depthwise", "after_relu", "after_pool", "gemm", "matmul", "two_activations"}
    assert {reader.node for tensor in result.plan for reader in tensor.readers} == products


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_are_stored_in_eight_bits(preset):
    net = Net()
    y = net.node("MatMul", net.input("x", (1, 256)), net.weight(256, 512))
    result = quantize(net.model(y), RANDOM.standard_normal((4, 1, 256)).astype(np.float32), preset)
    assert 256 * 512 < result.model.ByteSize() < 1.1 * 256 * 512
    (codes,) = [each for each in result.model.graph.initializer if list(each.dims) == [256, 512]]
    assert codes.data_type in (onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT8E5M2)


@pytest.mark.parametrize("preset", PRESETS)
def test_searched_weight_scales_are_the_best_of_their_octave(preset):
    model, samples = networks(), [{"x": value} for value in data(4)]
    errors = {}
    for rule in ("floor", "mse"):
        config = get_default_config(preset)
        config.extra_options.update(WeightScaleRule=rule, BiasCorrection=False, Compensation=False)
        plan = quantize(model, samples, config).plan
        errors[rule] = {tensor.tensor: channel_errors(model, tensor) for tensor in plan if tensor.role is Role.WEIGHT}
    assert errors["mse"].keys() == errors["floor"].keys()
    for tensor, (name, steps) in errors["mse"].items():
        assert (name <= errors["floor"][tensor][0]).all()
        assert (name <= steps.min(axis=0) * (1 + 1e-4)).all(), tensor  # scales are rounded to float32
    assert sum(found.sum() for found, _ in errors["mse"].values()) < 0.9 * sum(
        found.sum() for found, _ in errors["floor"].values()
    )


def channel_errors(model, planned):
    """The squared rounding error of each channel of a weight, with its scale and with 16 scales of an octave."""
    (tensor,) = [each for each in model.graph.initializer if each.name == planned.tensor]
    weight = np.moveaxis(onnx.numpy_helper.to_array(tensor), planned.choice.axis, 0)
    weight, dtype = weight.reshape(len(weight), -1), TYPES[planned.choice.format]
    least = np.abs(weight).max(axis=1).astype(np.float64) / float(ml_dtypes.finfo(dtype).max)
    scales = [np.array(planned.choice.scale), *(least * 2 ** (step / 16) for step in range(16))]
    errors = [
        np.square(reference(weight, dtype, scale.astype(np.float32)[:, None]) - weight).sum(axis=1, dtype=np.float64)
        for scale in scales
    ]
    return errors[0], np.array(errors[1:])


def test_scale_rules_of_powers_of_two_are_refused():
    config = get_default_config("FP8E4M3")
    config.extra_options["WeightScaleRule"] = "ceil"
    with pytest.raises(InvalidValueError, match="'WeightScaleRule' 'ceil' with weights of fp8_e4m3"):
        quantize(networks(), [{"x": value} for value in data(2)], config)


def test_a_bias_that_the_runtime_rounds_to_32_bits_fits():
    """ONNX Runtime rounds the float bias itself, to steps of the product of both scales."""
    net = Net()
    weight = RANDOM.standard_normal((4, 3, 1, 1)).astype(np.float32)
    weight[1], weight[2] = 0.0, 1e-9
    x = net.input("x", (1, 3, 4, 4))
    y = net.node("Conv", x, net.constant(weight, "w"), net.constant(np.full(4, 5.0, np.float32)), name="conv")
    y = net.node("Conv", net.node("Relu", y), net.weight(2, 4, 1, 1), name="next")
    samples = RANDOM.standard_normal((4, 1, 3, 4, 4)).astype(np.float32)
    model = net.model(y)
    for preset in PRESETS:
        result = quantize(model, [{"x": sample} for sample in samples], get_default_config(preset))
        session = onnxruntime.InferenceSession(result.model.SerializeToString())
        exact = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": samples[0]})[0]
        found = session.run(None, {"x": samples[0]})[0]
        assert np.abs(found - exact).max() < 0.3 * np.abs(exact).max()


def test_specs_and_quant_types_name_it():
    both = QuantizationConfig(activation_type=QuantType.QFLOAT8E4M3FN, weight_type=ExtendedQuantType.QFloat8E5M2)
    model, samples = networks(), [{"x": value} for value in data(4)]
    formats = {(tensor.role, str(tensor.choice)) for tensor in quantize(model, samples, both).plan}
    assert formats == {(Role.ACTIVATION, "fp8_e4m3"), (Role.WEIGHT, "fp8_e5m2")}
    channels = FP8E4M3Spec(quant_granularity=QuantGranularity.Channel)
    config = QConfig(QLayerConfig(activation=FP8E5M2Spec(), weight=channels))
    formats = {(tensor.role, str(tensor.choice)) for tensor in quantize(model, samples, config).plan}
    assert formats == {(Role.ACTIVATION, "fp8_e5m2"), (Role.WEIGHT, "fp8_e4m3 per channel")}
    mixed = QConfig(QLayerConfig(activation=Int8Spec(), weight=Int8Spec()))
    mixed.specific_layer_config = {QLayerConfig(activation=FP8E4M3Spec(), weight=channels): ["gemm"]}
    kinds = {str(tensor.choice) for tensor in quantize(model, samples, mixed).plan if tensor.role is Role.WEIGHT}
    assert kinds == {"int8", "fp8_e4m3 per channel"}


def test_an_older_opset_is_refused_by_name():
    config = get_default_config("FP8E4M3")
    config.extra_options["ConvertOpsetVersion"] = 19
    with pytest.raises(ModelError, match="fp8_e4m3 needs opset 21"):
        quantize(networks(), [{"x": value} for value in data(2)], config)
