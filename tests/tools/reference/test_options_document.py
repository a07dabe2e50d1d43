"""docs/options.md says what the tables of the code say, and the defaults in it are those that hold."""

import re
from dataclasses import fields

import pytest

from quark.onnx import QuantizationConfig
from quark.onnx.quantization.config.option_table import OPTIONS
from tools.reference import __main__ as writing
from tools.reference.options import FIELD_DOCS, OTHER_DEFAULTS, default_of, is_default, options_document

# A config for which the option matters.
PRESET_OF = {
    "Percentile": "U8S8_AAWS",
    "MinMSEModePof2Scale": "XINT8",
    "BlockPlacement": "MXINT8",
    "MaxLoopNum": "XINT8",
}


@pytest.fixture(scope="module")
def first_cells():
    return re.findall(r"^\| `(\w+)` \|", options_document("command").partition("## Names of types")[0], re.MULTILINE)


def test_every_field_and_option_has_one_row(first_cells):
    names = [field.name for field in fields(QuantizationConfig)]
    assert sorted(first_cells) == sorted([*names, *OPTIONS])
    assert set(FIELD_DOCS) == set(names)


@pytest.mark.parametrize("name", OTHER_DEFAULTS)
def test_stated_defaults_change_nothing(name):
    assert is_default(PRESET_OF.get(name, "INT8_CNN_DEFAULT"), OPTIONS[name], OTHER_DEFAULTS[name])


def test_other_values_do_change_something():
    assert not is_default("U8S8_AAWS", OPTIONS["Percentile"], 99.0)
    assert not is_default("XINT8", OPTIONS["MinMSEModePof2Scale"], "MostCommon")
    assert not is_default("MXINT8", OPTIONS["BlockPlacement"], "all")
    assert not is_default("XINT8", OPTIONS["CLESteps"], 2)
    assert not is_default("XINT8", OPTIONS["SmoothAlpha"], "auto")
    assert not is_default("XINT8", OPTIONS["BiasCorrectionSamples"], 2)
    assert not is_default("XINT8", OPTIONS["MaxLoopNum"], 2)


@pytest.mark.parametrize(
    ("name", "value", "on_npu"),
    [
        ("FoldBatchNorm", True, None),
        ("ConvertBNToConv", False, None),
        ("Int32Bias", True, False),
        ("RefineBlockAxis", True, None),
        ("RemoveInputInit", True, None),
        ("CLEScaleAppendBias", True, None),
        ("CLEBiasAbsorption", False, None),
        ("BiasCorrection", False, None),
        ("NPULimitationCheck", False, True),
        ("ConvertAvgPoolToDPUVersion", False, True),
        ("ConvertClipToDPUVersion", False, None),
        ("AlignPool", None, True),
    ],
)
def test_defaults_are_found_by_what_they_do(name, value, on_npu):
    found = default_of(OPTIONS[name])
    assert (found.value, found.on_npu) == (value, on_npu)


def test_check_notices_a_change(tmp_path, monkeypatch, capsys):
    page = writing.DOCS / "options.md"
    monkeypatch.setattr(writing, "documents", lambda: {page: options_document(writing.COMMAND)})
    root = ["--root", str(tmp_path)]
    assert writing.main([*root, "--check"]) == 1
    assert writing.main(root) == 0
    assert writing.main([*root, "--check"]) == 0
    (tmp_path / page).write_text(options_document(writing.COMMAND) + "more\n")
    assert writing.main([*root, "--check"]) == 1
    assert str(page) in capsys.readouterr().err
