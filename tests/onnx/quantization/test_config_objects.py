"""Configs are ordinary objects: they can be copied and pickled, and a misspelt field is an error."""

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

import quark.onnx
from quark.errors import InvalidValueError, UnknownNameError, UnsupportedTypeError
from quark.onnx import (
    AutoMixprecisionConfig,
    Config,
    Int8Spec,
    Int16Spec,
    MXInt8Spec,
    QConfig,
    QLayerConfig,
    QTensorConfig,
    QuantizationConfig,
    QuantType,
    UInt8Spec,
)
from quark.onnx.quantization.config.algorithm import ALGORITHMS
from quark.onnx.quantization.config.config import get_default_config
from quark.onnx.quantization.config.data_type import DATA_TYPES, Int8, MXInt8
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.tensor_specs import data_type_of
from quark.onnx.quantization.presets import PRESETS


def layer():
    return QLayerConfig(activation=UInt8Spec(), weight=MXInt8Spec())


def by_layer():
    return QConfig(
        QLayerConfig(activation=Int16Spec(), weight=Int8Spec()),
        specific_layer_config={layer(): ["a"], layer(): ["b"], None: ["c"]},
        layer_type_config={"Conv": layer()},
        exclude=["d", (["e"], ["f"])],
        algo_config=[make() for make in ALGORITHMS.values()],
        Percentile=99.9,
        MixedPrecisionTensor={QuantType.QInt8: ["g"]},
    )


SPECS: list[Any] = [
    value
    for value in vars(quark.onnx).values()
    if isinstance(value, type) and issubclass(value, QTensorConfig) and value is not QTensorConfig
]
CONFIGS = {
    **{spec.__name__: spec() for spec in SPECS},
    **{algorithm.__name__: algorithm() for algorithm in ALGORITHMS.values()},
    "QTensorConfig": QTensorConfig.from_dict({"data_type": "UInt16", "symmetric": True}),
    "QTensorConfig of a quant type": replace(Int8Spec(), data_type=data_type_of(QuantType.QInt8)),
    "AutoMixprecisionConfig with a layer": AutoMixprecisionConfig(target_layer_config=layer()),
    "QLayerConfig": layer(),
    "QConfig": QConfig(),
    "QConfig by layer": by_layer(),
    "QuantizationConfig": QuantizationConfig(extra_options={"CLESteps": 2, "MXAttributes": {"axis": 1}}),
    "Config": Config(QuantizationConfig(), exclude=["a"]),
}


def copies(value):
    return [copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))]


@pytest.mark.parametrize("name", CONFIGS)
def test_copies_are_equal_and_of_the_same_class(name):
    config = CONFIGS[name]
    for again in copies(config):
        assert again is not config
        assert type(again) is type(config)
        assert again == config


@pytest.mark.parametrize("name", PRESETS)
def test_copies_of_presets_are_equal(name):
    config = QConfig.get_default_config(name)
    assert all(again == config for again in copies(config))
    assert all(again == config.global_quant_config for again in copies(config.global_quant_config))


@pytest.mark.parametrize("data_type", DATA_TYPES.values(), ids=str)
def test_a_data_type_is_copied_by_name(data_type):
    assert all(again is data_type for again in copies(data_type))


def test_a_data_type_is_read_only():
    with pytest.raises(TypeError):
        MXInt8.attributes["axis"] = 2  # type: ignore[index]
    with pytest.raises(FrozenInstanceError, match=r"DataType.name cannot be assigned: .*dataclasses.replace"):
        Int8.name = "other"  # type: ignore[misc]


def test_a_deep_copy_shares_nothing():
    config = by_layer()
    again = copy.deepcopy(config)
    again.global_config.weight.symmetric = False
    next(iter(again.specific_layer_config)).activation = None
    again.exclude.append("x")
    again.extra_options["Percentile"] = 1
    assert config == by_layer()
    assert again != config


def test_layer_configs_are_equal_by_value_and_keys_by_identity():
    one, other = layer(), layer()
    assert one == other
    assert len({one: ["a"], other: ["b"]}) == 2
    other.weight = Int8Spec()
    assert one != other


@pytest.mark.parametrize("name", CONFIGS)
def test_an_unknown_field_is_refused(name):
    config = copy.deepcopy(CONFIGS[name])
    with pytest.raises(UnknownNameError, match=f"no field of {type(config).__name__} 'nonsense'"):
        config.nonsense = 1
    assert not hasattr(config, "nonsense")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_misspelt_field_is_refused_with_the_right_one(name):
    config = copy.deepcopy(CONFIGS[name])
    for field in fields(config):
        with pytest.raises(UnknownNameError, match=rf"Did you mean .*\b{field.name}\b.*\?"):
            setattr(config, field.name + "x", 1)
        setattr(config, field.name, getattr(config, field.name))
    assert config == CONFIGS[name]


def test_what_is_set_on_the_config_of_a_preset_counts():
    config = QConfig.get_default_config("XINT8")
    config.exclude = ["conv1", (["first"], ["last"])]
    config.exclude.append("head.*")
    config.global_quant_config.nodes_to_exclude = ["other"]
    config.extra_options["CLESteps"] = 3
    config.use_external_data_format = True
    settings = settings_of(config)
    assert settings.choose.selection.excluded_nodes == ("other", "conv1", "head.*")
    assert settings.choose.selection.excluded_subgraphs == ((("first",), ("last",)),)
    assert settings.equalize.cross_layer.steps == 3
    assert settings.save.has_external_data
    config.extra_options = {}
    assert settings_of(config).equalize.cross_layer.steps != 3
    assert config.global_quant_config.nodes_to_exclude == ["other"]


def test_what_is_excluded_is_saved(tmp_path):
    config = Config(get_default_config("A8W8"), exclude=["conv1"])
    assert Config.load(config.save(tmp_path / "config.yaml")).global_quant_config.nodes_to_exclude == ["conv1"]


def test_an_impossible_exclusion_is_refused():
    for exclude, error in ((3, UnsupportedTypeError), ([3], InvalidValueError)):
        with pytest.raises(error, match="exclude: "):
            settings_of(Config(QuantizationConfig(), exclude=exclude))
        with pytest.raises(error, match="exclude: "):
            settings_of(QConfig(exclude=exclude))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("per_channel", "set config.global_quant_config.per_channel"),
        ("nodes_to_exclude", "set config.global_quant_config.nodes_to_exclude"),
        ("algo_config", "build a QConfig with algo_config"),
        ("exclud", "Did you mean exclude?"),
    ],
)
def test_the_error_says_where_a_field_belongs(name, advice):
    with pytest.raises(UnknownNameError) as caught:
        setattr(QConfig.get_default_config("XINT8"), name, [])
    assert advice in str(caught.value)
