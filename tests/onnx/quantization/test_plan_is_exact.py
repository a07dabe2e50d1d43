"""What ONNX Runtime computes is what the plan says, computed here with numpy; and the same file for every hash seed."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx_models import Net, random_feed, run_model

from quark.errors import InvalidValueError, ModelError
from quark.formats.affine import dequantize_affine, quantize_affine
from quark.onnx import get_default_config, quantize
from quark.rounded import parameters_of

PRESETS = ("XINT8", "VINT8", "A8W8", "S8S8_AAWS", "U8U8_AAWA", "INT8_CNN_DEFAULT", "INT8_TRANSFORMER_DEFAULT")


def network():
    net = Net()
    x = net.input("x", (2, 4, 6, 6))
    y = net.node("Conv", x, net.weight(6, 4, 3, 3, name="w1"), net.weight(6, name="b1"), name="conv1")
    r = net.node("Relu", y, name="relu")
    y = net.node("Conv", r, net.weight(6, 6, 1, 1, name="w2"), net.weight(6, name="b2"), name="conv2")
    y = net.node("Flatten", net.node("Add", y, r, name="add"), name="flatten")
    weights = net.weight(96, 5, name="w3"), net.weight(5, name="b3")
    return net.model(net.node("Gemm", y, *weights, alpha=0.5, beta=2.0, name="gemm", output="y"))


def convolve(x, w, b):
    kernel, size = w.shape[2], x.shape[2] - w.shape[2] + 1
    windows = [x[:, :, i : i + size, j : j + size] for i in range(kernel) for j in range(kernel)]
    flat = w.reshape(*w.shape[:2], -1).astype(np.float64)
    return (np.einsum("nchwk,ock->nohw", np.stack(windows, -1), flat) + b[:, None, None]).astype(np.float32)


def emulate(model, plan, x):
    """The network of `network` on what each reader sees by the plan."""
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    choices = {(reader.node, reader.index): tensor.choice for tensor in plan for reader in tensor.readers}

    def see(value, node, index):
        choice = choices.get((node, index))
        if choice is None:
            return value
        parameters = parameters_of(choice, value.shape)
        return np.asarray(dequantize_affine(quantize_affine(value.astype(np.float32), parameters), parameters))

    def operands(node, value, number):
        names = [constants[f"w{number}"], constants[f"b{number}"]]
        return [see(name, node, index) for index, name in enumerate([value, *names])]

    r = np.maximum(see(convolve(*operands("conv1", x, 1)), "relu", 0), 0)
    y = see(convolve(*operands("conv2", r, 2)), "add", 0) + see(r, "add", 1)
    y, w, b = operands("gemm", see(y, "flatten", 0).reshape(2, -1), 3)
    return see((0.5 * (y.astype(np.float64) @ w) + 2.0 * b).astype(np.float32), "", 0)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_runtime_computes_what_the_plan_says(preset):
    model = network()
    config = get_default_config(preset)
    config.include_cle = False  # these change the float model
    config.extra_options.update(BiasCorrection=False, Compensation=False)
    result = quantize(model, [random_feed(model, seed) for seed in range(8)], config)
    feed = random_feed(model, 99)
    actual = run_model(result.model, feed)["y"]
    np.testing.assert_allclose(emulate(model, result.plan, feed["x"]), actual, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("option", ["RemoveQDQConvLeakyRelu", "RemoveQDQMulAdd"])
@pytest.mark.parametrize("preset", ["S8S8_AAWS", "U8S8_AAWS"])
def test_nothing_is_quantized_where_an_option_removes_it(option, preset):
    net = Net()
    x = net.input("x", (1, 4, 8, 8))
    y = net.node("LeakyRelu", net.conv(x, (4, 4), 1), alpha=0.1, name="leaky")
    y = net.node("Mul", y, net.constant(np.full((1, 4, 1, 1), 3, np.float32)), name="mul")
    model = net.model(net.node("Relu", net.node("Add", net.conv(x, (4, 4), 1), y, name="add")))
    config = get_default_config(preset)
    config.extra_options |= {option: True, "Protect": "none"}  # which would leave the Mul with a constant in float
    plan = quantize(model, [random_feed(model, seed) for seed in range(4)], config).plan
    readers = {(reader.node, reader.index) for tensor in plan for reader in tensor.readers}
    assert (("leaky", 0) if option == "RemoveQDQConvLeakyRelu" else ("add", 1)) not in readers


def test_an_excluded_node_is_not_listed_as_quantized():
    model = network()
    config = get_default_config("S8S8_AAWS")
    config.nodes_to_exclude = ["conv2"]
    report = quantize(model, [random_feed(model)], config).report
    assert "conv2" not in report.quantized_nodes
    assert [node.node for node in report.plan.skipped] == ["conv2"]


@pytest.mark.parametrize("preset", ["MXINT8", "BF16", "UINT8_DYNAMIC_QUANT", "MATMUL_NBITS", "XINT8", "A8W8"])
def test_every_node_is_either_quantized_or_skipped_with_a_reason(preset):
    model = network()
    config = get_default_config(preset)
    if preset == "MXINT8":
        config.extra_op_types_to_quantize = ["Relu"]
    report = quantize(model, [random_feed(model)], config).report
    skipped = [node.node for node in report.plan.skipped]
    fused = {"relu"} - set(skipped)  # is computed with the operator before it
    assert sorted({*skipped, *report.quantized_nodes} | fused) == sorted(node.name for node in model.graph.node)
    assert not set(skipped) & set(report.quantized_nodes)


def test_saving_never_overwrites_the_model_that_was_read(tmp_path):
    source = tmp_path / "net.onnx"
    source.write_bytes(network().SerializeToString())
    result = quantize(source, None, "MXINT8")
    with pytest.raises(InvalidValueError, match="input model"):
        result.save(source)
    assert source.read_bytes() == network().SerializeToString()


def test_rows_that_fill_no_batch_are_refused():
    with pytest.raises(InvalidValueError, match="7 rows for 'x'.*batches of 2"):
        quantize(network(), np.zeros((7, 4, 6, 6), np.float32), "A8W8")


def test_no_samples_are_not_all_samples():
    with pytest.raises(InvalidValueError, match="count 0"):
        quantize(network(), np.zeros((8, 4, 6, 6), np.float32), "A8W8", num_samples=0)


def test_a_sample_that_the_model_cannot_run_is_named():
    net = Net()
    x, z = net.input("x", ("N", 4)), net.input("z", ("M", 4))
    model = net.model(net.node("Add", net.node("MatMul", x, net.weight(4, 4)), z))
    good, bad = ({"x": np.ones((2, 4), np.float32), "z": np.ones((rows, 4), np.float32)} for rows in (2, 3))
    with pytest.raises(ModelError, match="sample 1.*Add"):
        quantize(model, [good, bad, good, good], "A8W8")


PROGRAM = """
import hashlib, logging, sys
from onnx_models import random_feed, transformer_block
from quark.onnx import quantize
logging.disable(logging.WARNING)
model = transformer_block()
for preset in ("UINT8_DYNAMIC_QUANT", "INT8_CNN_DEFAULT", "XINT8", "MXINT8", "MATMUL_NBITS"):
    result = quantize(model, [random_feed(model, seed) for seed in range(4)], preset)
    content = result.model.SerializeToString(deterministic=True) + result.report.to_json().encode()
    print(preset, hashlib.sha256(content).hexdigest())
