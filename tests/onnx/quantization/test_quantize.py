"""The main job, end to end: every preset on a trained network, what is written, and what is left alone."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from mixed_networks import images as mixed_images
from mixed_networks import mixed_network
from onnx_models import Net, conv_bn_relu, random_feed, residual, transformer_block, with_if

from quark.compare import Verdict
from quark.demo import network_path
from quark.errors import InvalidValueError, ModelError, QuarkError
from quark.onnx import (
    ModelQuantizer,
    QConfig,
    QuantizationConfig,
    get_default_config,
    get_library_path,
    quantize,
)
from quark.onnx.quantization.presets import PRESETS
from quark.plan import QuantizationPlan

RANDOM = np.random.default_rng(3)


def images(count=24):
    """Something like digits: smooth blobs between 0 and 1."""
    shape = session_of(network_path()).get_inputs()[0].shape
    grid = np.indices((shape[2], shape[3])) / shape[2]
    random = np.random.default_rng(5)  # the same in every test, whatever ran before
    centres, widths = random.uniform(0.2, 0.8, (count, 2, 1, 1)), random.uniform(0.05, 0.3, (count, 1, 1))
    blobs = np.exp(-((grid[None] - centres) ** 2).sum(1) / widths**2)
    return [{session_of(network_path()).get_inputs()[0].name: blob[None, None].astype(np.float32)} for blob in blobs]


def session_of(model, has_library=True):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if has_library:
        options.register_custom_ops_library(get_library_path())
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return onnxruntime.InferenceSession(source, options, ["CPUExecutionProvider"])


FINETUNED = [name for name, row in PRESETS.items() if "FastFinetune" in row.options]
QUICK = ("INT8_CNN_ACCURATE", "XINT8_ADAROUND", "A16W8_ADAQUANT", "A8W4_ADAQUANT", "MX6_ADAQUANT", "NVFP4_ADAQUANT")
DISTILLED = [name for name, row in PRESETS.items() if "Distillation" in row.options]
PLAIN = [name for name, row in PRESETS.items() if not row.is_trained]
COARSE = (
    "INT8_TRANSFORMER_DEFAULT",
    "INT16_TRANSFORMER_DEFAULT",
    "MX4",
    "MXFP4E2M1",
    "MXFP6E3M2",
    "MXFP8E5M2",
    "MX6",
    "FP8E5M2",
    *(name for name in PRESETS if name.endswith("_MXFP4E2M1")),
)


@pytest.mark.parametrize("name", PLAIN)
def test_every_preset_that_trains_nothing_quantizes_the_demo_network(name, tmp_path):
    before = hashlib.sha256(network_path().read_bytes()).hexdigest()
    result = quantize(network_path(), images(), name)
    path = result.save(tmp_path / "out.onnx")
    assert hashlib.sha256(network_path().read_bytes()).hexdigest() == before
    assert result.report.verdict is Verdict.OK or name in COARSE
    session, reference = session_of(path), session_of(network_path())
    assert [(i.name, i.shape) for i in session.get_inputs()] == [(i.name, i.shape) for i in reference.get_inputs()]
    assert [o.name for o in session.get_outputs()] == [o.name for o in reference.get_outputs()]
    assert np.isfinite(session.run(None, images(1)[0])[0]).all()
    words = ("Quant", "Integer", "NBits")
    assert any(word in node.op_type for word in words for node in onnx.load(path).graph.node)
    onnx.checker.check_model(onnx.load(path))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FINETUNED]
)
def test_every_preset_that_finetunes_quantizes_a_network(name, tmp_path):
    pytest.importorskip("torch")
    config = get_default_config(name)
    config.extra_options["FastFinetune"] |= {"NumIterations": 5, "DataSize": 8, "CacheDir": tmp_path / "layers"}
    result = quantize(mixed_network(), mixed_images(10), config)
    facts = {algorithm.name: algorithm for algorithm in result.report.algorithms}[
        "AdaQuant" if "ADAQUANT" in name else "AdaRound"
    ]
    assert facts.changed or facts.left
    path = result.save(tmp_path / "out.onnx")
    assert np.isfinite(session_of(path).run(None, mixed_images(1)[0])[0]).all()
    assert any("Quant" in node.op_type for node in onnx.load(path).graph.node)
    onnx.checker.check_model(onnx.load(path))


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTILLED)
def test_every_preset_that_distils_quantizes_the_demo_network(name, tmp_path):
    pytest.importorskip("torch")
    config = get_default_config(name)
    config.extra_options |= {"DistillationSteps": 2, "DistillationFolder": str(tmp_path / "state")}
    result = quantize(network_path(), images(20), config)
    (facts,) = [algorithm for algorithm in result.report.algorithms if algorithm.name == "distillation"]
    assert facts.changed or facts.left
    assert np.isfinite(session_of(result.save(tmp_path / "out.onnx")).run(None, images(1)[0])[0]).all()


@pytest.mark.parametrize("name", ["XINT8", "MXFP8E4M3", "BF16", "U16S8_AAWS"])
def test_same_input_gives_the_same_bytes(name, tmp_path):
    contents = []
    for number in range(2):
        path = quantize(network_path(), sample_list(), name).save(tmp_path / str(number) / "out.onnx")
        contents.append((path.read_bytes(), path.with_suffix(".json").read_bytes()))
    assert contents[0] == contents[1]


@pytest.fixture(autouse=True)
def _folders(tmp_path):
    for number in range(2):
        (tmp_path / str(number)).mkdir()


def sample_list():
    random = np.random.default_rng(0)
    info = session_of(network_path()).get_inputs()[0]
    shape = [size if isinstance(size, int) else 1 for size in info.shape]
    return [{info.name: random.random(shape, np.float32)} for _ in range(10)]


def test_the_report_tells_what_was_done(tmp_path):
    path = quantize(network_path(), sample_list(), "INT8_CNN_DEFAULT").save(tmp_path / "out.onnx")
    content = json.loads(path.with_suffix(".json").read_text())
    assert content["verdict"] in ("ok", "degraded", "collapsed")
    assert content["result"]["bytes"] == path.stat().st_size
    assert content["result"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert content["source"]["sha256"] == hashlib.sha256(network_path().read_bytes()).hexdigest()
    assert content["calibration"] | {"samples": 9, "held_out": 1} == content["calibration"]
    plan = QuantizationPlan.from_json(json.dumps(content["plan"]))
    metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert metadata["quark.config_name"] == "INT8_CNN_DEFAULT"
    assert len(plan.tensors) > 10
    assert {node["node"] for node in content["quantized_nodes"]}


def test_portable_functions_can_be_left_out():
    config = get_default_config("MXINT8")
    config.extra_options["PortableFunctions"] = False
    without = quantize(network_path(), sample_list(), config).model
    model = quantize(network_path(), sample_list(), "MXINT8").model
    feed = sample_list()[0]
    expected = session_of(model).run(None, feed)[0]
    np.testing.assert_array_equal(session_of(without).run(None, feed)[0], expected)
    np.testing.assert_array_equal(session_of(model, has_library=False).run(None, feed)[0], expected)
    with pytest.raises(Exception, match="MXQuantizeDequantize"):
        session_of(without, has_library=False)


def test_every_convolution_becomes_an_integer_kernel(tmp_path):
    for name in ("INT8_CNN_DEFAULT", "U8S8_AAWS"):
        model = quantize(network_path(), images(), name).model
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(tmp_path / f"{name}.onnx")
        onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        op_types = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
        assert "QLinearConv" in op_types
        assert not {"Conv", "FusedConv"} & set(op_types)


MODELS = {
    "conv_bn_relu": conv_bn_relu,
    "half": lambda: conv_bn_relu(opset=21, dtype=np.float16),
    "residual": residual,
    "old opset": lambda: residual(13),
    "transformer": transformer_block,
    "if": with_if,
}


@pytest.mark.parametrize("preset", ["XINT8", "A8W8", "U8S8_AAWS", "INT16_CNN_DEFAULT", "BF16", "MXFP6E2M3", "BFP16"])
@pytest.mark.parametrize("name", MODELS)
def test_odd_models_come_out_close_to_float(name, preset):
    model = MODELS[name]()
    if name == "half" and preset == "BF16":
        pytest.skip("a float16 model has nothing to gain from bfloat16")
    result = quantize(model, [random_feed(model, seed) for seed in range(12)], preset)
    feed = random_feed(model, 99)
    expected, actual = session_of(model).run(None, feed)[0], session_of(result.model).run(None, feed)[0]
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    noise = np.square(actual.astype(np.float64) - expected).mean() / np.square(expected.astype(np.float64)).mean()
    assert noise < 0.1
    nodes = {reader.node for tensor in result.plan for reader in tensor.readers}
    assert nodes


def test_int16_does_not_saturate_its_biases():
    net = Net()
    x = net.input("x", (1, 3, 8, 8))
    bias = net.constant(np.array([300.0, -200.0], np.float32))
    model = net.model(net.node("Conv", x, net.constant(np.full((2, 3, 1, 1), 1e-3, np.float32)), bias, output="y"))
    result = quantize(model, [random_feed(model, seed) for seed in range(4)], "INT16_CNN_DEFAULT")
    feed = random_feed(model, 5)
    expected, actual = session_of(model).run(None, feed)[0], session_of(result.model).run(None, feed)[0]
    np.testing.assert_allclose(actual, expected, atol=0.05)


def test_qoperator_format_has_integer_operators():
    from quark.onnx import QuantFormat, QuantType

    config = QuantizationConfig(
        quant_format=QuantFormat.QOperator, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8
    )
    result = quantize(network_path(), images(), config)
    op_types = {node.op_type for node in result.model.graph.node}
    assert "QLinearConv" in op_types
    assert result.report.verdict is Verdict.OK


def test_the_classic_call_returns_or_writes(tmp_path):
    quantizer = ModelQuantizer(QConfig.get_default_config("MXINT8"))
    model = quantizer.quantize_model(str(network_path()), calibration_data_reader=sample_list())
    assert isinstance(model, onnx.ModelProto)
    target = tmp_path / "out.onnx"
    assert quantizer.quantize_model(network_path(), target, sample_list()) is None
    assert target.read_bytes() == model.SerializeToString(deterministic=True)


def test_random_numbers_serve_if_asked_for_and_the_report_says_so(caplog):
    with caplog.at_level(logging.WARNING, "quark"):
        result = quantize(network_path(), None, "A8W8", use_random_data=True)
    assert result.report.calibration.is_random
    assert any("random" in remark for remark in result.report.remarks)
    assert "random" in caplog.text


def test_a_collapse_is_said_loudly(caplog):
    config = get_default_config("MXFP4E2M1")
    config.extra_options["MXAttributes"]["block_size"] = 1024
    model = transformer_block()
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 2:
            array = onnx.numpy_helper.to_array(tensor).copy()
            array[0, :] *= 1e4
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    with caplog.at_level(logging.WARNING, "quark"):
        result = quantize(model, [random_feed(model, seed) for seed in range(4)], config)
    assert result.report.verdict is not Verdict.OK
    assert result.report.verdict.value in caplog.text


def test_external_data_lies_beside_the_model(tmp_path):
    config = get_default_config("MXINT8")
    config.use_external_data_format = True
    path = quantize(network_path(), sample_list(), config).save(tmp_path / "out.onnx")
    (data,) = tmp_path.glob("*.data")
    assert data.stat().st_size > path.stat().st_size / 4
    feed = sample_list()[0]
    expected = session_of(quantize(network_path(), sample_list(), "MXINT8").model).run(None, feed)[0]
    np.testing.assert_array_equal(session_of(path).run(None, feed)[0], expected)


def test_weights_beyond_the_limit_of_protobuf_lie_beside_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr("quark.onnx.save.PROTOBUF_LIMIT_BYTES", 10_000)
    path = quantize(network_path(), sample_list(), "MXINT8").save(tmp_path / "out.onnx")
    assert list(tmp_path.glob("*.data"))
    assert np.isfinite(session_of(path).run(None, sample_list()[0])[0]).all()


@pytest.mark.parametrize(
    ("output", "message"),
    [("missing/out.onnx", "no folder"), (".", "is a folder")],
)
def test_an_output_that_cannot_be_written_is_found_before_the_work(output, message, tmp_path):
    class NeverRead:
        def get_next(self):
            raise AssertionError("the data was read")

    with pytest.raises(InvalidValueError, match=message):
        ModelQuantizer(QConfig.get_default_config("A8W8")).quantize_model(
            network_path(), tmp_path / output, NeverRead()
        )


def test_the_input_is_never_overwritten(tmp_path):
    source = tmp_path / "net.onnx"
    source.write_bytes(network_path().read_bytes())
    with pytest.raises(InvalidValueError, match="input model"):
        ModelQuantizer(QConfig.get_default_config("A8W8")).quantize_model(source, source, sample_list())


def bad_samples():
    good = sample_list()
    ((name, array),) = good[0].items()
    yield "empty", [], "no samples"
    yield "wrong name", [{"image": array}], "image"
    yield "wrong shape", [{name: array[..., :2]}], name
    yield "wrong dtype", [{name: array.astype(np.int64)}], "int64"
    yield "NaN", [good[0], {name: array * np.nan}], "sample 1"
    yield "Inf", [good[0], {name: array + np.inf}], "sample 1"


@pytest.mark.parametrize(
    ("samples", "message"), [case[1:] for case in bad_samples()], ids=[c[0] for c in bad_samples()]
)
@pytest.mark.parametrize("preset", ["XINT8", "MXINT8"])
def test_bad_data_is_refused_by_name_and_leaves_nothing(samples, message, preset, tmp_path):
    folder = tmp_path / "0"
    with pytest.raises(QuarkError, match=message):
        ModelQuantizer(QConfig.get_default_config(preset)).quantize_model(network_path(), folder / "out.onnx", samples)
    assert not list(folder.iterdir())


def test_data_of_one_value_is_remarked_on():
    zeros = quantize(network_path(), np.zeros((16, 1, 8, 8), np.float32)).report
    assert [remark for remark in zeros.remarks if "every value of 'input' is 0, in all samples" in remark]
    images_and_zeros = np.concatenate([np.zeros((8, 1, 8, 8), np.float32), np.ones((8, 1, 8, 8), np.float32)])
    assert not [
        remark for remark in quantize(network_path(), images_and_zeros).report.remarks if "every value" in remark
    ]


def test_a_constant_mask_beside_an_input_is_fine():
    net = Net()
    model = net.model(net.node("Mul", net.input("x", [1, 4]), net.input("mask", [1, 4])))
    samples = [{"x": RANDOM.random((1, 4), np.float32), "mask": np.ones((1, 4), np.float32)} for _ in range(4)]
    assert not [remark for remark in quantize(model, samples).report.remarks if "every value" in remark]


def test_one_batch_of_samples_is_counted_as_what_it_is():
    report = quantize(network_path(), [np.random.default_rng(0).random((16, 1, 8, 8), dtype=np.float32)]).report
    assert [remark for remark in report.remarks if remark.startswith("one batch of 16 samples only")]


def test_a_node_with_a_subgraph_stays_in_float_for_one_reason():
    model = with_if()
    skipped = quantize(model, [random_feed(model, seed) for seed in range(4)]).report.plan.skipped
    assert [node.reason for node in skipped if node.op_type == "If"] == ["holds a subgraph, which is left in float"]
    assert {node.op_type for node in skipped if "inside If" in node.reason} == {"Relu", "Neg"}


def test_an_already_quantized_model_is_recognised():
    for preset in ("A8W8", "MXINT8", "UINT8_DYNAMIC_QUANT"):
        model = quantize(network_path(), sample_list(), preset).model
        with pytest.raises(ModelError, match="already quantized"):
            quantize(model, sample_list(), "XINT8")


def test_nothing_to_quantize_is_said():
    net = Net()
    model = net.model(net.node("Exp", net.input("x", (2, 3)), output="y"))
    result = quantize(model, [random_feed(model)], "MXINT8")
    assert any("nothing was quantized" in remark for remark in result.report.remarks)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "0" / "out.onnx"
    target.write_bytes(b"old")
    result = quantize(network_path(), sample_list(), "MXINT8")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        result.save(target)
    assert target.read_bytes() == b"old"
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("ignores", [True, False])
def test_warnings_of_python_are_ignored_during_the_run_alone(ignores):
    def reader():
        warnings.warn("of the reader", UserWarning, stacklevel=1)
        yield from images(2)

    config = get_default_config("A8W8")
    config.ignore_warnings = ignores
    config.print_summary = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ModelQuantizer(config).quantize_model(str(network_path()), None, reader())
        warnings.warn("afterwards", UserWarning, stacklevel=1)
    texts = [str(each.message) for each in caught if each.category is UserWarning]
    assert texts == (["afterwards"] if ignores else ["of the reader", "afterwards"])
