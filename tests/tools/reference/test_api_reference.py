"""The API reference has every public name, and nothing of it is made up."""

import doctest
from dataclasses import dataclass
from enum import Enum
from importlib import import_module

import pytest

from quark.cli.main import main as commands
from quark.errors import InvalidValueError
from tools.reference import __main__ as writing
from tools.reference import docstrings, markdown, signatures
from tools.reference.api import PAGES, api_pages, public_names
from tools.reference.commands import command_reference
from tools.reference.docstrings import docstring, to_markdown
from tools.reference.signatures import signature_of


class Colour(Enum):
    RED = 1


@dataclass
class Undocumented:
    size: int = 1


def test_every_public_name_has_its_heading():
    pages = dict(api_pages("command"))
    for page, modules in PAGES.items():
        headings = [line.removeprefix("### ") for line in pages[f"{page}.md"].splitlines() if line.startswith("### ")]
        assert headings == [name for module in modules for name in public_names(import_module(module))]
    assert set(pages) == {"README.md", *(f"{page}.md" for page in PAGES)}


def test_every_command_has_its_section():
    text = command_reference("command")
    assert all(f"\n## quark {name}\n" in text for name in commands.commands)
    assert all(f"(#quark-{name})" in text for name in commands.commands)


@pytest.mark.parametrize("thing", [Undocumented, Colour, lambda x: x], ids=["dataclass", "enum", "function"])
def test_a_name_without_docstring_is_refused(thing):
    with pytest.raises(InvalidValueError, match="'a.name' has no docstring"):
        docstring(thing, "a.name")


def test_signatures_name_members_and_hide_addresses():
    def function(first, *, colour: Colour = Colour.RED, key=len, other=object(), **rest: int) -> None: ...  # noqa: B008

    assert signature_of(function) == "(first, *, colour: Colour = Colour.RED, key=..., other=..., **rest: int) -> None"
    assert signature_of(Undocumented) == "(size: int = 1)"


def test_prose_drawings_and_examples_are_told_apart():
    text = to_markdown("Values * scale.\n\n    a drawing\n\n>>> 1\n1")
    assert text == "Values \\* scale.\n\n```text\na drawing\n```\n\n```pycon\n>>> 1\n1\n```\n"


def test_what_is_not_as_the_code_says_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writing, "documents", lambda: {writing.DOCS / "api" / "a.md": "text\n"})
    assert writing.main(["--root", str(tmp_path), "--check"]) == 1
    assert writing.main(["--root", str(tmp_path)]) == 0
    assert writing.main(["--root", str(tmp_path), "--check"]) == 0
    (tmp_path / "docs" / "api" / "left.md").write_text("of a page that is gone\n")
    assert writing.main(["--root", str(tmp_path), "--check"]) == 1
    errors = capsys.readouterr().err
    assert "a.md is not what the code says" in errors
    assert "left.md is not what the code says" in errors


@pytest.mark.parametrize("module", [docstrings, markdown, signatures], ids=lambda module: module.__name__)
def test_docstring_examples(module):
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed
