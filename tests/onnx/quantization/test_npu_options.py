"""An NPU's limits and its operators: on by themselves where a config is made for one, elsewhere where asked for."""

from __future__ import annotations

import pytest

from quark.decide.options import PositionOptions
from quark.npu import RULE_NAMES
from quark.onnx.quantization.config import QConfig, QuantizationConfig, get_default_config
from quark.onnx.quantization.config.option_table import OPTIONS
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.spec import QLayerConfig, XInt8Spec
from quark.onnx.settings import Settings
from quark.onnx.simulate import DEFAULT_SUBSTITUTIONS, SUBSTITUTION_OF_OPTION, SUBSTITUTIONS

ALL_RULES = PositionOptions(frozenset(RULE_NAMES))


def changed(preset: str, **options) -> Settings:
    config = get_default_config(preset)
    config.extra_options.update(options)
    return settings_of(config)


def test_rules_and_substitutions_have_options():
    assert len(RULE_NAMES) == 10
    assert set(RULE_NAMES) <= set(OPTIONS)
    assert set(SUBSTITUTION_OF_OPTION) <= set(OPTIONS)
    assert set(SUBSTITUTION_OF_OPTION.values()) == {substitution.name for substitution in SUBSTITUTIONS}


def test_a_config_for_the_npu_keeps_all_rules_and_computes_as_it_does():
    for settings in (
        settings_of("XINT8"),
        settings_of(QConfig(QLayerConfig(activation=XInt8Spec(), weight=XInt8Spec()))),
    ):
        assert settings.choose.positions == ALL_RULES
        assert settings.simulate.substitutions == DEFAULT_SUBSTITUTIONS
        assert {"MaxPool", "AveragePool", "GlobalAveragePool"} <= settings.choose.aligned


@pytest.mark.parametrize("preset", ["A8W8", "INT8_CNN_DEFAULT", "INT8_TRANSFORMER_DEFAULT", "MXINT8", "BF16"])
def test_others_do_not(preset):
    settings = settings_of(preset)
    assert settings.choose.positions is None
    assert not settings.simulate.substitutions


def test_float_scales_have_no_positions_on_the_npu_either():
    settings = settings_of(QuantizationConfig(enable_npu_cnn=True))
    assert settings.choose.positions is None
    assert not settings.simulate.substitutions
    assert settings.remarks == ()


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_each_rule_is_switched(rule):
    assert changed("XINT8", **{rule: True}).choose == settings_of("XINT8").choose
    assert changed("XINT8", **{rule: False}).choose.positions == PositionOptions(frozenset(RULE_NAMES) - {rule})


def test_rounds_and_the_switch_of_all_rules():
    assert changed("XINT8", MaxLoopNum=9).choose.positions == PositionOptions(frozenset(RULE_NAMES), 9)
    assert changed("XINT8", NPULimitationCheck=False).choose.positions is None
    assert changed("VINT8", NPULimitationCheck=True).choose.positions == ALL_RULES
    settings = changed("VINT8", NPULimitationCheck=True, AdjustShiftCut=False, MaxLoopNum=2)
    assert settings.choose.positions == PositionOptions(frozenset(RULE_NAMES) - {"AdjustShiftCut"}, 2)
    assert settings.remarks == ()


@pytest.mark.parametrize(("name", "value"), [("AdjustShiftCut", True), ("AdjustShiftSwish", True), ("MaxLoopNum", 0)])
def test_what_steers_nothing_is_remarked_on(name, value):
    for preset in ("XINT8", "VINT8"):
        (remark,) = changed(preset, NPULimitationCheck=False, **{name: value}).remarks
        assert remark == f"{name}: NPULimitationCheck is False, so that there is nothing for it to steer"
    (remark,) = changed("A8W8", **{name: value}).remarks
    assert remark.startswith(f"{name}: ")
    assert "power-of-two" in remark
    assert changed("A8W8", **{name: value}).choose == settings_of("A8W8").choose


def test_limits_of_float_scales_are_remarked_on():
    (remark,) = changed("A8W8", NPULimitationCheck=True).remarks
    assert "power-of-two" in remark
    assert changed("A8W8", NPULimitationCheck=False, AdjustShiftCut=False).remarks == ()


def test_aligning_has_its_meaning_for_every_target():
    assert "Pad" not in changed("INT8_CNN_DEFAULT", AlignPad=False).choose.aligned
    assert changed("INT8_CNN_DEFAULT", AlignPad=True).remarks == ()
    npu = changed("XINT8", AlignPad=False)
    assert "Pad" not in npu.choose.aligned
    assert "AlignPad" not in npu.choose.positions.rules


def test_the_switch_of_all_operators():
    assert not changed("XINT8", SimulateDPU=False).simulate.substitutions
    assert changed("XINT8", SimulateDPU=True).simulate == settings_of("XINT8").simulate
    assert changed("A8W8", SimulateDPU=True).simulate.substitutions == DEFAULT_SUBSTITUTIONS


@pytest.mark.parametrize(("option", "substitution"), SUBSTITUTION_OF_OPTION.items())
def test_each_operator_is_switched(option, substitution):
    assert changed("XINT8", **{option: True}).simulate.substitutions == DEFAULT_SUBSTITUTIONS | {substitution}
    assert changed("XINT8", **{option: False}).simulate.substitutions == DEFAULT_SUBSTITUTIONS - {substitution}
    assert changed("XINT8", SimulateDPU=False, **{option: True}).simulate.substitutions == {substitution}
    assert changed("A8W8", **{option: True}).simulate.substitutions == {substitution}
    assert not changed("A8W8", **{option: False}).simulate.substitutions
