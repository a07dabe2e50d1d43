"""Presets as constants, under the names that scripts for AMD Quark import."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import quark.onnx
from quark.demo import network_path
from quark.onnx import ModelQuantizer, QConfig, get_default_config
from quark.onnx.quantization.config import custom_config
from quark.onnx.quantization.config.data_type import BFP16, MX6, MXInt8
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_constant(name: str) -> None:
    assert getattr(custom_config, f"{name}_CONFIG") == get_default_config(name)
    assert getattr(custom_config, f"{name}_QCONFIG") == QConfig.get_default_config(name)
    assert {f"{name}_CONFIG", f"{name}_QCONFIG"} <= set(dir(custom_config))


def test_changing_one_changes_nobody_elses() -> None:
    mine = custom_config.XINT8_CONFIG
    mine.extra_options["WeightsOnly"] = True
    mine.enable_npu_cnn = False
    assert custom_config.XINT8_CONFIG == get_default_config("XINT8") != mine
    first, second = quark.onnx.XINT8_QCONFIG, quark.onnx.XINT8_QCONFIG
    assert first == second
    assert first is not second


def test_a_constant_quantizes_as_its_preset_does(tmp_path) -> None:
    samples = [{"input": each} for each in np.random.default_rng(0).random((4, 1, 1, 8, 8), np.float32)]
    files = []
    for number, config in enumerate((quark.onnx.A8W8_QCONFIG, QConfig.get_default_config("A8W8"))):
        files.append(tmp_path / f"{number}.onnx")
        ModelQuantizer(config).quantize_model(network_path(), files[-1], iter(samples))
    assert files[0].read_bytes() == files[1].read_bytes()


def test_weights_only() -> None:
    settings = settings_of(custom_config.XINT8_WEIGHTSONLY_ADAROUND_CONFIG)
    assert settings.choose.is_weights_only
    assert settings.refine.finetune is not None


def test_parameters_are_those_of_the_types() -> None:
    for parameters, data_type in (
        (custom_config.DEFAULT_BFP_PARAMS, BFP16),
        (custom_config.DEFAULT_MICROEXPONENTS_PARAMS, MX6),
        (custom_config.DEFAULT_MICROSCALING_PARAMS, MXInt8),
    ):
        assert parameters.items() <= dict(data_type.attributes).items()
    assert custom_config.DEFAULT_BFP_PARAMS is not custom_config.DEFAULT_BFP_PARAMS
    assert custom_config.adaround_algo.name == "adaround"
    assert custom_config.adaquant_algo.num_iterations == 3000


@pytest.mark.parametrize("module", [custom_config, quark.onnx], ids=["custom_config", "quark.onnx"])
def test_a_preset_that_does_not_exist(module) -> None:
    with pytest.raises(AttributeError, match="INT3_QCONFIG"):
        _ = module.INT3_QCONFIG


PATHS = {
    "quark.onnx": "Int8 UInt32 BFP16 DataType AlgoConfig QuantizationMode CalibraterBase MinMaxCalibrater "
    "write_calibration_table _COP_DOMAIN _COP_VERSION GPTQConfig QuarotConfig create_calibrator_power_of_two "
    "create_calibrator_float_scale dump_model quantize_static quantize_dynamic auto_search",
    "quark.onnx.auto_search": "AutoSearch AutoSearchConfig AutoSearchPro SearchSpace",
    "quark.onnx.quantization.auto_search": "AutoSearch AutoSearchPro SearchSpace generate_all_configs "
    "get_auto_search_config",
    "quark.onnx.quantization.auto_search.auto_search_v1": "AutoSearch AutoSearchConfig SearchSpace l1_metric "
    "split_config_levels logger_config",
    "quark.onnx.quantization.auto_search.auto_search_pro": "AutoSearchPro validate_keys replace_keys",
    "quark.onnx.quantization.auto_search.config_generator": "generate_all_configs",
    "quark.onnx.quantization.auto_search.qconfig_mapping": "get_auto_search_config",
    "quark.onnx.quantization.quantize": "quantize_static quantize_dynamic",
    "quark.onnx.quantization.output_eval": "calculate_cos calculate_l1_distance calculate_l2_distance calculate_psnr",
    "quark.onnx.calibration.calibrators": "MinMaxCalibrater PercentileCalibrater PowOfTwoCalibrater",
    "quark.onnx.quantization": "QConfig Config QuantizationConfig ModelQuantizer AlgoConfig AdaRoundConfig CLEConfig",
    "quark.onnx.quantization.api": "ModelQuantizer",
    "quark.onnx.quantization.config.legacy": "QuantizationConfig",
    "quark.onnx.calibration": "PowerOfTwoMethod CachedDataReader RandomDataReader PathDataReader CalibrationMethod "
    "calibrate_model run_calibration fake_calibration get_data_reader",
    "quark.torch.export": "ExporterConfig JsonExporterConfig OnnxExporterConfig export_onnx",
    "quark.onnx.calibration.methods": "PowerOfTwoMethod LayerWiseMethod Int16Method ExtendedCalibrationMethod",
    "quark.onnx.calibration.data_readers": "CachedDataReader RandomDataReader PathDataReader get_data_reader",
    "quark.onnx.operators.custom_ops": "get_library_path _COP_DOMAIN _COP_VERSION _COP_MX_OP_NAME _COP_BFP_OP_NAME",
    "quark.common.utils.log": "ScreenLogger",
    "quark.torch.quantization.api": "ModelQuantizer",
    "quark.torch.export.api": "ModelExporter export_onnx export_safetensors",
}


@pytest.mark.parametrize(("module", "name"), [(m, name) for m, names in PATHS.items() for name in names.split()])
def test_names_are_where_scripts_look(module: str, name: str) -> None:
    found = getattr(importlib.import_module(module), name)
    elsewhere = getattr(quark.onnx, name, None)
    is_onnxruntimes = (module, name) == ("quark.onnx.calibration.calibrators", "MinMaxCalibrater")
    if elsewhere is not None and module.startswith("quark.onnx") and not is_onnxruntimes:
        assert found is elsewhere
