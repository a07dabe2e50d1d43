"""--config and --set."""

import click
import pytest

from quark.cli.options import parse_changes, read_config
from quark.errors import InvalidValueError, UnknownNameError
from quark.onnx.quantization.config.config import get_default_config
from quark.onnx.quantization.config.quant_types import QuantType


def parsed(*texts):
    return parse_changes(click.Context(click.Command("x")), None, texts)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("per_channel=true", "per_channel", True),
        ("Percentile=99.99", "Percentile", 99.99),
        ("op_types_to_quantize=[Conv, Gemm]", "op_types_to_quantize", ["Conv", "Gemm"]),
        ("MXAttributes.scale_rule=rceil", "MXAttributes.scale_rule", "rceil"),
        ("TmpDir=a=b", "TmpDir", "a=b"),
        ("TmpDir=", "TmpDir", None),
    ],
)
def test_value_is_yaml(text, key, value):
    assert parsed(text) == ((key, value),)


@pytest.mark.parametrize("text", ["per_channel", "=1", "a..b=1", "x=[1"])
def test_what_is_no_change_is_a_usage_error(text):
    with pytest.raises(click.BadParameter):
        parsed(text)


def test_fields_options_and_parts_of_options_are_set():
    config = read_config(
        "MXINT8",
        parsed("per_channel=true", "Percentile=99.5", "MXAttributes.block_size=16", "weight_type=QuantType.QInt8"),
    )
    assert config.per_channel is True
    assert config.extra_options["Percentile"] == 99.5
    assert config.extra_options["MXAttributes"]["block_size"] == 16
    assert config.weight_type is QuantType.QInt8
    plain = get_default_config("MXINT8").extra_options["MXAttributes"]
    assert config.extra_options["MXAttributes"] == {**plain, "block_size": 16}


def test_later_changes_win_and_presets_stay_as_they_are():
    assert read_config("A8W8", parsed("Percentile=1", "Percentile=2")).extra_options["Percentile"] == 2
    assert read_config("A8W8", ()) == get_default_config("A8W8")


def test_part_of_what_has_no_parts():
    with pytest.raises(InvalidValueError, match="ActivationSymmetric"):
        read_config("A8W8", parsed("ActivationSymmetric.x=1"))


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_file_is_a_config_too(tmp_path, suffix):
    path = get_default_config("A8W8").save(tmp_path / f"c{suffix}")
    config = read_config(str(path), parsed("reduce_range=true"))
    assert config.reduce_range
    config.reduce_range = False
    assert config == get_default_config("A8W8")


def test_unknown_names():
    with pytest.raises(UnknownNameError, match="MXINT8"):
        read_config("MXINT9", ())
    with pytest.raises(InvalidValueError, match="absent.yaml"):
        read_config("absent.yaml", ())
