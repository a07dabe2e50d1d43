"""The examples in docstrings, in the README and in the documents do what they show."""

import doctest
import importlib
import pkgutil
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from documents import run_page

import quark
from quark.onnx.quantization.presets import PRESETS

ROOT = Path(__file__).parents[1]
MODULES = [module.name for module in pkgutil.walk_packages(quark.__path__, "quark.")]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES_WITH_EXAMPLES = {"README.md", "quantizing_onnx.md", "calibration.md", "options.md"}


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_a_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    count = run_page(page, tmp_path)
    assert count or page.name not in PAGES_WITH_EXAMPLES


def test_the_readme_names_every_preset():
    table = (ROOT / "README.md").read_text().partition("## Presets")[2].partition("\n## ")[0]
    patterns = re.findall(r"`([A-Z0-9_*]+)`", table)
    unnamed = [name for name in PRESETS if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    unused = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in PRESETS)]
    assert not unnamed
    assert unused == ["NAME"] * unused.count("NAME")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\n>>> 1 + 1\n3\n```\n", "failed"),
        ("```python\nraise ValueError('told')\n```\n", "told"),
        ("```console\n$ quark presets NONE\n```\n", "no preset"),
        ("```console\n$ quark presets XINT8\nnothing of the kind\n```\n", "expected"),
        ("```console\n$ quark presets NONE; echo $?\n0\n```\n", "expected"),
        ("```console\n$ rm everything\n```\n", "only quark commands"),
    ],
)
def test_a_wrong_example_is_noticed(tmp_path, monkeypatch, text, complaint):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises((AssertionError, ValueError), match=complaint):
        run_page(page, tmp_path)
