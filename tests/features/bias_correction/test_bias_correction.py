"""Corrected biases: the mean of every layer is that of the float layer, and networks come closer to float."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from onnx_models import Net

from quark.compare import FidelityMeter
from quark.features.bias_correction.on_onnx import give_biases
from quark.onnx import QuantizationConfig, get_default_config, quantize
from quark.onnx.session import open_session

Array = np.ndarray[Any, Any]
RANDOM = np.random.default_rng(3)


def config_of(preset: str, **options: Any) -> QuantizationConfig:
    config = get_default_config(preset)
    config.include_cle = False
    config.extra_options.update(BiasCorrection=True, Compensation=False)  # which would change weights as well
    config.extra_options.update(options)
    return config


def without(preset: str) -> QuantizationConfig:
    config = get_default_config(preset)
    config.include_cle = False
    config.extra_options.update(BiasCorrection=False, Compensation=False)
    return config


def images(count: int, *shape: int) -> Array:
    """Never negative, so that rounding down and saturation have a mean."""
    return np.abs(RANDOM.standard_normal((count, *shape))).astype(np.float32) ** 2


def layer(op_type: str) -> tuple[onnx.ModelProto, Array]:
    net = Net(opset=17)
    if op_type == "Gemm":
        data = images(8, 1, 12)
        y = net.node("Gemm", net.input("x", (1, 12)), net.weight(12, 6), net.weight(6))
    elif op_type == "MatMul":
        data = images(8, 1, 5, 12)
        y = net.node("Add", net.node("MatMul", net.input("x", (1, 5, 12)), net.weight(12, 6)), net.weight(6))
    else:
        data = images(8, 1, 4, 6, 6)
        y = net.conv(net.input("x", (1, 4, 6, 6)), (4, 6), pads=[1, 1, 1, 1], op_type=op_type)
    return net.model(y), data


def outputs(model: onnx.ModelProto, data: Any) -> list[Array]:
    session = open_session(model, threads=1)
    return [session.run(None, {"x": x})[0] for x in data]


def mean_errors(model: onnx.ModelProto, quantized: onnx.ModelProto, data: Array) -> Array:
    """The mean error of each sample and channel."""
    errors = []
    for exact, seen in zip(outputs(model, data), outputs(quantized, data), strict=True):
        channels = np.moveaxis(seen - exact, 1 if seen.ndim == 4 else -1, -1)
        errors.append(channels.reshape(-1, channels.shape[-1]).mean(axis=0))
    return np.array(errors)


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose", "Gemm", "MatMul"])
def test_the_mean_error_of_a_layer_is_gone(op_type: str) -> None:
    """In MXFP4 both operands lose much, and the bias stays float, so that it can be said exactly."""
    model, data = layer(op_type)
    calibration = [*data, data[0]]  # the one beyond those asked for is held out
    plain = quantize(model, list(data), without("MXFP4E2M1")).model
    result = quantize(model, calibration, config_of("MXFP4E2M1"), num_samples=8)
    assert result.report.algorithms[-1].name == "bias correction"
    middle = [np.sort(mean_errors(model, value, data), axis=0)[2:6] for value in (plain, result.model)]
    before, after = (each.mean(axis=0) for each in middle)
    assert np.abs(before).max() > 0.01
    assert np.abs(after).max() < 0.1 * np.abs(before).max()


def test_nothing_is_corrected_where_nothing_is_lost() -> None:
    net = Net()
    weight = net.constant(np.eye(8, dtype=np.float32))
    y = net.node("Gemm", net.input("x", (1, 8)), weight, net.constant(np.arange(8, dtype=np.float32)))
    data = [RANDOM.integers(0, 2, (1, 8)).astype(np.float32) for _ in range(4)]
    result = quantize(net.model(y), data, config_of("MXINT8"))
    biases = [numpy_helper.to_array(each) for each in result.model.graph.initializer if each.dims == [8]]
    assert any((bias == np.arange(8)).all() for bias in biases)


def deep_network(seed: int = 1) -> onnx.ModelProto:
    """Convolutions with depthwise ones between, whose channels differ widely in size."""
    net = Net(seed=seed)
    x = net.input("x", ("N", 3, 16, 16))
    channels = 3
    for width in (16, 24, 24):
        x = net.node("Clip", net.conv(x, (channels, width), 1), net.constant(0.0), net.constant(6.0))
        sizes = 2.0 ** net.random.uniform(-4, 2, (width, 1, 1, 1))
        weight = net.constant((net.random.standard_normal((width, 1, 3, 3)) * sizes).astype(np.float32))
        x = net.node("Conv", x, weight, net.weight(width), group=width, pads=[1, 1, 1, 1])
        x = net.node("Clip", x, net.constant(0.0), net.constant(6.0))
        channels = width
    return net.model(net.node("GlobalAveragePool", net.conv(x, (channels, 10), 1)))


def error_db(model: onnx.ModelProto, quantized: onnx.ModelProto, data: Array) -> float:
    meter = FidelityMeter("y")
    for exact, seen in zip(outputs(model, data), outputs(quantized, data), strict=True):
        meter.add(exact, seen)
    return meter.result().sqnr_db


@pytest.mark.parametrize("preset", ["XINT8", "MXFP8E4M3", "MXFP4E2M1", "MX6", "BFP16"])
def test_networks_come_closer_to_float(preset: str) -> None:
    model = deep_network()
    data = RANDOM.standard_normal((24, 1, 3, 16, 16)).astype(np.float32)
    other = RANDOM.standard_normal((16, 1, 3, 16, 16)).astype(np.float32)
    plain = quantize(model, list(data), without(preset)).model
    corrected = quantize(model, list(data), config_of(preset)).model
    assert error_db(model, corrected, other) > error_db(model, plain, other)


def test_following_the_quantized_network_is_guarded() -> None:
    model = deep_network()
    data = RANDOM.standard_normal((24, 1, 3, 16, 16)).astype(np.float32)
    config = config_of("MXFP6E2M3", BiasCorrectionInputs="quantized")
    facts = quantize(model, list(data), config).report.algorithms[-1]
    assert facts.name == "bias correction from the quantized network"
    assert facts.changed or "got worse" in facts.left[-1].reason


def test_random_numbers_correct_nothing() -> None:
    result = quantize(deep_network(), None, config_of("MXINT8"))
    facts = result.report.algorithms[-1]
    assert not facts.changed
    assert "no calibration data" in facts.left[0].reason


def test_every_layer_gets_a_bias_of_its_own() -> None:
    net = Net()
    shared = net.weight(4, name="shared")
    x = net.input("x", (1, 4, 5, 5))
    first = net.node("Conv", x, net.weight(4, 4, 1, 1), shared)
    second = net.node("Conv", first, net.weight(4, 4, 1, 1), shared)
    proto = net.model(net.conv(second, (4, 6), has_bias=False))
    model = ir.serde.deserialize_model(proto)
    give_biases(model)
    data = [images(1, 4, 5, 5)]
    biases = [node.inputs[2] for node in model.graph]
    assert len({value.name for value in biases}) == 3
    np.testing.assert_array_equal(outputs(ir.serde.serialize_model(model), data)[0], outputs(proto, data)[0])


def test_what_has_no_bias_to_correct_is_told() -> None:
    net = Net()
    y = net.node("Relu", net.node("MatMul", net.input("x", (1, 5, 12)), net.weight(12, 6), name="lonely"))
    data = [images(1, 5, 12) for _ in range(4)]
    facts = quantize(net.model(y), data, config_of("MXINT8")).report.algorithms[-1]
    assert [(each.node, each.reason) for each in facts.left] == [("lonely", "no bias is added to its result")]


def class_token_network(has_plain_layer: bool = False) -> onnx.ModelProto:
    """A row of zeros beside rows of data goes through a product, and a normalization enlarges what becomes of it. The
    plain layer has an output of its own."""
    net = Net(seed=2)
    token = net.constant(np.zeros((1, 1, 12), np.float32))
    rows = net.node("Concat", token, net.input("x", (1, 5, 12)), axis=1)
    small = net.constant(np.linspace(-0.01, 0.01, 12, dtype=np.float32))
    y = net.node("Add", net.node("MatMul", rows, net.weight(12, 12), name="product"), small)
    scale, bias = net.constant(np.ones(12, np.float32)), net.constant(np.zeros(12, np.float32))
    normal = net.node("LayerNormalization", y, scale, bias, axis=-1, epsilon=1e-8)
    y = net.node("Gather", normal, net.constant(np.array(0, np.int64)), axis=1, output="y")
    if not has_plain_layer:
        return net.model(y)
    plain = net.node("MatMul", net.node("Abs", "x"), net.weight(12, 6), name="plain")
    return net.model(y, net.node("Add", plain, net.weight(6), output="z"))


def test_a_correction_that_makes_the_outputs_of_products_worse_is_taken_back():
    model, data = class_token_network(), images(24, 1, 5, 12)
    corrected = quantize(model, list(data), config_of("S8S8_AAWS", Protect="none", WeightsOnly=True))
    (facts,) = corrected.report.algorithms
    assert facts.changed == ()
    assert [each.reason for each in facts.left] == ["the outputs on held-out samples got worse with it"]
    plain = without("S8S8_AAWS")
    plain.extra_options.update(Protect="none", WeightsOnly=True)
    expected = quantize(model, list(data), plain)
    for output, wanted in zip(outputs(corrected.model, data), outputs(expected.model, data), strict=True):
        np.testing.assert_array_equal(output, wanted)


def test_of_corrections_that_make_the_outputs_worse_together_those_that_help_are_kept():
    model, data = class_token_network(has_plain_layer=True), images(24, 1, 5, 12)
    corrected = quantize(model, list(data), config_of("S8S8_AAWS", Protect="none", WeightsOnly=True))
    (facts,) = corrected.report.algorithms
    assert [each.partition(":")[0] for each in facts.changed] == ["plain"]
    assert [each.node for each in facts.left] == ["product"]
    without_any = without("S8S8_AAWS")
    without_any.extra_options.update(Protect="none", WeightsOnly=True)
    expected = quantize(model, list(data), without_any)
    for output, wanted in zip(outputs(corrected.model, data), outputs(expected.model, data), strict=True):
        np.testing.assert_array_equal(output, wanted)  # of the class token
    of_plain = [
        np.array([open_session(value).run(["z"], {"x": x})[0] for x in data]) for value in (model, corrected.model)
    ]
    np.testing.assert_allclose((of_plain[1] - of_plain[0]).mean(axis=(0, 1, 2)), 0, atol=5e-3)
