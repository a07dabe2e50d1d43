"""AutoMixprecision, and AutoMixprecisionConfig: every setting is carried out, refused with a reason, or remarked on."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from mixed_networks import BF16, MX, S8, S16, images, mixed_config, mixed_network

from quark.decide.specs import AffineSpec, bits_of, words_of
from quark.errors import InvalidValueError, QuarkError, UnknownNameError, UnsupportedOptionError, UnsupportedTypeError
from quark.features.mixed_precision.options import LAYER_TYPES, Method, Score, ScoreKind
from quark.features.mixed_precision.plan import DEFAULT_SQNR_DB
from quark.measures import Measure
from quark.onnx import ExtendedQuantType, QuantFormat, QuantizationConfig, get_default_config, quantize
from quark.onnx.quantization.config import QConfig
from quark.onnx.quantization.config.algorithm import AlgoConfig, AutoMixprecisionConfig, BiasCorrectionConfig
from quark.onnx.quantization.config.data_type import MXFP4E2M1, MXFP8E4M3, Int8
from quark.onnx.quantization.config.mixed_precision_options import MIXED_PRECISION_KEYS
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.spec import (
    CalibMethod,
    Int8Spec,
    Int16Spec,
    MXFP4E2M1Spec,
    MXFP8E4M3Spec,
    QLayerConfig,
    UInt8Spec,
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
    ({"MetricThreshold": 0.5}, "score", Score(ScoreKind.L2, None, 0.5)),
    ({"MetricThreshold": 0}, "score", Score(ScoreKind.L2)),
    ({"MetricThreshold": None}, "is_analysis_only", True),
    ({"MetricDefault": "psnr", "MetricThreshold": -20}, "score", Score(ScoreKind.PSNR, None, -20)),
    ({"MetricDistanceFn": max, "MetricDefault": "kl"}, "score", Score(ScoreKind.DISTANCE, max)),
    ({"MetricEvaluateFn": max, "MetricThreshold": 0.1}, "score", Score(ScoreKind.EVALUATION, max, 0.1)),
    ({"MetricOutputIndex": 1}, "output_index", 1),
    ({"MetricOptimizeObject": "speed"}, "is_upward", False),
    ({"MetricOptimizeObject": "quality"}, "is_upward", True),
    ({"DataSize": 3}, "sample_limit", 3),
    ({"DataSize": 0}, "sample_limit", None),
    ({"TargetTensors": ["a"]}, "tensors", ("a",)),
    ({"TargetIndices": [2, 0]}, "indices", (2, 0)),
    ({"ExcludeIndices": [1]}, "excluded_indices", (1,)),
    ({"SubgraphJson": "s.json"}, "subgraphs", Path("s.json")),
    ({"SensitivityCacheFile": "s.json"}, "cache_file", Path("s.json")),
    ({"NoInputQDQShared": True}, "skips_shared_inputs", True),
    ({"DualQuantNodes": True}, "has_dual_pairs", True),
]
NEEDLESS = {"WorkerNum": 4, "SharedParamMode": "propagate", "AutoMixUseFastFT": True}  # cannot change a result here
TYPES = {"ActTargetQuantType", "WeightTargetQuantType", "BiasTargetQuantType", "TargetQuantType"}
TYPES |= {"TargetMXAttributes", "TargetBFPAttributes", "TargetNVFP4Attributes", "TargetLayerConfig"}


@pytest.mark.parametrize(("settings", "field", "expected"), CARRIED_OUT)
def test_settings_are_carried_out(settings, field, expected):
    assert getattr(mix_of(**settings), field) == expected


def test_every_key_is_tested():
    known = {key for settings, _, _ in CARRIED_OUT for key in settings}
    assert known | TYPES | NEEDLESS.keys() == MIXED_PRECISION_KEYS.keys()


@pytest.mark.parametrize("key", NEEDLESS)
def test_settings_that_cannot_matter_are_remarked_on(key):
    settings = settings_of(mixed_config(NumTarget=1, **{key: NEEDLESS[key]}))
    assert settings.mix == mix_of(NumTarget=1)
    assert [remark.partition(":")[0] for remark in settings.remarks] == [f"AutoMixprecision.{key}"]


def test_types_to_choose_from_and_types_by_layer():
    narrow = QLayerConfig(activation=Int8Spec(), weight=UInt8Spec())
    config = mixed_config()
    config.extra_options["AutoMixprecision"] = {"TargetLayerConfig": [LOW, narrow]}
    mix = settings_of(config).mix
    assert [words_of(target) for target in mix.targets] == ["int8", "int8 activations, uint8 weights"]
    assert mix.score == Score()  # no limit: all of them are mixed
    config.extra_options["AutoMixprecision"] = {"TargetLayerConfig": {LOW: ["a", "b"], narrow: []}}
    mix = settings_of(config).mix
    assert [words_of(target) for target in mix.targets] == ["int8 activations, uint8 weights"]
    assert [(name, words_of(spec)) for name, spec in mix.by_layer] == [("a", "int8"), ("b", "int8")]


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
    assert [remark.split(":")[0] for remark in used.remarks] == [
        "AutoMixprecision.SQNRTarget",
        "AutoMixprecision.Method",
    ]
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
    ({"metric_evaluate_fn": max, "metric_threshold": 0.2}, "score", Score(ScoreKind.EVALUATION, max, 0.2)),
    ({"metric_distance_fn": max}, "score", Score(ScoreKind.DISTANCE, max)),
    ({"metric_threshold": 0.5}, "score", Score(ScoreKind.L2, None, 0.5)),
    ({"metric_threshold": 0}, "score", Score(ScoreKind.L2)),
    ({"metric_threshold": None}, "is_analysis_only", True),
    ({"metric_default": "sqnr", "metric_threshold": -30}, "score", Score(ScoreKind.SQNR, None, -30)),
    ({"metric_optimize_object": "quality"}, "is_upward", True),
    ({"sensitivity_cache_file": "s.json"}, "cache_file", Path("s.json")),
    ({"subgraph_json": Path("s.json")}, "subgraphs", Path("s.json")),
    ({"dual_quant_nodes": True}, "has_dual_pairs", True),
    ({"no_input_qdq_shared": True}, "skips_shared_inputs", True),
    ({"worker_num": 4, "shared_param_mode": "unshare"}, "sample_limit", None),
    # as releases before 0.13 have them
    ({"output_index": 1}, "output_index", 1),
    ({"l2_target": 3}, "l2", 3),
    ({"top1_acc_target": 0.1, "evaluate_function": max}, "evaluate", max),
    ({"num_target": 2}, "layer_limit", 2),
    ({"target_tensors": ["t"]}, "tensors", ("t",)),
    ({"target_indices": [1]}, "indices", (1,)),
    ({"exclude_indices": [1]}, "excluded_indices", (1,)),
]
TYPES_OF_ENTRY = {"target_layer_config", "target_quant_type", "act_target_quant_type", "weight_target_quant_type"}
TYPES_OF_ENTRY |= {"bias_target_quant_type"}
WRONG: list[Any] = [
    ({"metric_default": "luck"}, "MetricDefault"),
    ({"metric_threshold": "much"}, "MetricThreshold"),
    ({"metric_optimize_object": "luck"}, "metric_optimize_object"),
    ({"shared_param_mode": "luck"}, "shared_param_mode"),
    ({"metric_distance_fn": max, "metric_evaluate_fn": max}, "give one"),
    ({"target_indices": [-1]}, "TargetIndices"),
]


@pytest.mark.parametrize(("settings", "field", "expected"), ENTRY)
def test_settings_of_an_entry_are_carried_out(settings, field, expected):
    assert getattr(mix_of_entry(**settings), field) == expected


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_mistakes_of_an_entry_are_named(settings, message):
    with pytest.raises(QuarkError, match=message):
        mix_of_entry(**settings)


def test_every_setting_of_an_entry_is_one_of_these():
    known = {name for settings, *_ in ENTRY for name in settings}
    assert known | TYPES_OF_ENTRY == {field.name for field in fields(AutoMixprecisionConfig)}


def test_an_entry_that_names_types():
    entry = AutoMixprecisionConfig(act_target_quant_type=Int8, weight_target_quant_type=Int8)
    mix = settings_of(QConfig(HIGH, algo_config=[entry])).mix
    assert words_of(mix.low) == "int8"
    assert (mix.l2, mix.score) == (0.5, None)
    assert AlgoConfig.from_dict(entry.to_dict()) == entry


def test_the_order_of_arguments_is_that_of_the_documents():
    given = ["Conv"], "s.json", ["a"], ["b"], 5, 1, max, None, "kl", 0.5, "quality", "c.json", 2, True, True, "unshare"
    entry = AutoMixprecisionConfig(LOW, *given)
    names = [field.name for field in fields(entry)][: len(given) + 1]
    assert tuple(getattr(entry, name) for name in names) == (LOW, *given)
    assert names[-1] == "shared_param_mode"


@pytest.mark.parametrize("target", [[LOW, HIGH], {LOW: ["a"], HIGH: []}], ids=["list", "dict"])
def test_several_configs_survive_a_file(target):
    entry: Any = AlgoConfig.from_dict(json.loads(json.dumps(AutoMixprecisionConfig(target).to_dict())))
    again = entry.target_layer_config
    if isinstance(target, list):
        assert again == target
    else:
        assert list(again.items()) == list(target.items())


def test_an_entry_needs_lower_types():
    with pytest.raises(UnsupportedTypeError, match="expected a QLayerConfig with the lower types"):
        settings_of(QConfig(HIGH, algo_config=[AutoMixprecisionConfig()]))
    higher = settings_of(QConfig(LOW, algo_config=[AutoMixprecisionConfig(HIGH)])).mix
    assert words_of(higher.low) == "int16 activations, int8 weights"


def test_an_entry_mixes_a_model_and_leaves_layers_that_are_configured(tmp_path):
    fixed = {QLayerConfig(activation=Int16Spec(), weight=Int16Spec()): ["first"], None: ["third"]}
    minmax = {"calibration_method": CalibMethod.MinMax}
    high = QLayerConfig(activation=Int16Spec(**minmax), weight=Int8Spec())
    low = QLayerConfig(activation=Int8Spec(**minmax))
    entries = [BiasCorrectionConfig(), AutoMixprecisionConfig(low, metric_evaluate_fn=lambda y: 1.0)]
    result = quantize(mixed_network(), images(), QConfig(high, fixed, algo_config=entries))
    assert [layer.layer for layer in result.report.mixed.layers] == ["second", "sensitive", "head"]
    assert len(result.report.mixed.lowered) == 3
    result.save(tmp_path / "out.onnx")


def test_among_block_formats_by_entry():
    high, low = (QLayerConfig(activation=spec(), weight=spec()) for spec in (MXFP8E4M3Spec, MXFP4E2M1Spec))
    entry = AutoMixprecisionConfig(low, metric_default="sqnr", metric_threshold=-12, data_size=8)
    report = quantize(mixed_network(), images(), QConfig(high, algo_config=[entry])).report
    assert (report.mixed.high, report.mixed.low, report.mixed.samples) == ("mxfp8_e4m3", "mxfp4_e2m1", 8)


def test_all_layer_types_are_the_default():
    assert mix_of(NumTarget=1).op_types == frozenset(LAYER_TYPES)


def test_settings_as_extra_options():
    entry = AutoMixprecisionConfig(LOW, data_size=10, metric_threshold=None)
    options = entry.get_options()["AutoMixprecision"]
    assert (options["DataSize"], options["MetricThreshold"], options["NoInputQDQShared"]) == (10, None, False)
    assert options.keys() <= MIXED_PRECISION_KEYS.keys()
    assert "DataSize" not in entry._get_config({"AutoMixprecision": {"DataSize": 9}})["AutoMixprecision"]
