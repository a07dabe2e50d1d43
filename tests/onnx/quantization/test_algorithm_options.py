"""Accuracy algorithms, asked for by fields and options or by entries of a QConfig."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError
from quark.features.activation_aware.options import ActivationAwareOptions
from quark.features.bias_correction.options import BiasCorrectionOptions, CorrectionInputs
from quark.features.compensation.options import CompensationOptions
from quark.features.distillation.options import DistillationOptions
from quark.features.equalization.options import ClipTreatment, CrossLayerOptions
from quark.features.rotation.options import RotatedPair, RotationOptions
from quark.features.smooth_quant.options import SmoothOptions
from quark.onnx.quantization.config import QConfig, QuantizationConfig
from quark.onnx.quantization.config.algorithm import (
    AlgoConfig,
    BiasCorrectionConfig,
    CLEConfig,
    DistillationConfig,
    GPTQConfig,
    QuarotConfig,
    SmoothQuantConfig,
)
from quark.onnx.quantization.config.option_table import OPTIONS
from quark.onnx.quantization.config.option_treatments import Steers
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.spec import Int8Spec, QLayerConfig
from quark.onnx.settings import EqualizeOptions, RefineOptions, Settings

INT8 = QLayerConfig(activation=Int8Spec(), weight=Int8Spec())

# Option, value, field of the algorithm's options, its value there.
CROSS_LAYER = [
    ("CLESteps", -1, "steps", -1),
    ("CLEScaleAppendBias", False, "has_appended_bias", False),
    ("CLETotalLayerDiffThreshold", 1e-3, "settled_at", 1e-3),
    ("CLEWeightThreshold", 0, "weight_threshold", 0),
    ("CLEScaleUseThreshold", False, "weight_threshold", 0),
    ("CLEClip", "calibrated", "clip", ClipTreatment.CALIBRATED),
    ("CLEBiasAbsorption", True, "has_bias_absorption", True),
]
SMOOTH = [("SmoothAlpha", 0.7, "alpha", 0.7), ("SmoothAlpha", 0, "alpha", 0.0), ("SmoothAlpha", "auto", "alpha", None)]
BIAS_CORRECTION = [
    ("BiasCorrectionInputs", "quantized", "inputs", CorrectionInputs.QUANTIZED),
    ("BiasCorrectionSamples", 7, "sample_limit", 7),
]


def settings(fields: dict[str, bool] | None = None, **options) -> Settings:
    return settings_of(QuantizationConfig(**(fields or {}), extra_options=options))


def by_entries(*entries, **options) -> Settings:
    return settings_of(QConfig(INT8, algo_config=list(entries), **options))


def test_algorithms_are_off_unless_asked_for():
    assert settings().equalize == EqualizeOptions()
    assert settings().refine == RefineOptions()
    assert settings(BiasCorrection=False).refine == RefineOptions()


def test_fields_turn_them_on():
    assert settings({"include_cle": True}).equalize == EqualizeOptions(cross_layer=CrossLayerOptions())
    assert settings({"include_sq": True}).equalize == EqualizeOptions(smooth=SmoothOptions())
    assert settings(BiasCorrection=True).refine == RefineOptions(BiasCorrectionOptions())


@pytest.mark.parametrize(("option", "value", "field", "expected"), CROSS_LAYER)
def test_cross_layer_equalization_is_steered(option, value, field, expected):
    found = settings({"include_cle": True}, **{option: value})
    assert getattr(found.equalize.cross_layer, field) == expected
    assert getattr(CrossLayerOptions(), field) != expected
    assert found.remarks == ()


@pytest.mark.parametrize(("option", "value", "field", "expected"), SMOOTH)
def test_smooth_quant_is_steered(option, value, field, expected):
    found = settings({"include_sq": True}, **{option: value})
    assert getattr(found.equalize.smooth, field) == expected
    assert found.remarks == ()


@pytest.mark.parametrize(("option", "value", "field", "expected"), BIAS_CORRECTION)
def test_bias_correction_is_steered(option, value, field, expected):
    found = settings(BiasCorrection=True, **{option: value})
    assert getattr(found.refine.bias_correction, field) == expected
    assert found.remarks == ()


@pytest.mark.parametrize(("option", "value"), [row[:2] for row in (*CROSS_LAYER, *SMOOTH, *BIAS_CORRECTION)])
def test_without_the_algorithm_they_are_remarked_on(option, value):
    (remark,) = settings(**{option: value}).remarks
    treatment: Any = OPTIONS[option].treatment
    flag = treatment.flag
    assert remark == f"{option}: {flag} is False, so that there is nothing for it to steer"


def test_every_steering_option_is_tested():
    tested = {row[0] for row in (*CROSS_LAYER, *SMOOTH, *BIAS_CORRECTION)}
    tested |= {"AutoMixprecision", "FastFinetune"}  # have files of their own
    tested |= {"CompensationDamping", "CompensationActOrder", "CompensationSamples"}
    tested |= {"AWQScales", "AWQClip", "AWQSamples"}
    tested |= {f"Distillation{name}" for name in ("Steps", "Samples", "Batch", "Rate", "Features", "Mixing")}
    tested |= {f"Distillation{name}" for name in ("Unrounded", "Augmentation", "Device", "Seed", "Folder")}
    tested |= {"RMatrixDim", "UseRandomHad", "RConfigPath"}  # below, with QuarotConfig
    tested |= {"R1", "R2", "R3", "R4", "RotationSize", "OnlineR1Rotation"}
    assert tested == {option.name for option in OPTIONS.values() if isinstance(option.treatment, Steers)}


def test_a_threshold_that_is_not_used_is_remarked_on():
    found = settings({"include_cle": True}, CLEScaleUseThreshold=False, CLEWeightThreshold=0.3)
    assert found.equalize.cross_layer.weight_threshold == 0
    assert found.remarks == ("CLEWeightThreshold: CLEScaleUseThreshold is False, so that it is not used",)


def test_the_order_of_options_does_not_matter():
    first = settings(CLESteps=2, BiasCorrectionSamples=3, BiasCorrection=True)
    assert first.refine.bias_correction == BiasCorrectionOptions(sample_limit=3)


def test_entries_say_the_same_as_fields_and_options():
    cle = CLEConfig(
        cle_steps=3, cle_weight_threshold=0.2, cle_scale_append_bias=False, cle_total_layer_diff_threshold=1e-5
    )
    expected = CrossLayerOptions(steps=3, weight_threshold=0.2, has_appended_bias=False, settled_at=1e-5)
    assert by_entries(cle).equalize.cross_layer == expected
    assert by_entries(CLEConfig(cle_scale_use_threshold=False)).equalize.cross_layer.weight_threshold == 0
    assert by_entries(SmoothQuantConfig(alpha=0.8)).equalize.smooth == SmoothOptions(0.8)
    assert by_entries(SmoothQuantConfig(alpha="auto")).equalize.smooth == SmoothOptions(None)
    assert by_entries(BiasCorrectionConfig()).refine == RefineOptions(BiasCorrectionOptions())
    every = by_entries(CLEConfig(), SmoothQuantConfig(), BiasCorrectionConfig())
    assert every.equalize == EqualizeOptions(CrossLayerOptions(), SmoothOptions())
    assert every.remarks == ()


def test_options_go_before_what_an_entry_leaves_at_its_default():
    assert by_entries(CLEConfig(), CLESteps=4).equalize.cross_layer.steps == 4
    assert by_entries(CLEConfig(cle_steps=4), CLESteps=4).equalize.cross_layer.steps == 4
    assert by_entries(CLEConfig(), CLEClip="skip").equalize.cross_layer.clip is ClipTreatment.SKIP
    assert by_entries(BiasCorrectionConfig(), BiasCorrectionSamples=2).refine.bias_correction.sample_limit == 2


@pytest.mark.parametrize(
    ("entries", "options", "error", "message"),
    [
        (
            [CLEConfig(cle_steps=3)],
            {"CLESteps": 4},
            InvalidValueError,
            "'CLESteps' = 4 and CLEConfig (3) say different",
        ),
        ([BiasCorrectionConfig()], {"BiasCorrection": False}, InvalidValueError, "say different things"),
        ([CLEConfig(), CLEConfig()], {}, InvalidValueError, "CLEConfig more than once"),
        ([CLEConfig(cle_balance_method="mean")], {}, UnsupportedOptionError, "'CLEBalanceMethod' = 'mean'"),
        ([CLEConfig(cle_steps=-2)], {}, InvalidValueError, "at least -1"),
        ([SmoothQuantConfig(alpha=2)], {}, InvalidValueError, "from 0 to 1"),
        ([CLEConfig], {}, UnsupportedTypeError, "expected a list such as [CLEConfig()]"),
    ],
)
def test_mistakes_in_entries_are_named(entries, options, error, message):
    with pytest.raises(error) as caught:
        by_entries(*entries, **options)
    assert message in str(caught.value)


def test_entries_come_in_a_list():
    with pytest.raises(UnsupportedTypeError, match="expected a list"):
        settings_of(QConfig(INT8, algo_config=CLEConfig()))


def test_an_entry_of_no_known_kind_is_an_error_with_those_that_there_are():
    class OtherConfig(CLEConfig):
        pass

    with pytest.raises(UnsupportedTypeError, match="algo_config has OtherConfig: expected CLEConfig, .*AdaQuantConfig"):
        by_entries(OtherConfig())


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_entries_survive_files(suffix, tmp_path: Path):
    entries = [CLEConfig(cle_steps=-1), SmoothQuantConfig(alpha="auto"), BiasCorrectionConfig()]
    config = QConfig(INT8, algo_config=entries, CLEClip="calibrated")
    loaded = QConfig.load(config.save(tmp_path / f"c{suffix}"))
    assert loaded.algo_config == entries
    assert settings_of(loaded) == settings_of(config)
    assert settings_of(loaded).equalize.cross_layer == CrossLayerOptions(-1, clip=ClipTreatment.CALIBRATED)


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_fields_and_options_survive_files(suffix, tmp_path: Path):
    options = {"CLESteps": -1, "CLEClip": "skip", "SmoothAlpha": "auto", "BiasCorrection": True}
    config = QuantizationConfig(include_cle=True, include_sq=True, extra_options=options)
    loaded = QuantizationConfig.load(config.save(tmp_path / f"c{suffix}"))
    assert loaded == config
    assert settings_of(loaded).equalize == settings_of(config).equalize != EqualizeOptions()


@pytest.mark.parametrize("entry", [GPTQConfig(bits=4, act_order=True), QuarotConfig(64, True, "rotation.json")])
def test_gptq_and_rotation_survive_files(entry, tmp_path):
    assert AlgoConfig.from_dict(entry.to_dict()) == entry
    config = QConfig(INT8, algo_config=[entry])
    assert QConfig.load(config.save(tmp_path / "config.yaml")).algo_config == [entry]


def test_gptq_is_compensation():
    expected = CompensationOptions(damping=0.05, has_activation_order=True)
    entry = GPTQConfig(perc_damp=0.05, act_order=True, group_size=128, mse=True)
    assert settings_of(QConfig(INT8, algo_config=[entry])).features == {"compensation": expected}
    assert entry.get_options()["GPTQParams"]["MSE"]
    found = settings(UseGPTQ=True, GPTQParams={"PercDamp": 0.05, "ActOrder": True, "GroupSize": 128, "BlockSize": 64})
    assert found.features == {"compensation": expected}
    assert any("the scales of their spec, which defines GroupSize" in remark for remark in found.remarks)
    assert any("BlockSize: it does not change the result" in remark for remark in found.remarks)
    assert settings(Compensation=True).features == {"compensation": CompensationOptions()}
    own = {"CompensationDamping": 0.05, "CompensationActOrder": True, "CompensationSamples": 7}
    assert settings(UseGPTQ=True, **own).features == {"compensation": replace(expected, sample_limit=7)}
    assert settings(UseGPTQ=True, GPTQParams={"Bits": 8}).features == {"compensation": CompensationOptions()}
    with pytest.raises(InvalidValueError, match=r"GPTQParams\.Bits \(bits\) = 4: weights are int8"):
        settings_of(QConfig(INT8, algo_config=[GPTQConfig(bits=4)]))
    unused = settings(GPTQParams={"Bits": 4})
    assert unused.features == {}
    assert any("GPTQParams: UseGPTQ is not set" in remark for remark in unused.remarks)
    nbits = {"UseMatMulNBits": True, "MatMulNBitsParams": {"Algorithm": "GPTQ"}}
    assert settings(**nbits).features == {"compensation": CompensationOptions()}


def test_distillation_is_an_option_and_an_entry(tmp_path):
    assert by_entries(DistillationConfig()).features == {"distillation": DistillationOptions()}
    settings_given = {"steps": 8, "samples": 32, "batch": 4, "rate": 0.1, "features": 0.5, "mixing": 0.2}
    entry = DistillationConfig(
        **settings_given, unrounded=0.25, augmentation="none", device="cuda", seed=3, folder="state"
    )
    expected = DistillationOptions(8, 32, 4, 0.1, 0.5, 0.2, "none", 0.25, "cuda", 3, "state")
    assert by_entries(entry).features == {"distillation": expected}
    assert settings(**entry.get_options()).features == {"distillation": expected}
    config = QConfig(INT8, algo_config=[entry])
    assert QConfig.load(config.save(tmp_path / "config.yaml")).algo_config == [entry]
    with pytest.raises(InvalidValueError, match="'DistillationSteps' = 4 and DistillationConfig"):
        by_entries(entry, DistillationSteps=4)


def test_awq_is_an_option_and_an_algorithm_of_nbits():
    nbits = {"UseMatMulNBits": True, "MatMulNBitsParams": {"Algorithm": "AWQ"}}
    assert settings(**nbits).features == {"activation_aware": ActivationAwareOptions()}
    own = {"AWQScales": False, "AWQClip": False, "AWQSamples": 7}
    assert settings(AWQ=True, **own).features == {"activation_aware": ActivationAwareOptions(False, False, 7)}
    with pytest.raises(InvalidValueError, match="AWQSamples 0"):
        settings(AWQ=True, AWQSamples=0)


def test_rotation_reads_its_file(tmp_path):
    path = tmp_path / "pairs.json"
    path.write_text('{"R1_pairs": [{"prev_nodes": ["a"], "next_nodes": ["b"]}]}')
    expected = RotationOptions((RotatedPair(("a",), ("b",)),), 64, True, str(path))
    entry = QuarotConfig(64, True, str(path))
    assert {"RMatrixDim": 64, "UseRandomHad": True, "RConfigPath": str(path)}.items() <= entry.get_options().items()
    assert settings_of(QConfig(INT8, algo_config=[entry])).equalize.rotation == expected
    config = QuantizationConfig(include_rotation=True, extra_options=entry.get_options())
    assert settings_of(config).equalize.rotation == expected
    assert settings_of(QConfig(INT8, algo_config=[QuarotConfig()])).equalize.rotation == RotationOptions()
    entry = QuarotConfig(64, r2=False, r3=True, r4=True, rotation_size=32, online_r1_rotation=True)
    expected = RotationOptions(size=64, r2=False, r3=True, r4=True, block=32, is_online=True)
    assert settings_of(QConfig(INT8, algo_config=[entry])).equalize.rotation == expected
    config = QuantizationConfig(include_rotation=True, extra_options=entry.get_options())
    assert settings_of(config).equalize.rotation == expected
    assert any("RMatrixDim: include_rotation is False" in remark for remark in settings(RMatrixDim=64).remarks)
