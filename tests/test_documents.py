"""The documents hold together: links lead somewhere, and what they quote is what the code says."""

import json
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


# where the README's table has its figures: a record and what is taken of it; which rows are of which column
RECORDS = {
    "classifier": ("accuracy-both-peers-2026-11-18", "mobilenet_v2", "top1"),
    "detector": ("networks-peers-2026-11-18", "yolov8n", "box_f1"),
    "text encoder": ("networks-peers-2026-11-18", "minilm", "cosine"),
    "speech": ("transformers-speech-2026-11-18", "whisper_enc", "wer_percent"),
}
COLUMNS = ("float", "ours", "onnxruntime", "nncf")
FOUR_BITS = re.compile("INT4|4 bits")


def recorded(name, network, measure):
    """The figures of a record by quantizer: of several 8-bit configurations the best."""
    values: dict[str, list[float]] = {column: [] for column in COLUMNS}
    for row in json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())["figures"]:
        if row.get("network") == network and not FOUR_BITS.search(row["configuration"]):
            values[row["quantizer"]].append(row["measures"][measure])
        elif row.get("model") == network:
            scores = {"float": row["float_top1"], **{who: each[measure] for who, each in row["scores"].items()}}
            for column in COLUMNS:
                values[column].append(scores[column])
    best = min if measure == "wer_percent" else max
    return [best(values[column], default=None) for column in COLUMNS]


def test_the_table_of_the_readme_is_short_and_true():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (classifier|detector|text encoder|speech): [^|]*\|([^\n]*)\|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == list(RECORDS)
    for name, cells in rows:
        record, network, measure = RECORDS[name]
        assert f"`{record}`" in text
        figures = [cell.strip() for cell in cells.split("|")]
        for figure, value in zip(figures, recorded(record, network, measure), strict=True):
            assert (figure == "not measured") == (value is None)
            if value is not None:
                assert len(figure.replace(".", "").lstrip("0")) <= 3, f"{name}: {figure} has more than three figures"
                unit = 10.0 ** -len(figure.partition(".")[2])
                # half a unit, and a little for a value in the middle that binary fractions put on either side
                assert abs(float(figure) - value) <= 0.5001 * unit, f"{name}: {figure}, and the record has {value}"


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
