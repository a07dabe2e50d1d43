"""The page in a browser: what it shows, and what clicks and keys do."""

import json
import time
from dataclasses import replace

import pytest
from made_diagnosis import bare_diagnosis, made_diagnosis

from quark.compare import OutputFidelity
from quark.diagnosis import Action, Basis, Remedy, Step
from quark.text import setting, shell_command

pytestmark = pytest.mark.browser

MINUS = "\N{MINUS SIGN}"
ROWS = "tr.layer:not([hidden])"
ORDER = f"return [...document.querySelectorAll('{ROWS}')].map(row => row.id)"


def test_it_opens_quickly_and_says_the_verdict(page):
    assert page.seconds < 2
    assert page.texts("#verdict h1")[0].endswith("Degraded")
    assert "8.5 dB" in page.texts("#verdict .why")[0]
    assert len(page.texts(".first-steps li")) == 3
    assert f"{MINUS}4.30 ± 0.81 points" in page.texts(".card .change")
    assert page.run("return document.title").startswith("resnet50_<xint8>.onnx: degraded")


def test_the_chart_leads_to_the_row(page):
    page.type("#filter", "onerror")
    page.run("document.querySelector('.chart svg').focus()")
    page.press(*["Right"] * 6)
    assert "layer 5" in page.texts(".tip")[0]
    page.press("Enter")
    assert page.run("return document.activeElement.closest('tr').id") == "layer-5"
    assert page.texts("#layer-5 + tr.detail")
    assert len(page.run(ORDER)) == 54  # it was filtered out


def test_the_ranking_leads_to_the_row_and_grows(page):
    assert len(page.texts("#ranking-list > li")) == 5
    page.click("#ranking-list a")
    assert page.run("return document.activeElement.closest('tr').id") in {"layer-4", "layer-16", "layer-30", "layer-41"}
    page.click("#ranking-more button")
    assert len(page.texts("#ranking-list > li")) == 15


def test_an_action_is_told_once_and_numbers_have_commas(page):
    assert "Exclude: leave it in float (17 % of the output error, 288 parameters)" in " ".join(
        page.texts(".remedies li")
    )
    assert "25,557,032 parameters" in page.texts(".card p")


def test_options_are_copied_as_a_shell_takes_them(page):
    assert "--set per_channel=true" in page.texts("#ranking-list code")
    assert page.texts("#ranking-list code")[0].startswith("--set 'nodes_to_exclude=[")
    page.click("#ranking-list .copy button")
    page.run("return new Promise(done => setTimeout(done, 50))")
    assert page.texts("#ranking-list .copy button")[0] in ("Copied", "Select it")


def test_what_is_copied_is_what_python_has_quoted(load):
    """Names that a shell would obey stay arguments: the script takes no text apart, and quotes nothing itself."""
    names = ("fc'; touch INJECTED; echo '", "a\nb --set x; touch INJECTED", "$(touch INJECTED)\x1b[2J\u202e")
    made = made_diagnosis(count=len(names))
    layers = tuple(
        replace(
            layer, name=name, remedies=(Remedy(Action.EXCLUDE, f"leave {name}", setting("nodes_to_exclude", [name])),)
        )
        for layer, name in zip(made.layers, names, strict=True)
    )
    steps = tuple(Step(f"leave '{name}' in float", shell_command(["--set", setting("a", [name])])) for name in names)
    making = {"command": shell_command(["quark", "reproduce", names[0]])}
    page = load(replace(made, layers=layers, steps=steps, making=making))
    page.run("for (const each of document.querySelectorAll('.opener')) each.click()")
    copied = page.run("return [...document.querySelectorAll('.copy code')].map(each => each.textContent)")
    wanted = {making["command"], *(step.arguments for step in steps)}
    wanted |= {remedy.arguments for layer in layers for remedy in layer.remedies}
    assert set(copied) == wanted
    assert all(each.isprintable() for each in copied)


def test_the_theme_changes_and_is_kept(page):
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(colour)
    page.click("#theme")
    dark = page.run(colour)
    assert dark != light
    page._send("POST", "/refresh", {})
    assert page.run(colour) == dark
    page.click("#theme")
    assert page.run(colour) == light


def test_the_system_decides_where_nobody_chose(page):
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(colour)
    page.emulate(prefers_color_scheme="dark")
    assert page.run(colour) != light


