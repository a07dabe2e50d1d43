"""The documents hold together: links lead somewhere, and what they quote is what the code says."""

import re
from pathlib import Path

import pytest
from documents import anchors_of, examples_of, links_of
from source_texts import ANYTHING, is_said, source_texts

from quark import errors

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TROUBLE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^### `([^\n]+)`\n(.*?)(?=^##|\Z)", TROUBLE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in links_of(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to '{target}', and there is no such file"
        assert not anchor or anchor in anchors_of(file), (
            f"{page.name} links to '{target}', and there is no such heading"
        )


def test_every_page_is_reached_from_the_index():
    index = ROOT / "docs" / "README.md"
    reached = {(index.parent / target.partition("#")[0]).resolve() for target in links_of(index)}
    pages = set((ROOT / "docs").glob("*.md")) | set((ROOT / "docs" / "migrating").glob("*.md"))
    assert pages - reached == {index}


def test_the_code_says_what_troubleshooting_quotes():
    """In one string of the source, or in the output of an example, which another test compares with what is printed."""
    unsaid = [heading for heading, text in ENTRIES if not is_said(heading) and not is_said(heading, examples_of(text))]
    assert not unsaid


def test_a_text_that_nobody_says_is_noticed():
    assert is_said(f"no such file: '{ANYTHING}'. Expected an ONNX model")
    assert not is_said(f"no such file: '{ANYTHING}'. Expected a TensorFlow model")
    assert not is_said("Expected an ONNX model no such file")


def test_troubleshooting_is_more_than_a_few_entries_and_names_every_class():
    classes = {
        name for name, each in vars(errors).items() if isinstance(each, type) and each.__module__ == errors.__name__
    }
    assert classes == set(re.findall(r"^\| `(\w+)` \|", TROUBLE.partition("\n## ")[0], re.MULTILINE))
    assert len(ENTRIES) == TROUBLE.count("\n### ") > 40
    assert all(len(heading.replace(ANYTHING, "")) >= 8 for heading, _ in ENTRIES)


def test_source_texts_join_what_python_joins():
    assert any(text.startswith("no such file: '…'. Expected an ONNX model") for text in source_texts())
