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
from quark.onnx.quantization.config.config import get_default_config
from quark.onnx.quantization.config.finetune_options import FINETUNE_KEYS
from quark.onnx.quantization.presets import PRESETS

ROOT = Path(__file__).parents[1]
MODULES = [module.name for module in pkgutil.walk_packages(quark.__path__, "quark.")]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "migrating").glob("*.md"))]
# tables, and documents that are written from the code
PAGES_WITHOUT_EXAMPLES = {"docs/README.md", "docs/benchmarks.md", "docs/cli.md", "docs/support_matrix.md"}
PAGES_WITHOUT_EXAMPLES |= {"docs/versioning.md", "docs/adding_an_algorithm.md"}  # test_adding_an_algorithm.py


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    if name.startswith("quark.ops.triton_"):
        pytest.importorskip("triton")  # kernels, which only come with torch for CUDA
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def name_of(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_of_a_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    count = run_page(page, tmp_path)
    assert (count == 0) == (name_of(page) in PAGES_WITHOUT_EXAMPLES)


def test_the_table_of_presets_has_every_preset():
    page = (ROOT / "docs" / "choosing_a_preset.md").read_text()
    table = page.partition("\n## All presets\n")[2].partition("\n## ")[0]
    patterns = re.findall(r"`([A-Z0-9_*]+)`", table)
    unnamed = [name for name in PRESETS if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    unused = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in PRESETS)]
    assert not unnamed
    assert not unused


def test_the_table_of_recipes_is_that_of_the_presets():
    section = (ROOT / "docs" / "accuracy.md").read_text().partition("## Which preset has which recipe")[2]
    table = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    told = {name: [cell.strip("`") for cell in cells] for names, *cells in rows for name in names.split("`")[1::2]}
    recipes = {name: _recipe(get_default_config(name)) for name in PRESETS}
    trained = {name for name, row in PRESETS.items() if row.is_trained}
    assert told == {name: recipe for name, recipe in recipes.items() if name not in trained}
    for name in trained:
        before = re.sub("_ADAROUND$|_ADAQUANT$|_DISTILL$", "", name).replace("_ACCURATE", "_DEFAULT")
        expected = list(recipes[before])
        if get_default_config(name).include_fast_ft:  # rounds every layer again
            expected[2] = re.sub("(,| with| and)* compensation", "", expected[2])
        assert recipes[name] == expected


def test_the_table_of_finetuning_has_every_setting():
    section = (ROOT / "docs" / "finetuning.md").read_text().partition("## The options")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(FINETUNE_KEYS)


def _recipe(config):
    options = config.extra_options
    equalization = options.get("CLEClip", "per_channel") if config.include_cle else ""
    smoothing = str(options["SmoothAlpha"]) if config.include_sq else ""
    correction = "yes" if options.get("BiasCorrection") else ""
    also = [name.lower() for name in ("Centering", "Compensation") if options.get(name)]
    correction += f", {'with' if 'centering' in also else 'and'} {' and '.join(also)}" if also else ""
    return [equalization, smoothing, correction, options.get("WeightScaleRule", ""), options.get("Protect", "")]


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
