"""The page as text: whole, the same every time, and nothing in it but what was put there."""

import json

import pytest
from made_diagnosis import ODD_NAMES, bare_diagnosis, made_diagnosis
from page_outline import Outline, check_self_contained

from quark.compare import OutputFidelity, PartFidelity, Verdict
from quark.diagnosis import Action
from quark.report.page import page_of
from quark.report.page.document import (
    ACTIONS,
    PRINT_STYLE,
    REPORT_SCRIPTS,
    REPORT_STYLES,
    SHARED_SCRIPTS,
    SHARED_STYLES,
    as_json_block,
)


@pytest.fixture(scope="module")
def page():
    return page_of(made_diagnosis())


@pytest.fixture(scope="module")
def outline(page):
    return Outline(page)


def test_it_is_well_formed(outline):
    assert outline.open == []
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = {
        value for _, element in outline.elements for key, value in element.items() if key in ("aria-labelledby", "for")
    }
    assert wanted <= {*ids, "verdict-word"}  # the script makes the heading of the verdict


@pytest.mark.parametrize(
    "diagnosis", [made_diagnosis(), bare_diagnosis(), made_diagnosis(500)], ids=["made", "bare", "big"]
)
def test_it_holds_the_whole_diagnosis(diagnosis):
    assert json.loads(Outline(page_of(diagnosis)).text_of("diagnosis")) == diagnosis.to_dict()


def test_the_parts_of_outputs_are_there_with_their_verdicts():
    part = PartFidelity("channels 4..21 of axis 1", "scores", "overlap of scores", 0.4, 3, 0.1, severity=2.2)
    page = page_of(made_diagnosis(outputs=(OutputFidelity("output0", 0.99, 31.0, parts=(part,)),)))
    assert '"verdict":"collapsed"' in page
    for text in ('"name":"channels 4..21 of axis 1"', '"is_sample_worse":true', '"worst_sample":3'):
        assert text in page


def test_every_layer_is_there(outline):
    layers = json.loads(outline.text_of("diagnosis"))["layers"]
    assert [layer["name"] for layer in layers] == [layer.name for layer in made_diagnosis().layers]
    assert set(ODD_NAMES.values()) <= {layer["name"] for layer in layers}


def test_no_name_becomes_markup(page, outline):
    assert [tag for tag, _ in outline.elements if tag in ("script", "style")] == ["style", "script", "script", "script"]
    assert not [tag for tag, _ in outline.elements if tag in ("img", "svg", "iframe", "object", "b")]
    assert not [key for _, attributes in outline.elements for key in attributes if key.startswith("on")]
    block = page[page.index('id="diagnosis"') :]
    assert "<" not in block[block.index(">") + 1 : block.index("</script>")]


def test_the_policy_allows_its_own_script_and_style_and_no_connection(page):
    check_self_contained(page)


def test_the_same_diagnosis_gives_the_same_bytes(page):
    assert page_of(made_diagnosis()) == page
    page.encode("utf-8")  # names may hold what no encoding has


def test_it_is_small(page):
    assert len(page) < 200_000
    assert len(page_of(made_diagnosis(500))) < 1_000_000


def test_every_part_is_used_and_there():
    from importlib.resources import files

    parts = {each.name for each in files("quark.report.page").iterdir() if each.name.endswith((".css", ".js", ".html"))}
    shared = {*SHARED_STYLES, *SHARED_SCRIPTS, PRINT_STYLE, "page.html"}
    assert parts == shared | {*REPORT_STYLES, *REPORT_SCRIPTS, "report.html"}


def test_every_action_and_verdict_has_words(outline):
    facts = json.loads(outline.text_of("facts"))
    assert set(facts["actions"]) == {action.value for action in Action} == {action.value for action in ACTIONS}
    assert set(facts["meanings"]) == {verdict.value for verdict in Verdict}


def test_json_blocks_end_no_element():
    text = as_json_block({"a": "</script><!--<script>"})
    assert "<" not in text
    assert json.loads(text) == {"a": "</script><!--<script>"}
