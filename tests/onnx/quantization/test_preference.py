"""QuantizationPreference sets the options of calibration and finetuning."""

from __future__ import annotations

import multiprocessing

import pytest

from quark.errors import InvalidValueError
from quark.onnx.quantization.config import QuantizationConfig
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.quant_types import CalibrationMethod, LayerWiseMethod, PowerOfTwoMethod
from quark.onnx.quantization.input_check import check_quantization_preference_arguments

WORKERS = min(multiprocessing.cpu_count(), 8)


def test_no_preference_changes_nothing():
    options: dict[str, str] = {}
    check_quantization_preference_arguments(CalibrationMethod.MinMax, True, options)
    assert options == {}


@pytest.mark.parametrize(
    ("preference", "method", "given", "expected"),
    [
        ("accuracy", PowerOfTwoMethod.MinMSE, {"MinMSEModePof2Scale": "MostCommon"}, {"MinMSEModePof2Scale": "All"}),
        ("accuracy", CalibrationMethod.Percentile, {}, {}),
        (
            "speed",
            PowerOfTwoMethod.MinMSE,
            {"NumBins": 0},
            {"NumBins": 2048, "CalibOptimizeMem": False, "CalibWorkerNum": WORKERS},
        ),
        (
            "speed",
            LayerWiseMethod.LayerWisePercentile,
            {"LWPUseHistogram": False, "CalibWorkerNum": 1},
            {"LWPUseHistogram": True, "CalibOptimizeMem": False, "CalibWorkerNum": 1},
        ),
        (
            "resource_efficiency",
            PowerOfTwoMethod.MinMSE,
            {"MinMSEModePof2Scale": "MostCommon", "CalibWorkerNum": 4},
            {"MinMSEModePof2Scale": "MostCommon", "CalibOptimizeMem": True, "CalibWorkerNum": 1},
        ),
    ],
)
def test_calibration(preference, method, given, expected):
    options = {"QuantizationPreference": preference, **given}
    check_quantization_preference_arguments(method, False, options)
    assert options == {"QuantizationPreference": preference, **expected}


@pytest.mark.parametrize(
    ("preference", "given", "expected"),
    [
        ("accuracy", {"EarlyStop": True}, {"EarlyStop": False, "UpdateBias": True, "OutputQDQ": True}),
        ("speed", {}, {"EarlyStop": True, "MemOptLevel": 0, "NumWorkers": WORKERS}),
        ("speed", {"NumWorkers": 4}, {"EarlyStop": True, "MemOptLevel": 0, "NumWorkers": 4}),
        ("resource_efficiency", {"NumWorkers": 4}, {"MemOptLevel": 2, "NumWorkers": 1}),
    ],
)
def test_finetuning(preference, given, expected):
    options = {"QuantizationPreference": preference, "FastFinetune": given}
    check_quantization_preference_arguments(CalibrationMethod.MinMax, True, options)
    assert options["FastFinetune"] == expected


def test_an_unknown_preference_is_an_error():
    with pytest.raises(InvalidValueError, match="accuracy, speed, resource_efficiency"):
        check_quantization_preference_arguments(CalibrationMethod.MinMax, False, {"QuantizationPreference": "turbo"})


def test_it_reaches_the_steps_and_says_so():
    options = {"QuantizationPreference": "accuracy", "FastFinetune": {"UpdateBias": False, "EarlyStop": True}}
    found = settings_of(QuantizationConfig(include_fast_ft=True, extra_options=options))
    assert found.refine.finetune.fit.has_bias
    assert found.refine.finetune.fit.has_output_rounding
    assert not found.refine.finetune.fit.has_early_stop
    (remark,) = (remark for remark in found.remarks if remark.startswith("QuantizationPreference"))
    assert "FastFinetune.UpdateBias = True" in remark
    assert options["FastFinetune"] == {"UpdateBias": False, "EarlyStop": True}  # the user's own stays
