"""Configs are ordinary objects: they can be copied and pickled, and a misspelt field is an error."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from quark.errors import InvalidValueError, UnknownNameError, UnsupportedTypeError
from quark.torch.export.config.config import ExporterConfig, JsonExporterConfig, OnnxExporterConfig
from quark.torch.quantization.config import config as public
from quark.torch.quantization.config.algorithm import ALGORITHMS, AlgoConfig
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec, TQTSpec
from quark.torch.quantization.config.named_specs import DataTypeSpec
from quark.torch.quantization.config.type import Dtype, TQTThresholdInitMeth
from quark.torch.quantization.observer import TQTObserver

INT8 = QuantizationSpec(Dtype.int8)
LAYER = QuantizationConfig(input_tensors=INT8, output_tensors=INT8, weight=INT8)


def spec_of(cls: type[DataTypeSpec]) -> DataTypeSpec:
    """The spec with its required settings."""
    required = {"ch_axis": 0, "group_size": 32}
    parameters = inspect.signature(cls).parameters.values()
    return cls(
        **{parameter.name: required[parameter.name] for parameter in parameters if parameter.default is parameter.empty}
    )


CONFIGS: dict[str, Any] = {
    **{
        name: spec_of(cls)
        for name, cls in vars(public).items()
        if inspect.isclass(cls) and issubclass(cls, DataTypeSpec) and not inspect.isabstract(cls)
    },
    **{cls.__name__: cls() for cls in ALGORITHMS.values()},
    "QuantizationSpec": INT8,
    "QuantizationSpec that learns": QuantizationSpec(
        Dtype.int8, TQTObserver, qat_spec=TQTSpec(TQTThresholdInitMeth._3SD)
    ),
    "TQTSpec": TQTSpec(),
    "OnlineRotationConfig": public.OnlineRotationConfig(),
    "QuantizationConfig": LAYER,
    "Config": Config(LAYER, exclude=["fc"], layer_quant_config={"head": None}, algo_config=[public.CLEConfig()]),
    "JsonExporterConfig": JsonExporterConfig(),
    "OnnxExporterConfig": OnnxExporterConfig(),
    "ExporterConfig": ExporterConfig(JsonExporterConfig()),
}


def test_the_table_has_every_public_class() -> None:
    classes = [each for name in public.__all__ if inspect.isclass(each := getattr(public, name))]
    built = [cls for cls in classes if not inspect.isabstract(cls)]
    assert set(built) - {type(config) for config in CONFIGS.values()} <= {AlgoConfig, public.QATSpec}


@pytest.mark.parametrize("name", CONFIGS)
def test_copies_are_equal_and_of_the_same_class(name: str) -> None:
    config = CONFIGS[name]
    for again in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(again) is type(config)
        assert again == config


@pytest.mark.parametrize("name", CONFIGS)
def test_a_misspelt_field_is_refused_with_the_right_one(name: str) -> None:
    config = copy.deepcopy(CONFIGS[name])
    with pytest.raises(UnknownNameError, match=f"no field of {type(config).__name__} 'nonsense'"):
        config.nonsense = 1
    for field in fields(config):
        with pytest.raises(UnknownNameError, match=rf"Did you mean .*\b{field.name}\b.*\?"):
            setattr(config, field.name + "x", 1)
    assert vars(config) == vars(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_field_can_be_set_or_the_error_says_what_to_do(name: str) -> None:
    config = copy.deepcopy(CONFIGS[name])
    for field in fields(config):
        if isinstance(config, (Config, QuantizationConfig, QuantizationSpec, AlgoConfig, public.OnlineRotationConfig)):
            setattr(config, field.name, getattr(config, field.name))
        else:
            with pytest.raises(FrozenInstanceError, match=rf"{field.name} cannot be assigned: .*dataclasses.replace"):
                setattr(config, field.name, getattr(config, field.name))


def test_an_edited_layer_config_counts_and_is_checked() -> None:
    config = Config(copy.deepcopy(LAYER))
    config.global_quant_config.weight = QuantizationSpec(Dtype.int4)
    weight = config.settings().specs.weight
    assert weight is not None
    assert str(weight.format) == "int4"
    config.global_quant_config.weight.group_size = 32
    with pytest.raises(InvalidValueError, match="group_size 32 with qscheme per_tensor"):
        config.settings()
    config.global_quant_config.weight = 4  # type: ignore[assignment]
    with pytest.raises(UnsupportedTypeError, match="weight 4: expected a QuantizationSpec"):
        config.settings()


def test_settings_of_an_algorithm_can_be_edited_and_are_checked() -> None:
    algorithm = public.GPTQConfig()
    config = Config(LAYER, algo_config=[algorithm])
    algorithm.damp_percent = 2.0
    with pytest.raises(InvalidValueError, match="damp_percent 2.0 of algorithm 'gptq'"):
        config.settings()
    algorithm.damp_percent, algorithm.name = 0.01, "awq"
    with pytest.raises(InvalidValueError, match="name 'awq' of GPTQConfig: expected 'gptq'"):
        config.settings()
