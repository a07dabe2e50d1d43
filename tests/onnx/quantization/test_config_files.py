"""Configs as YAML and JSON: without loss, from a preset, and with errors that name the culprit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from quark.errors import InvalidValueError, UnknownNameError, UnsupportedTypeError
from quark.onnx.quantization.config import Config, QConfig, QuantizationConfig, get_default_config
from quark.onnx.quantization.config.algorithm import AdaRoundConfig, CLEConfig
from quark.onnx.quantization.config.files import load_config
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.quant_types import (
    CalibrationMethod,
    ExtendedQuantType,
    PowerOfTwoMethod,
    QuantType,
)
from quark.onnx.quantization.config.spec import CalibMethod, Int8Spec, Int16Spec, MXInt8Spec, QLayerConfig, XInt8Spec

SUFFIXES = [".yaml", ".yml", ".json"]


def rich_config() -> QuantizationConfig:
    return QuantizationConfig(
        calibrate_method=PowerOfTwoMethod.NonOverflow,
        activation_type=ExtendedQuantType.QUInt16,
        nodes_to_exclude=["a", "b.*"],
        subgraphs_to_exclude=[(["a"], ["b", "c"])],
        extra_options={
            "RemoveQDQBetweenOps": [("Mul", "Add")],
            "FastFinetune": {"LRAdjust": (0.5, 0.1), "TargetOpType": ["Conv"]},
            "AutoMixprecision": {"ActTargetQuantType": QuantType.QInt8},
            "MixedPrecisionTensor": {ExtendedQuantType.QInt16: ["t"]},
            "TensorQuantOverrides": {"x": [{"quant_type": QuantType.QUInt8, "rmin": 0.0, "rmax": 1.5}]},
        },
    )


def rich_qconfig() -> QConfig:
    return QConfig(
        QLayerConfig(input_tensors=Int8Spec(calibration_method=CalibMethod.Entropy), weight=XInt8Spec()),
        {QLayerConfig(weight=Int16Spec()): ["conv_1"], QLayerConfig(weight=Int16Spec()): ["conv_2"], None: ["conv_3"]},
        {QLayerConfig(input_tensors=MXInt8Spec(), weight=MXInt8Spec()): ["Gemm"]},
        ["head.*", (["a"], ["b"])],
        [CLEConfig(cle_steps=3), AdaRoundConfig(learning_rate=0.2, lr_adjust=(0.1, 0.2))],
        True,
        CalibDataSize=10,
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_config_survives_a_file(suffix, tmp_path: Path):
    path = rich_config().save(tmp_path / f"c{suffix}")
    assert QuantizationConfig.load(path) == rich_config()
    assert Config.load(path) == Config(rich_config())
    assert load_config(path) == rich_config()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_qconfig_survives_a_file(suffix, tmp_path: Path):
    path = rich_qconfig().save(tmp_path / f"c{suffix}")
    loaded = QConfig.load(path)
    assert loaded == rich_qconfig()
    assert loaded.algo_config == rich_qconfig().algo_config
    assert loaded.exclude == rich_qconfig().exclude
    assert load_config(path) == loaded


def test_configs_that_differ_are_not_equal():
    assert rich_qconfig() != QConfig(QLayerConfig(activation=Int8Spec(), weight=Int8Spec()))
    assert QuantizationConfig() != rich_config()


def test_enums_are_written_by_name(tmp_path: Path):
    content = yaml.safe_load(get_default_config("XINT8").save(tmp_path / "c.yaml").read_text())
    assert content["calibrate_method"] == "PowerOfTwoMethod.MinMSE"
    assert content["weight_type"] == "QuantType.QInt8"


def test_a_file_may_start_from_a_preset(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "preset: MXFP8E4M3\nper_channel: false\n"
        "extra_options:\n  CalibDataSize: 9\n  MXAttributes: {scale_rule: floor}\n"
    )
    settings = settings_of(str(path))
    assert settings.name == "mine"
    assert settings.calibrate.sample_limit == 9
    assert settings.choose.default.weight.quantizer.scale_rule.value == "floor"
    assert settings.choose.default.weight.quantizer.format.element.name == "fp8_e4m3"
    assert get_default_config("MXFP8E4M3").extra_options["MXAttributes"]["scale_rule"] == "rceil"


def test_a_file_of_fields_has_defaults_for_the_others(tmp_path: Path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"calibrate_method": "CalibrationMethod.Percentile"}))
    assert load_config(path) == QuantizationConfig(calibrate_method=CalibrationMethod.Percentile)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("per_chanel: true", UnknownNameError, "no field of QuantizationConfig 'per_chanel'. Did you mean per_channel"),
        ("preset: XINT9", UnknownNameError, "no preset 'XINT9'. Did you mean XINT8"),
        ("weight_type: QuantType.QInt9", UnknownNameError, "no member of QuantType 'QInt9'"),
        ("extra_options: [1]", UnsupportedTypeError, "extra_options: expected a mapping"),
        ("- 1", UnsupportedTypeError, "expected a mapping of fields"),
        ("a: [", InvalidValueError, "is not valid"),
        ("a: !!python/object/apply:os.getcwd []", InvalidValueError, "is not read"),
        ("global_config: {wieght: {}}", UnknownNameError, "no place of a layer config 'wieght'. Did you mean weight"),
        ("global_config: {weight: {}}", InvalidValueError, "without 'data_type'"),
        ("global_config: {weight: {data_type: Int9}}", UnknownNameError, "no data type 'Int9'. Did you mean Int"),
        ("global_config: {}\nexclud: []", UnknownNameError, "no field of QConfig 'exclud'. Did you mean exclude"),
        ("global_config: {}\nalgo_config: [{name: adarond}]", UnknownNameError, "Did you mean adaround"),
        ("global_config: {}\nalgo_config: [{name: cle, cle_step: 1}]", UnknownNameError, "Did you mean cle_steps"),
    ],
)
def test_mistakes_in_files_are_named(text, error, message, tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(error) as caught:
        settings_of(str(path))
    assert message in str(caught.value)
    assert "c.yaml" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(InvalidValueError, match=r"none\.yaml"):
        settings_of(str(tmp_path / "none.yaml"))


def test_other_suffixes_are_refused(tmp_path: Path):
    with pytest.raises(InvalidValueError, match=r"ends in \.yaml, \.yml or \.json"):
        QuantizationConfig().save(tmp_path / "c.txt")


def test_a_function_cannot_be_written(tmp_path: Path):
    config = QuantizationConfig(extra_options={"AutoMixprecision": {"EvaluateFunction": print}})
    with pytest.raises(InvalidValueError, match="'EvaluateFunction' is a function"):
        config.save(tmp_path / "c.yaml")
    assert not list(tmp_path.iterdir())


def test_settings_keep_the_config_as_json_can_hold_it():
    with_function = QuantizationConfig(extra_options={"AutoMixprecision": {"EvaluateFunction": print}})
    for config in (
        get_default_config("XINT8"),
        QConfig(QLayerConfig(activation=Int8Spec(), weight=Int8Spec())),
        with_function,
    ):
        content = dict(settings_of(config).config)
        assert json.loads(json.dumps(content)) == content