"""


def test_the_result_does_not_depend_on_the_process():
    outputs = []
    for seed in ("1", "2"):
        path = os.pathsep.join(each for each in sys.path if each)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        outputs.append(
            subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True)
        )
    assert outputs[0].stdout == outputs[1].stdout
    assert outputs[0].stdout.count(b"\n") == 5


@pytest.mark.parametrize(("preset", "is_remarked"), [("S8S8_AAWS", True), ("XINT8", True), ("A8W8", False)])
def test_a_moving_average_of_nothing_is_remarked_on(preset, is_remarked):
    config = get_default_config(preset)
    config.extra_options["CalibMovingAverage"] = True
    remarks = quantize(network(), None, config, use_random_data=True).report.remarks
    assert any("CalibMovingAverage" in remark for remark in remarks) is is_remarked


def test_dynamic_quantization_with_channels_runs():
    for is_symmetric in (False, True):
        config = get_default_config("UINT8_DYNAMIC_QUANT")
        config.per_channel = True
        config.extra_options["WeightSymmetric"] = is_symmetric
        model = network()
        feeds = [random_feed(model, seed) for seed in range(2)]
        result = quantize(model, feeds, config)
        expected, actual = (run_model(value, feeds[0])["y"] for value in (model, result.model))
        np.testing.assert_allclose(actual, expected, atol=0.02 * np.abs(expected).max())