def test_nothing_is_wider_than_the_window(page):
    page.run("document.querySelectorAll('details').forEach(each => { each.open = true })")
    page.run("for (const index of [3, 4, 15, 19]) document.querySelector(`#layer-${index} .opener`).click()")
    drawn = set()
    for width in (1280, 1264, 1024, 768, 390, 320):
        page.resize(width, 900)
        page.run("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert page.run("return document.documentElement.scrollWidth") <= width, width
        drawn.add(page.run("return document.querySelector('.chart svg').getAttribute('viewBox')"))
    assert len(drawn) >= 5  # the chart is drawn again, so that its text keeps its size


def test_paper_is_white_open_and_without_controls(page):
    page.emulate("print", prefers_color_scheme="dark")
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for selector in (".toolbar", ".top-tools", ".copy button", "nav"):
        assert page.texts(selector) == []
    assert len(page.texts("tr.detail")) == 3
    assert len(page.texts("#skipped details[open]")) == 3
    page.run("dispatchEvent(new Event('afterprint'))")
    assert page.texts("tr.detail") == []
    assert page.protocol("Page.printToPDF")["data"]


def test_everything_in_the_tab_order_shows_its_focus(page):
    page.run("document.body.focus()")
    page.press("Tab")
    assert page.run("return document.activeElement.className") == "skip-link"
    for _ in range(12):
        page.press("Tab")
        style = page.run("const s = getComputedStyle(document.activeElement); return [s.outlineStyle, s.outlineWidth]")
        assert style == ["solid", "2px"]


def test_a_good_network_is_not_scolded(load):
    page = load(made_diagnosis(outputs=(OutputFidelity("y", 0.9991, 27.4, 0.97, 0.4),), steps=()))
    assert page.texts("#verdict h1")[0].endswith("OK")
    assert page.texts(".first-steps") == []
    assert page.texts("#ranking-title") == ["Most sensitive layers"]
    page = load(made_diagnosis(outputs=(OutputFidelity("y", 1.0, 27.4),), basis=Basis("random", 8, is_random=True)))
    assert page.texts("#verdict h1")[0].endswith("OK, perhaps")


def test_first_steps_are_filled_up_with_the_remedies_of_the_worst_layers(load):
    page = load(made_diagnosis(steps=(Step("leave 3 layers in float", "--set 'nodes_to_exclude=[a]'"),)))
    steps = page.texts(".first-steps li")
    assert len(steps) == 3
    assert page.texts(".first-steps code") == [
        "--set 'nodes_to_exclude=[a]'",
        "--set per_channel=true",
        "--set include_fast_ft=true",
    ]


def test_empty_states_say_so(load):
    page = load(bare_diagnosis())
    assert page.texts("#verdict h1")[0].endswith("Unchecked")
    said = " ".join(page.texts(".empty"))
    for part in ("could be compared", "to rank by", "Every node", "Not checked", "does not say"):
        assert part in said
    assert len(page.run(ORDER)) == 1


def test_without_labels_and_sensitivities(load):
    layers = tuple(replace(layer, rank=None, share=None, sensitivity=None) for layer in made_diagnosis().layers)
    outputs = (OutputFidelity("y", 1.0, float("inf"), None, 0.0), OutputFidelity("z", 0.1, float("-inf"), 0.01, 9.0))
    page = load(made_diagnosis(layers=layers, accuracy=None, speed=None, lint=(), outputs=outputs, steps=()))
    assert page.texts("#verdict h1")[0].endswith("Collapsed")
    assert "not measured" in page.texts("#ranking-lead")[0]
    assert "No labels" in " ".join(page.texts(".card"))
    assert "exact" in page.texts("#outputs table")[0]
    assert "accepts this file" in page.texts("#lint .empty")[0]
    assert page.texts(".chart .bar") == []
    assert len(page.texts("#ranking-list > li")) == 5


def test_the_json_is_saved_as_it_is_in_the_page(page, tmp_path):
    page.protocol("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.click("#save-json")
    end = time.monotonic() + 10
    while not (found := list(tmp_path.glob("*.json"))) and time.monotonic() < end:
        time.sleep(0.02)
    assert json.loads(found[0].read_text()) == made_diagnosis().to_dict()
