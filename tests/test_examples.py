"""The examples in docstrings and in the README do what they show."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import quark

ROOT = Path(__file__).parents[1]
MODULES = [module.name for module in pkgutil.walk_packages(quark.__path__, "quark.")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_readme_examples():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    assert all(block.startswith(">>> ") for block in blocks), "write a session, so that it can be checked"
    session = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "README", "README.md", 0)
    assert doctest.DocTestRunner().run(session).failed == 0
