"""The table of layers in a browser: sorting, filtering, opening."""

import pytest
from made_diagnosis import ODD_NAMES, made_diagnosis

pytestmark = pytest.mark.browser

NOTHING = "\N{EN DASH}"
ROWS = "tr.layer:not([hidden])"
ORDER = f"return [...document.querySelectorAll('{ROWS}')].map(row => row.id)"
COLUMNS = (
    "order",
    "name",
    "op",
    "weights",
    "inputs",
    "parameters",
    "bits",
    "local",
    "accumulated",
    "cosine",
    "clipped",
    "share",
)
CELLS = f"return [...document.querySelectorAll('{ROWS}')].map(row => row.cells[arguments[0]].textContent)"


def test_five_hundred_layers_open_quickly(load):
    page = load(made_diagnosis(500))
    assert page.seconds < 2
    assert len(page.run(ORDER)) == 500


def test_names_are_text(page):
    page.run("document.querySelectorAll('tr.layer .opener').forEach(each => each.click())")
    assert page.run("return window.broken ?? null") is None
    assert page.run("return document.querySelectorAll('main img, main script, main b, main svg[onload]').length") == 0
    shown = page.run(
        "return [...document.querySelectorAll('tr.layer .opener')].map(each => each.textContent.toWellFormed())"
    )
    assert {name for name in ODD_NAMES.values() if name.isprintable()} <= set(shown)


def test_every_column_sorts_both_ways(page):
    for key in COLUMNS[1:] + COLUMNS[:1]:  # it is in the order of the first column already
        heading = f"th[data-key='{key}']"
        orders, ways = [], []
        for _ in range(2):
            page.click(f"{heading} button")
            orders.append(page.run(ORDER))
            ways.append(page.run("return document.querySelector(arguments[0]).ariaSort", heading))
        assert set(ways) == {"ascending", "descending"}, key
        assert orders[0] != orders[1], key
        assert set(orders[0]) == set(orders[1]) == {f"layer-{index}" for index in range(54)}
        assert page.run("return document.querySelectorAll('th[aria-sort]').length") == 1


def test_sorting_is_by_number_and_leaves_the_unknown_last(page):
    page.click("th[data-key='local'] button")
    texts = page.run(CELLS, COLUMNS.index("local"))
    assert texts[-1] == "exact"
    numbers = [float(text) for text in texts[:-1]]
    assert numbers == sorted(numbers)
    page.click("th[data-key='share'] button")
    texts = page.run(CELLS, COLUMNS.index("share"))
    known = [float(text.rstrip(" %")) for text in texts if text != NOTHING]
    assert known == sorted(known, reverse=True)
    assert texts[len(known) :] == [NOTHING] * (len(texts) - len(known))


def test_sorting_by_the_keyboard(page):
    page.run("document.querySelector(\"th[data-key='clipped'] button\").focus()")
    page.press("Enter")
    assert page.run("return document.querySelector(\"th[data-key='clipped']\").ariaSort") == "descending"
    page.press("Space")
    assert page.run("return document.querySelector(\"th[data-key='clipped']\").ariaSort") == "ascending"


def test_the_filter_narrows_and_escape_clears(page):
    page.press("/")
    assert page.run("return document.activeElement.id") == "filter"
    page.type("#filter", "GEMM uint8")
    some = page.run(ORDER)
    wanted = [layer for layer in made_diagnosis().layers if layer.op_type == "Gemm" and layer.inputs == "uint8"]
    assert 0 < len(some) == len(wanted) < 54
    assert page.texts("#count") == [f"{len(some)} of 54 layers"]
    page.press("Escape")
    assert len(page.run(ORDER)) == 54
    page.type("#filter", "nothing is called so")
    assert page.run(ORDER) == []
    assert "No layer matches" in page.texts("#no-layers")[0]
    page.click("#no-layers button")
    assert len(page.run(ORDER)) == 54


def test_quick_filters_hold_together(page):
    buttons = [f"#quick button:nth-child({number})" for number in (1, 2, 3)]
    page.click(buttons[0])
    worst = page.run(ORDER)
    assert len(worst) == 10
    page.click(buttons[2])
    both = page.run(ORDER)
    assert 0 < len(both) < 10
    assert set(both) < set(worst)
    page.click(buttons[0])
    below = page.run(ORDER)
    assert set(both) <= set(below)
    wanted = [layer for layer in made_diagnosis().layers if min(layer.local.sqnr_db, layer.accumulated.sqnr_db) < 10]
    assert len(below) == len(wanted)


def test_a_row_opens_into_histograms_with_clip_lines(page):
    page.click("#layer-4 .opener")
    assert page.run("return document.querySelector('#layer-4 .opener').ariaExpanded") == "true"
    detail = "#layer-4 + tr.detail"
    assert len(page.texts(f"{detail} figcaption")) == 2
    assert page.run("return document.querySelectorAll(arguments[0]).length", f"{detail} line.clip") == 4
    assert "900-fold" in page.texts(detail)[0]
    before = page.run("return document.querySelector(arguments[0]).getAttribute('d')", f"{detail} path.before")
    page.click(f"{detail} .log-scale")
    assert page.run("return document.querySelector(arguments[0]).getAttribute('d')", f"{detail} path.before") != before
    page.click("#layer-4 .opener")
    assert page.texts(detail) == []


def test_an_open_row_stays_with_its_layer(page):
    page.click("#layer-4 .opener")
    page.click("th[data-key='parameters'] button")
    assert page.texts("#layer-4 + tr.detail")
    page.type("#filter", "onerror")
    assert page.texts("tr.detail") == []


def test_no_layers_at_all(load):
    page = load(made_diagnosis(layers=()))
    assert page.run(ORDER) == []
    assert page.texts("#no-layers")
