"""Options about calibration and evaluation, each on a small network, with numbers where there are some."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from onnx_models import Net

from quark.card import Card
from quark.errors import InvalidValueError, UnknownNameError
from quark.formats.affine import integer_format
from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, UInt8Spec, XInt8Spec, quantize
from quark.onnx.calibrate import CalibrationOptions, FloatRunner, Wanted, calibrate, range_sources
from quark.onnx.data import input_infos, open_samples
from quark.onnx.quantization.config.config import get_default_config
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.reproduction import settings_from
from quark.onnx.session import open_session
from quark.ranges import MinMax


def network() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", ["N", 3, 8, 8])
    conv = net.node("Conv", x, net.weight(8, 3, 3, 3), pads=[1, 1, 1, 1], output="conv")
    pooled = net.node("MaxPool", conv, kernel_shape=[2, 2], strides=[2, 2], output="pooled")
    turned = net.node("Transpose", pooled, perm=[0, 2, 3, 1], output="turned")
    return net.model(net.node("MatMul", turned, net.weight(8, 4), output="y"))


DATA = [{"x": np.random.default_rng(seed).standard_normal((1, 3, 8, 8)).astype(np.float32)} for seed in range(6)]


def run(data=DATA, activation=None, weight=None, **options) -> onnx.ModelProto:
    layer = QLayerConfig(input_tensors=activation or UInt8Spec(), weight=weight or Int8Spec())
    made = ModelQuantizer(QConfig(layer, PrintSummary=False, **options)).quantize_model(network(), None, data)
    assert made is not None
    return made


def scales(model: onnx.ModelProto) -> dict[str, float]:
    found = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    return {name.removesuffix("_scale"): float(each) for name, each in found.items() if name.endswith("_scale")}


@pytest.mark.parametrize("method", CalibMethod)
def test_power_of_two_specs_take_every_method(method):
    spec = XInt8Spec(calibration_method=method)
    found = scales(run(activation=spec, weight=spec))
    assert len(found) >= 5
    assert all(math.log2(scale).is_integer() for scale in found.values())


def test_a_percentile_of_power_of_two_scales_clips_an_outlier():
    data = [{"x": np.where(np.arange(192).reshape(1, 3, 8, 8) == 7, 60, 0.5).astype(np.float32)}] * 2
    wide, narrow = (
        scales(run(data, XInt8Spec(calibration_method=method), XInt8Spec(), Percentile=99.0))["x"]
        for method in (CalibMethod.MinMax, CalibMethod.Percentile)
    )
    assert (wide, narrow) == (0.5, 2**-7)


@pytest.mark.parametrize("spec", [UInt8Spec(), XInt8Spec()], ids=["float scales", "powers of two"])
def test_restored_ranges_give_the_same_file(tmp_path, spec):
    file = tmp_path / "new" / "ranges.json"
    weight = XInt8Spec() if isinstance(spec, XInt8Spec) else None
    plain, first, again = (run(DATA, spec, weight, **each) for each in ({}, *[{"SaveAndRestore": file}] * 2))
    assert plain == first == again
    ranges = json.loads(file.read_text())["tensors_range"]
    # the data are other ones now, and nothing is measured
    assert scales(plain) == scales(run(DATA[:1], spec, weight, SaveAndRestore=str(file)))
    assert scales(plain) != scales(run(DATA[:1], spec, weight))
    assert set(ranges) >= {"x", "conv"}
    assert all(lowest < highest for lowest, highest in ranges.values())


def test_ranges_of_another_tool_are_taken_and_missing_ones_added(tmp_path):
    file = tmp_path / "ranges.json"
    content = {"quark_version": "0.13", "tensors_range": {"x": [[-2.55], [2.55]]}, "layers_to_finetune": [1]}
    file.write_text(json.dumps(content))
    found = scales(run(TensorsRangeFile=file))
    assert found["x"] == pytest.approx(0.02, rel=1e-6)
    written = json.loads(file.read_text())
    assert written["layers_to_finetune"] == [1]
    assert written["tensors_range"]["x"] == [[-2.55], [2.55]]
    assert "conv" in written["tensors_range"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "tensors_range"), ('{"tensors_range": {"x": [1, 0]}}', "'x': range 1..0"), ("[]", "ranges.json")],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, message):
    (tmp_path / "ranges.json").write_text(text)
    with pytest.raises(InvalidValueError, match=message):
        run(SaveAndRestore=tmp_path / "ranges.json")
    assert (tmp_path / "ranges.json").read_text() == text


def test_the_report_does_not_replace_the_file_of_ranges(tmp_path):
    onnx.save(network(), tmp_path / "m.onnx")
    config = QConfig(QLayerConfig(UInt8Spec(), weight=Int8Spec()), SaveAndRestore=tmp_path / "out.json")
    with pytest.raises(InvalidValueError, match="report would overwrite"):
        ModelQuantizer(config).quantize_model(tmp_path / "m.onnx", tmp_path / "out.onnx", DATA)


def test_two_files_of_ranges_are_an_error():
    with pytest.raises(InvalidValueError, match="leave one out"):
        run(SaveAndRestore="a.json", TensorsRangeFile="b.json")


def test_passthrough_operators_have_the_range_of_what_they_move():
    model = ir.from_proto(network())
    samples = open_samples(DATA, input_infos(model))
    wanted = {name: Wanted(MinMax(), integer_format("uint8"), False) for name in ("pooled", "turned")}
    ranges = {}
    for op_types in ((), ("Transpose",), ("MaxPool", "Transpose")):
        options = CalibrationOptions(passthrough_op_types=frozenset(op_types))
        with FloatRunner(model, ["conv", *wanted]) as runner:
            ranges[op_types] = calibrate(runner, wanted, samples, options)
            everything = calibrate(runner, {"conv": wanted["pooled"]}, samples)["conv"]
    assert ranges[()] == ranges["Transpose",]
    assert ranges[()]["pooled"].lowest > everything.lowest
    assert set(ranges["MaxPool", "Transpose"].values()) == {everything}


def test_passthrough_goes_through_chains_and_stops_at_constants():
    net = Net()
    x = net.input("x", ["N", 4])
    a = net.node("Relu", x, output="a")
    b = net.node("Reshape", a, net.integers([1, -1]), output="b")
    c = net.node("Transpose", b, perm=[1, 0], output="c")
    d = net.node("Reshape", net.weight(2, 2), net.integers([1, 4]), output="d")
    model = ir.from_proto(net.model(net.node("MatMul", c, d, output="y")))
    assert range_sources(model, {"Reshape", "Transpose"}) == {"b": "a", "c": "a"}
    assert range_sources(model, {"Transpose"}) == {"c": "b"}
    assert range_sources(model, ()) == {}


def test_histograms_are_drawn_where_there_are_some(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    run(SaveTensorHistFig=True)
    files = {file.name for file in (tmp_path / "tensor_hist").iterdir()}
    assert files >= {"x.png", "conv.png"}
    assert (tmp_path / "tensor_hist" / "x.png").read_bytes().startswith(b"\x89PNG")
    run(activation=UInt8Spec(calibration_method=CalibMethod.MinMax), SaveTensorHistFig=True)
    assert "SaveTensorHistFig: no range was found from a histogram" in caplog.text


def test_fewer_bins_are_coarser():
    usual, coarse, fine = (scales(run(Percentile=90.0, **value)) for value in ({}, {"NumBins": 4}, {"NumBins": 4096}))
    assert usual == fine == scales(run(Percentile=90.0, NumBins=0))
    assert coarse["x"] > 1.1 * usual["x"]  # a bin of the tail holds many values near its inner end


def test_evaluation_is_cosine_and_distance_of_the_given_data(caplog):
    config = QConfig(
        QLayerConfig(UInt8Spec(), weight=Int8Spec()), EvalMetrics=True, EvalDataReader=DATA[:2], PrintSummary=False
    )
    quantized = quantize(network(), DATA, config)
    (remark,) = (remark for remark in quantized.report.remarks if remark.startswith("EvalMetrics"))
    exact, session = open_session(network()), open_session(quantized.model)
    pairs = [(exact.run(None, feed)[0].ravel(), session.run(None, feed)[0].ravel()) for feed in DATA[:2]]
    distances = [float(np.linalg.norm(a - b)) for a, b in pairs]
    cosines = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in pairs]
    assert "output 'y' over 2 samples" in remark
    assert f"largest {max(distances):.4g}"[:-1] in remark
    assert f"lowest {min(cosines):.6f}"[:-1] in remark
    assert "EvalDataReader" not in json.dumps(quantized.report.config)


def test_evaluation_without_data_of_its_own_takes_the_calibration_data():
    config = QConfig(QLayerConfig(UInt8Spec(), weight=Int8Spec()), EvalMetrics=True)
    assert any("over 6 samples" in remark for remark in quantize(network(), DATA, config).report.remarks)


def test_bad_evaluation_data_are_named():
    with pytest.raises(InvalidValueError, match="option 'EvalDataReader': .*'z'"):
        run(EvalMetrics=True, EvalDataReader=[{"z": DATA[0]["x"]}])


def test_all_tensors_are_declared_with_the_sizes_of_a_sample():
    usual, filled = run(), run(FillAllValueInfo=True)
    graph = filled.graph
    known = {each.name for each in (*graph.input, *graph.output, *graph.initializer, *graph.value_info)}
    assert [name for node in graph.node for name in node.input if name and name not in known] == []
    sizes = {each.name: [dim.dim_value for dim in each.type.tensor_type.shape.dim] for each in filled.graph.value_info}
    assert sizes["conv"] == [1, 8, 8, 8]
    assert all(0 not in size for size in sizes.values())
    assert not any(dim.dim_param for each in filled.graph.value_info for dim in each.type.tensor_type.shape.dim)
    ends = [each.type.tensor_type.shape.dim for each in (*filled.graph.input, *filled.graph.output)]
    assert [[dim.dim_value for dim in dims] for dims in ends] == [[1, 3, 8, 8], [1, 4, 4, 4]]
    assert usual.graph.node == filled.graph.node
    assert usual.graph.initializer == filled.graph.initializer


def test_random_data_have_the_shapes_and_ranges_asked_for(tmp_path):
    file = tmp_path / "ranges.json"
    options = {"UseRandomData": True, "SaveAndRestore": file}
    run(
        None,
        UInt8Spec(calibration_method=CalibMethod.MinMax),
        RandomDataReaderInputShape={"x": [5, 3, 8, 8]},
        RandomDataReaderInputDataRange={"x": [4, 9]},
        **options,
    )
    lowest, highest = json.loads(file.read_text())["tensors_range"]["x"]
    assert 4 <= lowest < 4.1
    assert 8.9 < highest <= 9


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"RandomDataReaderInputShape": {"z": [1]}}, UnknownNameError, "Known: x"),
        ({"RandomDataReaderInputShape": {"x": [1, 4, 8, 8]}}, InvalidValueError, r"\[1, 4, 8, 8\] for input 'x'"),
        ({"RandomDataReaderInputDataRange": {}}, InvalidValueError, "nothing for input 'x'"),
    ],
)
def test_forms_of_random_data_that_do_not_fit_are_named(options, error, message):
    with pytest.raises(error, match=message):
        run(None, UseRandomData=True, **options)


def test_layerwise_percentile_by_metric_and_weights_by_mode():
    spec = UInt8Spec(calibration_method=CalibMethod.LayerwisePercentile)
    values = np.random.default_rng(0).standard_normal((16, 1, 3, 8, 8)).astype(np.float32)
    values[0, 0, 0, 0, 0] = 9.0  # clipping it costs more than the others gain if errors are squared
    options = {"data": [{"x": value} for value in values], "activation": spec, "PercentileCandidates": [99.9, 100.0]}
    squared, absolute = (scales(run(LWPMetric=metric, **options))["x"] for metric in ("mse", "mae"))
    assert squared > 0.04 > absolute
    assert squared == scales(run(LWPMetric="mse", LWPUseHistogram=False, **options))["x"]
    assert absolute == scales(run(LWPMetric="mae", LWPUseHistogram=False, **options))["x"]
    weight = Int8Spec(calibration_method=CalibMethod.MinMSE)
    names = ("Percentile", "HistCenter", "All")
    modes = {mode: scales(run(weight=weight, MinMSEModeFloatScale=mode)) for mode in names}
    assert modes["HistCenter"] == scales(run(weight=weight))
    assert modes["Percentile"] != modes["All"]


def test_min_mse_modes_by_both_names():
    spec = XInt8Spec()
    for mode in ("All", "MostCommon", "Percentile"):
        new, old = (run(activation=spec, weight=spec, **{name: mode}) for name in ("MinMSEModePof2Scale", "MinMSEMode"))
        assert scales(new) == scales(old)


def test_a_library_that_is_none_is_named(tmp_path):
    (tmp_path / "lib.so").write_text("no library")
    with pytest.raises(InvalidValueError, match=r"lib\.so.*UserCustomOpLibPath"):
        run(UserCustomOpLibPath=str(tmp_path))
    with pytest.raises(InvalidValueError, match="has no library"):
        run(UserCustomOpLibPath=[tmp_path / "absent.so"])


def test_operators_of_a_library_run_and_what_follows_is_quantized(tmp_path):
    """The library is our own, with another domain of the same length."""
    from quark.formats.native import library_file

    library = library_file()
    if library is None:
        pytest.skip("no compiled library")
    content = library.read_bytes()
    assert content.count(b"com.amd.quark\0") == 1
    for domain in (b"com.amd.quark\0", b"com.amd.quark.cpu\0"):
        content = content.replace(domain, domain.replace(b"amd.quark", b"my.domain"))
    Path(tmp_path / "mine.so").write_bytes(content)
    model = network()
    node = onnx.helper.make_node("BFPQuantizeDequantize", ["conv"], ["mine"], "mine", domain="com.my.domain", axis=1)
    model.graph.node.insert(1, node)
    model.graph.node[2].input[0] = "mine"
    model.opset_import.append(onnx.helper.make_opsetid("com.my.domain", 1))
    layer = QLayerConfig(UInt8Spec(), weight=Int8Spec())
    quantized = quantize(model, DATA, QConfig(layer, UserCustomOpLibPath=tmp_path / "mine.so"))
    assert {tensor.tensor for tensor in quantized.plan} >= {"conv", "turned"}
    assert [node.op_type for node in quantized.report.plan.skipped] == ["BFPQuantizeDequantize"]


def test_crypto_mode_keeps_everything_in_memory(tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setattr("quark.onnx.data.samples.MEMORY_BYTES", 0)
    monkeypatch.setattr("quark.onnx.session._FILE_FROM_BYTES", 0)
    monkeypatch.setattr(tempfile, "TemporaryFile", None)
    monkeypatch.setattr("quark.files.output.tempfile.gettempdir", None)
    config = QConfig(QLayerConfig(XInt8Spec(), weight=XInt8Spec()), CryptoMode=True, EncryptionAlgorithm="AES-256")
    made = ModelQuantizer(config).quantize_model(network(), tmp_path / "out.onnx", DATA)
    assert made is not None
    assert scales(made) == scales(run_without_patches(monkeypatch))
    assert not list(tmp_path.iterdir())
    assert not caplog.text
    assert capfd.readouterr() == ("", "")


def run_without_patches(monkeypatch):
    monkeypatch.undo()
    return run(activation=XInt8Spec(), weight=XInt8Spec())


def test_crypto_mode_refuses_files(tmp_path):
    onnx.save(network(), tmp_path / "m.onnx")
    layer = QLayerConfig(UInt8Spec(), weight=Int8Spec())
    with pytest.raises(InvalidValueError, match="give the model itself"):
        ModelQuantizer(QConfig(layer, CryptoMode=True)).quantize_model(tmp_path / "m.onnx", None, DATA)
    with pytest.raises(InvalidValueError, match="crypto_mode and SaveAndRestore"):
        ModelQuantizer(QConfig(layer, CryptoMode=True, SaveAndRestore="a.json"))


def test_finetuned_layers_are_kept_beside_the_file_of_ranges():
    config = get_default_config("XINT8_ADAROUND")
    config.extra_options["SaveAndRestore"] = "work/state.json"
    assert settings_of(config).refine.finetune.folder == Path("work/state_layers")
    config.extra_options["FastFinetune"] = {**config.extra_options["FastFinetune"], "CacheDir": "mine"}
    assert settings_of(config).refine.finetune.folder == Path("mine")


@pytest.mark.parametrize(
    "options",
    [
        {"SaveAndRestore": "hostile.json"},
        {"SaveTensorHistFig": True},
        {"UserCustomOpLibPath": "hostile.so"},
        {"ShapeShifterYaml": "hostile.yaml"},
        {"PreprocessedModelPath": "hostile.onnx"},
        {"EvalMetrics": True, "EvalDataReader": "hostile"},
        {"Distillation": True, "DistillationFolder": "hostile"},
    ],
)
def test_a_card_names_no_file_to_read_write_or_run(options):
    card = Card.from_dict(quantize(network(), DATA, "A8W8").report.card)
    config = {**card.config, "extra_options": {**card.config["extra_options"], **options}}
    found = settings_from(replace(card, config=config))
    assert found.load.custom_libraries == ()
    assert found.save.preprocessed is None
    options = found.calibrate
    assert (options.ranges_file, options.histogram_folder, options.evaluation_data) == (None, None, None)
    assert all(getattr(feature, "folder", "") == "" for feature in found.features.values())
