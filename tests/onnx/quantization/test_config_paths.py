"""The import paths that existing scripts use, and what the enums are."""

from __future__ import annotations

import importlib
import subprocess
import sys

import onnxruntime.quantization
import pytest

ENUMS = [
    "CalibrationMethod",
    "PowerOfTwoMethod",
    "LayerWiseMethod",
    "Int16Method",
    "ExtendedCalibrationMethod",
    "QuantType",
    "QuantFormat",
    "CalibrationDataReader",
    "ExtendedQuantType",
    "VitisQuantType",
    "ExtendedQuantFormat",
    "VitisQuantFormat",
]
SPECS = [
    "Int8Spec",
    "UInt8Spec",
    "XInt8Spec",
    "Int16Spec",
    "UInt16Spec",
    "Int32Spec",
    "UInt32Spec",
    "Float16Spec",
    "BFloat16Spec",
    "BFP16Spec",
    "MX4Spec",
    "MX6Spec",
    "MX9Spec",
    "MXFP8E5M2Spec",
    "MXFP8E4M3Spec",
    "MXFP6E3M2Spec",
    "MXFP6E2M3Spec",
    "MXFP4E2M1Spec",
    "MXInt8Spec",
    "CalibMethod",
    "ScaleType",
    "QuantGranularity",
    "QLayerConfig",
    "QTensorConfig",
]
DATA_TYPES = [
    "Int8",
    "UInt8",
    "Int16",
    "UInt16",
    "Int32",
    "UInt32",
    "Float16",
    "BFloat16",
    "BFP16",
    "MX4",
    "MX6",
    "MX9",
    "MXFP8E5M2",
    "MXFP8E4M3",
    "MXFP6E3M2",
    "MXFP6E2M3",
    "MXFP4E2M1",
    "MXInt8",
]
ALGORITHMS = [
    "CLEConfig",
    "SmoothQuantConfig",
    "BiasCorrectionConfig",
    "AdaRoundConfig",
    "AdaQuantConfig",
    "AutoMixprecisionConfig",
]

PATHS = {
    "quark.onnx.quant_utils": ENUMS,
    "quark.onnx.quantization.quant_utils": ENUMS,
    "quark.onnx.quantization.config.quant_types": ENUMS,
    "quark.onnx.quantization.config": ["Config", "QuantizationConfig", "QConfig", "get_default_config"],
    "quark.onnx.quantization.config.config": ["Config", "QuantizationConfig", "QConfig"],
    "quark.onnx.quantization.config.spec": SPECS,
    "quark.onnx.quantization.config.data_type": DATA_TYPES,
    "quark.onnx.quantization.config.algorithm": ALGORITHMS,
    "quark.onnx.quantization.config.custom_config": [
        "get_default_config",
        "DEFAULT_ADAROUND_PARAMS",
        "DEFAULT_ADAQUANT_PARAMS",
    ],
    "quark.onnx.quantization.config.options": ["settings_of"],
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in PATHS.items() for name in names])
def test_names_are_where_scripts_look_for_them(path, name):
    assert getattr(importlib.import_module(path), name) is not None


@pytest.mark.parametrize("path", ["quark.onnx.quant_utils", "quark.onnx.quantization.quant_utils"])
@pytest.mark.parametrize("name", ["CalibrationMethod", "QuantType", "QuantFormat", "CalibrationDataReader"])
def test_the_runtimes_own_classes_are_handed_on(path, name):
    assert getattr(importlib.import_module(path), name) is getattr(onnxruntime.quantization, name)


@pytest.mark.parametrize("name", ENUMS)
def test_an_enum_is_one_class_at_every_path(name):
    classes = {id(getattr(importlib.import_module(path), name)) for path, names in PATHS.items() if name in names}
    assert len(classes) == 1


def test_members():
    from quark.onnx.quant_utils import ExtendedQuantType, PowerOfTwoMethod, VitisQuantFormat, VitisQuantType

    types = ["QInt8", "QUInt8", "QInt16", "QUInt16", "QInt32", "QUInt32", "QFloat16", "QBFloat16", "QBFP", "QMX"]
    assert list(VitisQuantType.__members__) == types
    assert list(ExtendedQuantType.__members__) == [*types, "QFloat8E4M3FN", "QFloat8E5M2", "QNVFP4"]
    assert list(VitisQuantFormat.__members__) == ["QDQ", "FixNeuron", "BFPFixNeuron", "MXFixNeuron"]
    assert list(PowerOfTwoMethod.__members__) == ["NonOverflow", "MinMSE"]
    assert str(ExtendedQuantType.QMX) == "QMX"
    assert ExtendedQuantType.from_string("QMX") is ExtendedQuantType.QMX


def test_importing_configs_pulls_no_framework():
    script = "import sys, quark.onnx.quantization.config; print([m for m in ('torch', 'sympy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
