"""Calibrators find the ranges that a quantization finds, and return them as ONNX Runtime's own do."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnxruntime.quantization.calibrate import CalibraterBase, TensorsData

from quark.errors import InvalidValueError, ModelError, UnknownNameError, UnsupportedOptionError
from quark.onnx import CalibrationMethod, ExtendedQuantType, LayerWiseMethod, PowerOfTwoMethod, QuantType
from quark.onnx import create_calibrator_float_scale as float_scale
from quark.onnx import create_calibrator_power_of_two as power_of_two
from quark.onnx.calibration import (
    calibrate_model,
    fake_calibration,
    get_data_reader,
    nearest_non_passthrough_ancestor_mapping,
    run_calibration,
    save_tensor_hist_fig,
    update_tensors_range_with_dependencies,
)
from quark.onnx.calibration.calibrators import EntropyCalibrater, MinMaxCalibrater, PowOfTwoCalibrater

X = [
    np.linspace(-3, 5, 400, dtype=np.float32).reshape(1, 400),
    np.linspace(-1, 9, 400, dtype=np.float32).reshape(1, 400),
]


class Reader:
    """X, sample by sample."""

    def __init__(self, samples=X):
        self._left = list(samples)

    def get_next(self):
        return {"x": self._left.pop(0)} if self._left else None


@pytest.fixture(scope="module")
def model():
    """x -> Relu -> Reshape -> Neg"""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        helper.make_node("Reshape", ["r", "shape"], ["s"], name="reshape"),
        helper.make_node("Neg", ["s"], ["n"], name="neg"),
    ]
    ends = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, d) for n, d in (("x", [1, 400]), ("n", [20, 20]))]
    shape = onnx.numpy_helper.from_array(np.array([20, 20]), "shape")
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [shape])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def ranges(data):
    assert isinstance(data, TensorsData)
    return {name: tuple(float(each.item()) for each in value.range_value) for name, value in data.items()}


def found(calibrator, samples=X):
    calibrator.collect_data(Reader(samples))
    return ranges(calibrator.compute_data())


def test_minmax_of_the_chosen_tensors(model, tmp_path):
    onnx.save(model, tmp_path / "model.onnx")
    calibrator = float_scale(tmp_path / "model.onnx", ["Relu", "Neg"])
    assert isinstance(calibrator, CalibraterBase)
    assert found(calibrator) == {"x": (-3, 9), "r": (0, 9), "s": (0, 9), "n": (-9, 0)}
    assert {each.name for each in calibrator.get_augment_model().graph.output} == {"x", "r", "s", "n"}
    assert not (tmp_path / "augmented_model.onnx").exists()
    assert found(float_scale(model, ["Relu"], extra_options={"symmetric": True})) == {"x": (-9, 9), "r": (-9, 9)}
    names = [output.name for output in calibrator.infer_session.get_outputs()]
    assert {"n", "r", "s"} <= set(names)


def test_arrays_are_as_onnxruntime_makes_them(model):
    data = calibrate_model(model, Reader(), ["Relu"])
    assert data.calibration_method is CalibrationMethod.MinMax
    assert data["x"].range_value[0].shape == (1,)
    assert data["x"].range_value[0].dtype == np.float32
    layerwise = calibrate_model(model, Reader(), ["Relu"], calibrate_method=LayerWiseMethod.LayerWisePercentile)
    assert layerwise.calibration_method is LayerWiseMethod.LayerWisePercentile
    assert layerwise["x"].range_value[0].shape == ()


def test_data_is_added_up_and_forgotten(model):
    calibrator = float_scale(model, ["Relu"])
    assert found(calibrator, X[:1])["x"] == (-3, 5)
    assert found(calibrator, X[1:])["x"] == (-3, 9)
    calibrator.clear_collected_data()
    with pytest.raises(InvalidValueError, match="call collect_data first"):
        calibrator.compute_data()
    with pytest.raises(InvalidValueError, match="reader Reader: it has no samples"):
        calibrator.collect_data(Reader([]))


def test_methods_cut_off_what_they_should(model):
    wide = [*X, np.array([[1000.0] + [0.0] * 399], np.float32)]
    whole = found(float_scale(model, ["Relu"]), wide)["x"]
    assert whole == (-3, 1000)
    percentile = {"percentile": 99.0, "symmetric": False}
    low, high = found(
        float_scale(model, ["Relu"], calibrate_method=CalibrationMethod.Percentile, extra_options=percentile), wide
    )["x"]
    assert -3 < low < 0
    assert 5 < high < 9
    for method in (CalibrationMethod.Entropy, CalibrationMethod.Distribution):
        assert found(float_scale(model, ["Relu"], calibrate_method=method), wide)["x"][1] < 1000


def test_power_of_two(model):
    # 9 / 127 needs 2^-3; the extremes are what NonOverflow hands on, MinMSE what the codes cover
    assert found(power_of_two(model, ["Relu"]))["x"] == (-9, 9)
    least = power_of_two(model, ["Relu"], calibrate_method=PowerOfTwoMethod.MinMSE)
    assert isinstance(least, PowOfTwoCalibrater)
    assert found(least)["x"] in [(-127 / 8, 127 / 8), (-127 / 16, 127 / 16)]
    wide = power_of_two(
        model, ["Relu"], calibrate_method=PowerOfTwoMethod.MinMSE, quantized_tensor_type={"r": QuantType.QInt16}
    )
    reach = found(wide)["r"][1]
    assert reach == 32767 / 2**11


def test_run_calibration_reads_options_of_a_config(model):
    data = run_calibration(
        model, Reader(), ["Relu"], extra_options={"CalibDataSize": 1, "CalibTensorRangeSymmetric": True}
    )
    assert ranges(data)["x"] == (-5, 5)
    overrides = {"TensorQuantOverrides": {"r": [{"quant_type": QuantType.QInt16}]}}
    data = run_calibration(model, Reader(), ["Relu"], QuantType.QInt8, PowerOfTwoMethod.MinMSE, extra_options=overrides)
    assert ranges(data)["r"][1] == 32767 / 2**11


def test_pictures_of_histograms(model, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    save_tensor_hist_fig(model, Reader(), ["Relu"])
    assert len(list((tmp_path / "tensor_hist").glob("*.png"))) == 2
    run_calibration(model, Reader(), ["Relu"], extra_options={"SaveTensorHistFig": True})
    assert "no range was found from a histogram" in caplog.text


def test_ranges_without_calibration(model):
    assert ranges(fake_calibration(model)) == dict.fromkeys(("x", "r", "s", "n"), (0, 1))


def test_tensors_behind_operators_that_only_move(model):
    nearest, missing = nearest_non_passthrough_ancestor_mapping(model, ["Reshape", "Transpose"])
    assert (nearest, missing) == ({"s": "r"}, [])
    updated = update_tensors_range_with_dependencies(calibrate_model(model, Reader()), {"n": "x", "y": "unknown"})
    assert ranges(updated) == {"x": (-3, 9), "r": (0, 9), "s": (0, 9), "n": (-3, 9)}


def test_readers(model, tmp_path):
    reader = Reader()
    assert get_data_reader(model, reader) is reader
    np.save(tmp_path / "a.npy", X[0])
    assert get_data_reader(model, None, tmp_path).get_next()["x"].shape == (1, 400)
    with pytest.raises(InvalidValueError, match="UseRandomData"):
        get_data_reader(model)
    random = get_data_reader(
        model, extra_options={"UseRandomData": True, "RandomDataReaderInputDataRange": {"x": [3, 4]}}
    )
    sample = random.get_next()["x"]
    assert sample.min() >= 3
    assert sample.max() <= 4


def test_settings_that_make_no_difference_are_said(model, caplog):
    EntropyCalibrater(model, num_bins=7)
    assert "num_bins has no effect" in caplog.text


def test_bad_arguments(model, tmp_path):
    with pytest.raises(UnknownNameError, match="symetric"):
        float_scale(model, extra_options={"symetric": True})
    with pytest.raises(UnknownNameError, match="NonOverflow"):
        float_scale(model, calibrate_method=PowerOfTwoMethod.NonOverflow)
    with pytest.raises(UnknownNameError, match="MinMax"):
        power_of_two(model, calibrate_method=CalibrationMethod.MinMax)
    with pytest.raises(InvalidValueError, match="Percentile"):
        float_scale(model, calibrate_method=CalibrationMethod.Percentile, extra_options={"percentile": 300})
    with pytest.raises(InvalidValueError, match="method 'percentile': EntropyCalibrater calibrates by 'entropy'"):
        EntropyCalibrater(model, method="percentile")
    with pytest.raises(ModelError, match="nowhere.onnx"):
        MinMaxCalibrater(tmp_path / "nowhere.onnx")
    with pytest.raises(UnsupportedOptionError, match="expected an integer"):
        PowOfTwoCalibrater(model, activation_type=ExtendedQuantType.QBFloat16)
