"""Spaces of configurations: their combinations, conditions, and what is wrong with them."""

from __future__ import annotations

import pytest

from quark.errors import InvalidValueError, UnknownNameError, UnsupportedTypeError
from quark.onnx import CalibrationMethod, PowerOfTwoMethod, SearchSpace, generate_all_configs, get_auto_search_config
from quark.search.auto_search import AutoSearchConfig
from quark.search.spaces import space_of, split_config_levels

METHODS = [PowerOfTwoMethod.MinMSE, CalibrationMethod.MinMax]
FINETUNING = {"NumIterations": [1, 2], "LearningRate": [0.1, 0.01, 0.001]}


def test_combinations_are_in_order_and_made_when_asked_for():
    configs = SearchSpace(
        {"calibrate_method": METHODS, "extra_options": {"Percentile": [99.0, 99.9], "FastFinetune": FINETUNING}}
    ).get_all_configs()
    assert len(configs) == 2 * 2 * 6
    assert configs[0] == {
        "calibrate_method": METHODS[0],
        "extra_options": {"Percentile": 99.0, "FastFinetune": {"NumIterations": 1, "LearningRate": 0.1}},
    }
    assert configs[-1]["extra_options"]["FastFinetune"] == {"NumIterations": 2, "LearningRate": 0.001}
    assert [config["extra_options"]["FastFinetune"]["LearningRate"] for config in configs[:3]] == [0.1, 0.01, 0.001]
    assert len({repr(config) for config in configs}) == 24
    assert len(configs + SearchSpace({"include_cle": [True]}).get_all_configs()) == 25
    assert len(SearchSpace(AutoSearchConfig.search_space).get_all_configs()) == 384 * 64 * 24


def test_levels():
    space = {"include_cle": [True], "extra_options": {"Percentile": [99.0], "FastFinetune": FINETUNING}}
    assert split_config_levels(space) == ({"include_cle": [True]}, {"Percentile": [99.0]}, FINETUNING)
    assert split_config_levels({"include_cle": True}) == ({"include_cle": True}, {}, {})


@pytest.mark.parametrize(
    ("fields", "options", "count"),
    [
        ({"calibrate_method": METHODS}, {"Percentile": [99.0, 99.9], "CalibMovingAverage": [True, False]}, 3),
        (
            {"calibrate_method": [CalibrationMethod.Percentile]},
            {"Percentile": [99.0, 99.9], "SmoothAlpha": [0.5, 0.6]},
            2,
        ),
        ({"calibrate_method": [METHODS[1]]}, {"CalibMovingAverage": [False], "CalibMovingAverageConstant": [1, 2]}, 1),
        ({"include_sq": [True]}, {"SmoothAlpha": [0.5, 0.6]}, 2),
        ({"include_fast_ft": [True]}, {"FastFinetune": FINETUNING}, 6),
        ({"include_fast_ft": [False]}, {"FastFinetune": FINETUNING}, 1),
    ],
)
def test_settings_that_cannot_matter_make_no_further_configs(fields, options, count):
    space = SearchSpace({**fields, "extra_options": options})
    assert len(space.remove_invalid_configs(space.get_all_configs())) == count


def test_conditions():
    space = {
        "activation": ["Int8Spec"],
        "activation_params": {"symmetric": [True, False], "only_if": "activation"},
        "algorithms": ["adaround", None],
        "adaround_params": {"num_iterations": [1, 2, 3], "only_if": {"algorithms": "adaround"}},
        "adaquant_params": {"num_iterations": [1, 2, 3], "only_if": {"algorithms": "adaquant"}},
    }
    configs = generate_all_configs(space)
    assert len(configs) == 2 * 3 + 2
    assert configs[0]["adaround_params"] == {"num_iterations": 1}
    assert configs[-1] == {"activation": "Int8Spec", "algorithms": None, "activation_params": {"symmetric": False}}


def test_ready_made_searches_are_new_objects():
    first = get_auto_search_config("A8W8_SEARCH")
    first["search_space"]["activation"].append("UInt8Spec")
    assert get_auto_search_config("A8W8_SEARCH")["search_space"]["activation"] == ["Int8Spec"]
    assert first["search_algo"] == "TPE"
    for name in ("ADVANCED_SEARCH", "XINT8_SEARCH", "A8W8_SEARCH", "A16W8_SEARCH"):
        assert not space_of(get_auto_search_config(name)["search_space"]).is_discrete
    with pytest.raises(UnknownNameError, match="A8W8_SEARCH"):
        get_auto_search_config("A8W8")


def test_what_is_wrong_with_a_space(caplog):
    SearchSpace({"include_cl": [True]})
    assert "no field of QuantizationConfig 'include_cl'" in caplog.text
    with pytest.raises(UnsupportedTypeError, match="'include_cle': True, expected a list"):
        SearchSpace({"include_cle": True}).get_all_configs()
    with pytest.raises(InvalidValueError, match="there is nothing in it"):
        SearchSpace({"include_cle": []}).get_all_configs()
    with pytest.raises(InvalidValueError, match="needs 'only_if'"):
        generate_all_configs({"cle_params": {"cle_steps": [1]}})
    with pytest.raises(InvalidValueError, match="p_rate must be a list"):
        generate_all_configs({"a": [1], "p": {"rate": {"type": "float", "low": 0, "high": 1}, "only_if": "a"}})
    with pytest.raises(InvalidValueError, match="low <= high"):
        space_of({"a": {"type": "float", "low": 2, "high": 1}})
    with pytest.raises(UnsupportedTypeError, match="expected a list of values or a range"):
        space_of({"a": "b"})
