"""AutoMixprecision, and AutoMixprecisionConfig: every setting is carried out, refused with a reason, or remarked on."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from mixed_networks import BF16, MX, S8, S16, images, mixed_config, mixed_network

from quark.decide.specs import AffineSpec, bits_of, words_of
from quark.errors import InvalidValueError, QuarkError, UnknownNameError, UnsupportedOptionError, UnsupportedTypeError
from quark.features.mixed_precision.options import LAYER_TYPES, Method
from quark.features.mixed_precision.plan import DEFAULT_SQNR_DB
from quark.measures import Measure
from quark.onnx import ExtendedQuantType, QuantFormat, QuantizationConfig, get_default_config, quantize
from quark.onnx.quantization.config import QConfig
from quark.onnx.quantization.config.algorithm import AutoMixprecisionConfig, BiasCorrectionConfig
from quark.onnx.quantization.config.data_type import MXFP4E2M1, MXFP8E4M3
from quark.onnx.quantization.config.mixed_precision_options import MIXED_PRECISION_KEYS
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.spec import (
    CalibMethod,
    Int8Spec,
    Int16Spec,
    MXFP4E2M1Spec,
    MXFP8E4M3Spec,
    QLayerConfig,
)

HIGH = QLayerConfig(activation=Int16Spec(), weight=Int8Spec())
LOW = QLayerConfig(activation=Int8Spec(), weight=Int8Spec())


def mix_of(**settings):
    return settings_of(mixed_config(**settings)).mix


CARRIED_OUT: list[tuple[dict[str, Any], str, Any]] = [
    ({"OutputIndex": 1}, "output_index", 1),
    ({"L2Target": 2}, "l2", 2),
    ({"SQNRTarget": 3}, "sqnr_db", 3),
    ({"BitsTarget": 9}, "weight_bits", 9),
    ({"BitOperationsTarget": 0.5}, "bit_operations", 0.5),
    ({"NumTarget": 4}, "layer_limit", 4),
    ({"NumTarget": 0}, "layer_limit", None),
    ({"TargetOpType": ["Gemm"]}, "op_types", frozenset({"Gemm"})),
    ({"IncludeLayers": ["a"]}, "included", ("a",)),
    ({"ExcludeLayers": ["b"]}, "excluded", ("b",)),
    ({"BitsTarget": 9, "Method": "integer"}, "method", Method.INTEGER),
    ({"PlanFile": "p.json"}, "plan_file", Path("p.json")),
    ({"PlanFile": "p.json", "UsePlan": True}, "is_plan_given", True),
    ({"SampleLimit": 5}, "sample_limit", 5),
    ({"Top1AccTarget": 0.1, "EvaluateFunction": max}, "accuracy_drop", 0.1),
    ({"Top1AccTarget": 0.1, "EvaluateFunction": max}, "evaluate", max),
    ({"Metric": "cosine", "MetricTarget": 0.1}, "measure", Measure.of("cosine")),
    ({"Metric": "cosine", "MetricTarget": 0.1}, "measure_drop", 0.1),
    ({"Metric": "cosine"}, "measure_drop", 0.01),
]
TYPES = {"ActTargetQuantType", "WeightTargetQuantType", "BiasTargetQuantType", "TargetQuantType"}
TYPES |= {"TargetMXAttributes", "TargetBFPAttributes", "TargetLayerConfig"}


@pytest.mark.parametrize(("settings", "field", "expected"), CARRIED_OUT)
def test_settings_are_carried_out(settings, field, expected):
    assert getattr(mix_of(**settings), field) == expected


def test_every_key_is_tested():
    assert {key for settings, _, _ in CARRIED_OUT for key in settings} | TYPES == MIXED_PRECISION_KEYS.keys()


def test_types_that_are_not_given_are_those_of_the_config():
    config = mixed_config((S16, S16))
    config.extra_options["AutoMixprecision"] = {"WeightTargetQuantType": S8, "NumTarget": 1}
    mix = settings_of(config).mix
    assert words_of(mix.low) == "int16 activations, int8 weights"
    config.extra_options["AutoMixprecision"] = {"TargetQuantType": S8, "NumTarget": 1}
    assert words_of(settings_of(config).mix.low) == "int8"


def test_the_bias_stays_as_it_is_unless_something_is_said():
    assert mix_of(NumTarget=1).low.bias == AffineSpec("int32")
    coarse = mixed_config((S16, S16), extra={"Int32Bias": False}, NumTarget=1)
    assert settings_of(coarse).mix.low.bias.format == "int16"
    coarse.extra_options["AutoMixprecision"]["BiasTargetQuantType"] = S8
    assert settings_of(coarse).mix.low.bias.format == "int8"


def test_members_of_one_family_have_attributes_of_their_own():
    attributes = {"TargetMXAttributes": dict(MXFP4E2M1.attributes)}
    config = mixed_config((MX, MX), (MX, MX), extra={"MXAttributes": dict(MXFP8E4M3.attributes)}, **attributes)
    settings = settings_of(config)
    assert words_of(settings.choose.default) == "mxfp8_e4m3"
    assert words_of(settings.mix.low) == "mxfp4_e2m1"
    assert bits_of(settings.mix.low) == (4.25, 4.25)


def test_without_a_target_there_is_one_that_is_said():
    settings = settings_of(mixed_config())
    assert settings.mix.sqnr_db == DEFAULT_SQNR_DB
    assert settings.remarks == ("AutoMixprecision names no target: SQNRTarget 25 (dB) was taken",)


@pytest.mark.parametrize("name", ["S16S16_MIXED_S8S8", "BF16_MIXED_BFP16", "BF16_MIXED_MXINT8"])
def test_presets_name_their_target(name):
    assert get_default_config(name).extra_options["AutoMixprecision"]["SQNRTarget"] == DEFAULT_SQNR_DB
    assert settings_of(name).remarks == ()
    assert settings_of(name).needs_data


def test_what_does_not_matter_is_remarked_on():
    used = settings_of(mixed_config(PlanFile="p", UsePlan=True, SQNRTarget=3, Method="greedy"))
    assert [each.split(":")[0] for each in used.remarks] == ["AutoMixprecision.SQNRTarget", "AutoMixprecision.Method"]
    assert "it is about budgets" in settings_of(mixed_config(Method="integer", NumTarget=1)).remarks[0]
    off = mixed_config(NumTarget=1)
    off.include_auto_mp = False
    assert settings_of(off).mix is None
    assert settings_of(off).remarks == (
        "AutoMixprecision: include_auto_mp is False, so that there is nothing for it to steer",
    )


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"Top1AccTarget": 0.1}, InvalidValueError, "Top1AccTarget without EvaluateFunction"),
        ({"EvaluateFunction": max}, InvalidValueError, "EvaluateFunction without Top1AccTarget"),
        ({"EvaluateFunction": 3}, UnsupportedTypeError, "expected a function"),
        ({"Top1AccTarget": -0.1, "EvaluateFunction": max}, InvalidValueError, "at least 0"),
        ({"SQNRTarget": math.nan}, InvalidValueError, "SQNRTarget"),
        ({"BitsTarget": 8, "BitOperationsTarget": 0.5}, InvalidValueError, "give one"),
        ({"BitOperationsTarget": 1.5}, InvalidValueError, "at most 1"),
        ({"BitsTarget": 8, "NumTarget": 2}, InvalidValueError, "leave NumTarget out"),
        ({"UsePlan": True}, InvalidValueError, "UsePlan without PlanFile"),
        ({"TargetOpType": ["Convv"]}, UnknownNameError, "Did you mean Conv"),
        ({"Method": "luck"}, InvalidValueError, "one of greedy, integer"),
        ({"OutputIdx": 1}, UnknownNameError, "OutputIndex"),
        ({"low": (S16, S8)}, InvalidValueError, "the target types are those of the config"),
        ({"high": (S8, S8), "low": (S16, S8)}, InvalidValueError, "activations of 16 bits as the target and 8"),
        ({"high": (S16, S8), "low": (BF16, S16)}, InvalidValueError, "weights of 16 bits"),
        ({"extra": {"NPULimitationCheck": True, "SimulateDPU": True}}, UnsupportedOptionError, "limits of an NPU"),
    ],
)
def test_mistakes_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        mix_of(**settings)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_format": QuantFormat.QOperator}, "QOperator"),
        ({"use_dynamic_quant": True}, "use_dynamic_quant"),
        ({"enable_npu_cnn": True}, "one type"),
    ],
)
def test_surroundings_with_one_type_only_are_refused(fields, message):
    config = mixed_config()
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedOptionError, match=message):
        settings_of(config)
    nbits = get_default_config("MATMUL_NBITS")
    nbits.include_auto_mp = True
    nbits.extra_options["AutoMixprecision"] = {"TargetQuantType": S8}
    with pytest.raises(UnsupportedOptionError, match="UseMatMulNBits"):
        settings_of(nbits)


def test_equal_bits_of_another_kind_are_fine():
    mix = mix_of(high=(S8, S8), low=(ExtendedQuantType.QUInt8, S8), NumTarget=1)
    assert words_of(mix.low) == "uint8 activations, int8 weights"


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_config_survives_its_file(suffix, tmp_path: Path):
    config = mixed_config(NumTarget=2, TargetOpType=["Conv"], PlanFile="p.json")
    assert settings_of(QuantizationConfig.load(config.save(tmp_path / f"c{suffix}"))).mix == settings_of(config).mix
    entry = QConfig(HIGH, algo_config=[AutoMixprecisionConfig(LOW, metric_threshold=0.5)])
    assert settings_of(QConfig.load(entry.save(tmp_path / f"q{suffix}"))).mix == settings_of(entry).mix


def mix_of_entry(**settings):
    return settings_of(QConfig(HIGH, algo_config=[AutoMixprecisionConfig(LOW, **settings)])).mix


ENTRY: list[Any] = [
    ({"target_op_type": ["Conv"]}, "op_types", frozenset({"Conv"})),
    ({"include_layers": ["a"]}, "included", ("a",)),
    ({"exclude_layers": ["a"]}, "excluded", ("a",)),
    ({"data_size": 7}, "sample_limit", 7),
    ({"metric_output_index": 2}, "output_index", 2),
    ({"metric_evaluate_fn": max, "metric_threshold": 0.2}, "evaluate", max),
    ({"metric_evaluate_fn": max, "metric_threshold": 0.2}, "accuracy_drop", 0.2),
    ({"metric_threshold": 0.5}, "l2", 0.5),
    ({"metric_threshold": 0}, "l2", math.inf),
    ({"metric_default": "sqnr", "metric_threshold": -30}, "sqnr_db", 30),
    ({"metric_default": "sqnr"}, "sqnr_db", -math.inf),
    ({"sensitivity_cache_file": "s.json"}, "plan_file", Path("s.json")),
]
HARMLESS = {"dual_quant_nodes", "shared_param_mode", "target_layer_config"}
REFUSED = [
    {"subgraph_json": "s.json"},
    {"metric_distance_fn": max},
    {"metric_default": "kl"},
    {"metric_threshold": None},
    {"metric_threshold": "much"},
    {"metric_optimize_object": "quality"},
    {"worker_num": 4},
    {"no_input_qdq_shared": True},
]


@pytest.mark.parametrize(("settings", "field", "expected"), ENTRY)
def test_settings_of_an_entry_are_carried_out(settings, field, expected):
    assert getattr(mix_of_entry(**settings), field) == expected


@pytest.mark.parametrize("settings", REFUSED, ids=lambda each: next(iter(each)))
def test_or_refused_by_name(settings):
    with pytest.raises(QuarkError, match=next(iter(settings))):
        mix_of_entry(**settings)


def test_every_setting_of_an_entry_is_one_of_these():
    known = {name for settings in (*(row[0] for row in ENTRY), *REFUSED) for name in settings}
    assert known | HARMLESS == {each.name for each in fields(AutoMixprecisionConfig)}


def test_an_entry_needs_lower_types():
    with pytest.raises(UnsupportedTypeError, match="expected a QLayerConfig with the lower types"):
        settings_of(QConfig(HIGH, algo_config=[AutoMixprecisionConfig()]))
    with pytest.raises(InvalidValueError, match="no more bits"):
        settings_of(QConfig(LOW, algo_config=[AutoMixprecisionConfig(HIGH)]))


def test_an_entry_mixes_a_model_and_leaves_layers_that_are_configured(tmp_path):
    fixed = {QLayerConfig(activation=Int16Spec(), weight=Int16Spec()): ["first"], None: ["third"]}
    minmax = {"calibration_method": CalibMethod.MinMax}
    high = QLayerConfig(activation=Int16Spec(**minmax), weight=Int8Spec())
    low = QLayerConfig(activation=Int8Spec(**minmax))
    entries = [BiasCorrectionConfig(), AutoMixprecisionConfig(low, metric_evaluate_fn=lambda y: 1.0)]
    pytest.importorskip("torch")
    result = quantize(mixed_network(), images(), QConfig(high, fixed, algo_config=entries))
    assert [each.layer for each in result.report.mixed.layers] == ["second", "sensitive", "head"]
    assert len(result.report.mixed.lowered) == 3
    result.save(tmp_path / "out.onnx")


def test_among_block_formats_by_entry():
    high, low = (QLayerConfig(activation=spec(), weight=spec()) for spec in (MXFP8E4M3Spec, MXFP4E2M1Spec))
    entry = AutoMixprecisionConfig(low, metric_default="sqnr", metric_threshold=-12, data_size=8)
    report = quantize(mixed_network(), images(), QConfig(high, algo_config=[entry])).report
    assert (report.mixed.high, report.mixed.low, report.mixed.samples) == ("mxfp8_e4m3", "mxfp4_e2m1", 8)


def test_all_layer_types_are_the_default():
    assert mix_of(NumTarget=1).op_types == frozenset(LAYER_TYPES)
