"""The presets: all names, fresh objects, files without loss, settings."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest

from quark.decide.options import Target
from quark.decide.specs import AffineSpec, BlockSpec, DynamicSpec, FloatSpec
from quark.errors import UnknownNameError
from quark.features.distillation.options import DistillationOptions
from quark.features.finetuning.options import Algorithm
from quark.onnx.insert.pairs import NBitsOptions
from quark.onnx.quantization.config import Config, QConfig, QuantizationConfig, get_default_config
from quark.onnx.quantization.config.custom_config import (
    DEFAULT_ADAQUANT_PARAMS,
    DEFAULT_ADAROUND_PARAMS,
    DefaultConfigMapping,
)
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.quant_types import CalibrationMethod, PowerOfTwoMethod
from quark.onnx.quantization.presets import DISTILLATION, FINETUNING_BATCH, FINETUNING_RATE, PRESETS
from quark.ranges import MinMax, Percentile, PowerOfTwoMinMSE

INTEGERS = ["XINT8", "S8S8_AAWS", "U8S8_AAWS", "S16S8_ASWS", "A8W8", "A16W8", "U16S8_AAWS"]
BLOCKS = ["BFP16", "MX4", "MX6", "MX9", "MXFP8E5M2", "MXFP8E4M3", "MXFP6E3M2", "MXFP6E2M3", "MXFP4E2M1", "MXINT8"]
BLOCKS += ["NVFP4"]
DISTILLED = ["XINT8", "A8W4", "MX4", "MX6", "MXFP6E3M2", "MXFP4E2M1", "NVFP4"]


def test_the_names_are_those_of_the_public_surface():
    plain = [*INTEGERS, *BLOCKS, "VINT8", "U8U8_AAWA", "UINT8_DYNAMIC_QUANT", "FP16", "BF16", "MATMUL_NBITS"]
    plain += [f"INT4_WEIGHT_ONLY{suffix}" for suffix in ("", "_GPTQ", "_AWQ")]
    floats, narrow = ["FP8E4M3", "FP8E5M2"], ["A8W4", "A16W4"]
    two_blocks = [f"{name}_MXFP4E2M1" for name in ("MXFP8E4M3", "MXFP6E2M3", "MXINT8")] + ["MXFP8E4M3_MXFP6E2M3"]
    plain += [*floats, *narrow, *two_blocks]
    pairs = ["BF16_BFP16", "BF16_MXINT8", "MX9_INT8"]
    mixed = ["S16S16_MIXED_S8S8", "BF16_MIXED_BFP16", "BF16_MIXED_MXINT8"]
    sized = [f"INT{b}_{k}_{v}" for b in (8, 16) for k in ("CNN", "TRANSFORMER") for v in ("DEFAULT", "ACCURATE")]
    adaround = [f"{name}_ADAROUND" for name in INTEGERS]
    adaquant = [f"{name}_ADAQUANT" for name in (*INTEGERS, "FP16", "BF16", *BLOCKS, *mixed[1:])]
    adaquant += [f"{name}_ADAQUANT" for name in (*floats, *narrow, *two_blocks)]
    distilled = [f"{name}_DISTILL" for name in DISTILLED]
    assert sorted(PRESETS) == sorted([*plain, *pairs, *mixed, *sized, *adaround, *adaquant, *distilled])
    assert len(PRESETS) == 93


@pytest.mark.parametrize("name", PRESETS)
def test_every_call_gives_a_fresh_object(name):
    first, second = get_default_config(name), get_default_config(name)
    assert first == second
    before = copy.deepcopy(second)
    first.nodes_to_exclude.append("x")
    first.extra_options["CalibDataSize"] = 7
    for value in first.extra_options.values():
        if isinstance(value, dict):
            value.clear()
    assert second == before
    assert get_default_config(name) == before


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_a_file(name, suffix, tmp_path: Path):
    config = get_default_config(name)
    assert QuantizationConfig.load(config.save(tmp_path / f"config{suffix}")) == config


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_becomes_settings(name):
    settings = settings_of(name)
    assert settings.name == name
    assert settings.remarks == ()
    assert settings_of(get_default_config(name)) == settings
    assert settings_of(QConfig.get_default_config(name)) == settings
    assert settings.config["extra_options"].keys() == get_default_config(name).extra_options.keys()


@pytest.mark.parametrize(
    "call", [get_default_config, QConfig.get_default_config, settings_of, DefaultConfigMapping.get]
)
def test_an_unknown_name_offers_the_nearest(call):
    if call == DefaultConfigMapping.get:
        call = DefaultConfigMapping.__getitem__
    with pytest.raises(UnknownNameError) as error:
        call("MXINT9")
    assert str(error.value) == "no preset 'MXINT9'. Did you mean MXINT8? 'quark presets' lists all 93."


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_in_one_line_what_it_is(name):
    assert PRESETS[name].description
    assert "\n" not in PRESETS[name].description


def test_the_mapping_holds_all_and_gives_fresh_objects():
    assert len(DefaultConfigMapping) == 93
    assert "XINT8" in DefaultConfigMapping
    assert DefaultConfigMapping["XINT8"] is not DefaultConfigMapping["XINT8"]


def test_quantizer_configs_wrap_the_preset():
    config = QConfig.get_default_config("XINT8")
    assert isinstance(config, Config)
    assert config.global_quant_config == get_default_config("XINT8")


def test_xint8_is_power_of_two_throughout():
    config = get_default_config("XINT8")
    assert config.calibrate_method is PowerOfTwoMethod.MinMSE
    choose = settings_of(config).choose
    assert choose.target is Target.NPU_CNN
    method = PowerOfTwoMinMSE()
    assert choose.default.activation == AffineSpec("uint8", method, True, is_power_of_two=True)
    assert choose.default.weight == AffineSpec("int8", method, True, is_power_of_two=True)
    assert choose.default.bias == AffineSpec("int8", method, True, is_power_of_two=True)


@pytest.mark.parametrize(
    ("name", "activation", "weight", "method"),
    [
        ("A8W8", ("int8", True), ("int8", True), MinMax(0.01)),
        ("A16W8", ("int16", True), ("int8", True), MinMax()),
        ("S8S8_AAWS", ("int8", False), ("int8", True), Percentile(99.9999)),
        ("U8S8_AAWS", ("uint8", False), ("int8", True), Percentile()),
        ("U8U8_AAWA", ("uint8", False), ("uint8", False), Percentile()),
        ("U16S8_AAWS", ("uint16", False), ("int8", True), Percentile()),
        ("S16S8_ASWS", ("int16", True), ("int8", True), Percentile()),
        ("INT8_CNN_DEFAULT", ("uint8", False), ("int8", True), MinMax(0.01)),
        ("INT16_CNN_DEFAULT", ("uint16", False), ("int16", True), MinMax()),
        ("INT8_TRANSFORMER_DEFAULT", ("uint8", False), ("int8", True), MinMax()),
        ("INT16_TRANSFORMER_DEFAULT", ("uint16", False), ("int16", True), MinMax(0.01)),
    ],
)
def test_integer_presets(name, activation, weight, method):
    spec = settings_of(name).choose.default
    assert spec.activation == AffineSpec(activation[0], method, activation[1])
    assert spec.weight == AffineSpec(weight[0], MinMax(), weight[1], is_per_channel=weight[1])
    assert spec.bias == AffineSpec("int32")


@pytest.mark.parametrize("name", BLOCKS)
def test_block_presets(name):
    spec = settings_of(name).choose.default
    assert isinstance(spec.activation, BlockSpec)
    assert isinstance(spec.weight, BlockSpec)
    assert spec.activation.quantizer.format == spec.weight.quantizer.format
    assert spec.activation.format.replace("_", "").upper() == name
    assert spec.activation.quantizer.rounding.value == "half_even"
    assert spec.activation.follows_reduction
    assert spec.bias is None


@pytest.mark.parametrize("name", ["MXFP8E5M2", "MXFP8E4M3", "MXFP6E3M2", "MXFP6E2M3", "MXFP4E2M1", "MXINT8"])
def test_the_scale_rule_is_written_in_the_preset(name):
    options = get_default_config(name).extra_options
    rule = options["MXAttributes"]["scale_rule"]
    spec = settings_of(name).choose.default
    assert spec.activation.quantizer.scale_rule.value == rule
    assert spec.weight.quantizer.scale_rule.value == options.get("WeightScaleRule", rule)


def test_presets_of_two_types():
    assert isinstance(settings_of("BF16_BFP16").choose.default.activation, FloatSpec)
    assert settings_of("BF16_BFP16").choose.default.weight.format == "bfp16"
    assert settings_of("BF16_MXINT8").choose.default.weight.format == "mxint8"
    assert settings_of("MX9_INT8").choose.default.activation.format == "mx9"
    assert settings_of("MX9_INT8").choose.default.weight == AffineSpec("int8")


def test_presets_that_need_no_data():
    dynamic = settings_of("UINT8_DYNAMIC_QUANT").choose.default
    assert dynamic.activation == DynamicSpec("uint8")
    assert isinstance(dynamic.weight, AffineSpec)
    assert dynamic.weight.is_per_channel
    nbits = settings_of("MATMUL_NBITS")
    assert nbits.insert.matmul_nbits == NBitsOptions(4, 128, True, 1, embedding_bits=4)
    assert nbits.choose.default.activation is None


def test_finetuning_parameters():
    assert (DEFAULT_ADAROUND_PARAMS["LearningRate"], DEFAULT_ADAROUND_PARAMS["BatchSize"]) == (0.1, 2)
    assert (DEFAULT_ADAQUANT_PARAMS["LearningRate"], DEFAULT_ADAQUANT_PARAMS["BatchSize"]) == (1e-5, 2)
    for parameters in (DEFAULT_ADAROUND_PARAMS, DEFAULT_ADAQUANT_PARAMS):
        settings_of(QuantizationConfig(include_fast_ft=True, extra_options={"FastFinetune": parameters}))
    accurate, base = get_default_config("INT8_CNN_ACCURATE"), get_default_config("INT8_CNN_DEFAULT")
    assert accurate.calibrate_method is base.calibrate_method
    assert base.extra_options.items() <= accurate.extra_options.items()
    accurate = get_default_config("INT16_CNN_ACCURATE")
    assert accurate.calibrate_method is CalibrationMethod.Percentile
    assert accurate.extra_options["Percentile"] == 99.9999


def finetuned() -> list[str]:
    return [name for name in PRESETS if get_default_config(name).include_fast_ft]


@pytest.mark.parametrize("name", finetuned())
def test_what_finetuning_does_is_written_in_the_preset(name):
    algorithm = Algorithm.ADAQUANT if name.endswith("_ADAQUANT") else Algorithm.ADAROUND
    parameters = get_default_config(name).extra_options["FastFinetune"]
    assert {**parameters} == {
        "DataSize": 1000,
        "FixedSeed": 1705472343,
        "BatchSize": FINETUNING_BATCH,
        "NumIterations": 1000,
        "LearningRate": FINETUNING_RATE,
        "OptimAlgorithm": algorithm.value,
        "OptimDevice": "cpu",
        "InferDevice": "cpu",
        "EarlyStop": True,
    }
    options = settings_of(name).refine.finetune
    assert options.fit.algorithm is algorithm
    assert options.fit.has_early_stop
    assert options.fit.learning_rate == (None if FINETUNING_RATE == "auto" else FINETUNING_RATE)
    assert options.data_size == 1000


def test_the_presets_that_finetune():
    assert finetuned() == [name for name in PRESETS if name.endswith(("_ACCURATE", "_ADAROUND", "_ADAQUANT"))]


@pytest.mark.parametrize("name", DISTILLED)
def test_a_distilled_preset_is_its_base_with_distillation(name):
    base, distilled = settings_of(name), settings_of(f"{name}_DISTILL")
    own = DISTILLATION[name]
    options = DistillationOptions(
        steps=own["Steps"],
        rate_share=own["Rate"],
        feature_weight=own.get("Features", DistillationOptions.feature_weight),
        unrounded_share=own.get("Unrounded", DistillationOptions.unrounded_share),
    )
    assert distilled.features == {**base.features, "distillation": options}
    assert replace(distilled, features=base.features, name=base.name, config=base.config) == base


def test_the_recipe_of_xint8_can_be_read_and_changed():
    config = get_default_config("XINT8")
    assert config.include_cle
    assert {"CLESteps", "CLEClip", "ReplaceClip6Relu", "BiasCorrection"} <= set(config.extra_options)
    assert settings_of(config).equalize.cross_layer is not None
    assert settings_of(config).refine.bias_correction is not None
    config.include_cle = config.extra_options["BiasCorrection"] = False
    assert settings_of(config).equalize.cross_layer is None
    assert settings_of(config).refine.bias_correction is None


def test_vint8_keeps_to_the_limits_of_npus():
    assert settings_of("VINT8").choose.positions is not None


@pytest.mark.parametrize("name", ["MXINT8", "MX9", "BF16", "MATMUL_NBITS", "INT4_WEIGHT_ONLY", "UINT8_DYNAMIC_QUANT"])
def test_formats_that_need_no_data_use_none(name):
    assert settings_of(name).sample_use == 0


@pytest.mark.parametrize("name", ["MXFP8E4M3", "MX6"])
def test_block_formats_need_no_data_and_use_a_little(name):
    assert not settings_of(name).needs_data
    assert settings_of(name).sample_use == 32


def test_finetuning_needs_data_and_uses_as_much_as_is_said():
    assert settings_of("MXINT8_ADAQUANT").needs_data
    assert settings_of("MXINT8_ADAQUANT").sample_use == 1000
    assert settings_of("A8W8_ADAQUANT").sample_use is None  # calibration looks at all
    config = get_default_config("MXFP8E4M3_ADAQUANT")
    config.extra_options["FastFinetune"]["DataSize"] = 4
    assert settings_of(config).sample_use == 16  # those of bias correction
    del config.extra_options["FastFinetune"]["DataSize"]
    assert settings_of(config).sample_use is None
