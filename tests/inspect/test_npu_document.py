"""The page on NPUs names every rule, every substitution and every operator."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quark.inspect.lint import NPU_OPERATORS
from quark.npu import RULE_NAMES
from quark.onnx.simulate import SUBSTITUTION_OF_OPTION

PAGE = (Path(__file__).parents[2] / "docs" / "npu.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*RULE_NAMES, *SUBSTITUTION_OF_OPTION])
def test_rules_and_options(name):
    assert f"| `{name}`" in PAGE


def test_operators():
    listed = re.search(r"^Operators: (.*?)\. Min", PAGE, re.DOTALL | re.MULTILINE)
    assert listed is not None
    assert sorted(listed.group(1).split()) == sorted(NPU_OPERATORS)
