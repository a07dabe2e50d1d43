"""The page of a search: complete in itself, and safe whatever things are called."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from made_trials import LIMITS, failed, trial, trials
from page_outline import Outline, check_self_contained

from quark.search import FloatFacts, Limits, SearchResult
from quark.search.page import page, plot

SOURCE = FloatFacts("net.onnx", 1000, 2.0, "8 samples of <img>", 0.75)


def made(some, limits=None, source=SOURCE, **fields):
    return SearchResult(Path("out"), source, limits or Limits(), tuple(some), **fields)


@given(trials(), LIMITS)
@settings(max_examples=30)
def test_every_trial_is_in_the_table_and_every_able_one_in_the_plot(some, limits):
    text = page(made(some, limits))
    assert text.count("<tr") == 1 + len(some)
    assert text.count("<circle") == len([each for each in some if each.measured is not None])
    assert "nan" not in re.findall(r"<svg.*</svg>", text, re.DOTALL)[:1]


@given(trials(least=1), LIMITS)
@settings(max_examples=30)
def test_dots_lie_inside_the_drawing(some, limits):
    for x, y in re.findall(r'cx="([^"]*)" cy="([^"]*)"', plot(some, limits)):
        assert 0 <= float(x) <= 880
        assert 0 <= float(y) <= 460


def test_names_are_escaped():
    evil = "<script>alert(1)</script>"
    source = replace(SOURCE, name=evil)
    some = [trial(evil), failed("x", evil)]
    text = page(made(some, notes=(evil,), skipped=((evil, evil),), command=evil, source=source))
    assert evil not in text
    assert Outline(text).open == []
    assert [tag for tag, _ in Outline(text).elements].count("script") == 1
    assert text.count("&lt;script&gt;alert(1)") >= 5


def test_needs_nothing_from_elsewhere():
    text = page(made([trial("a"), trial("b", size=50, drop=9.0)], Limits(70, 5.0, 3.0)))
    check_self_contained(text)
    assert 'class="limit"' in text


def test_a_search_without_results_has_a_page():
    assert "nothing was tried yet" in page(made([]))
    assert "nothing worked" in page(made([failed("a")]))


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_heading_sorts_the_table_and_failed_trials_stay_last(tmp_path):
    some = [
        failed("z"),
        trial("b", drop=10.0, kl=0.5),
        trial("a", drop=9.0),
        trial("c", drop=float("inf"), kl=0.25),
        trial("d", drop=-1.0, kl=float("nan")),
    ]
    text = page(made(some, command="quark quantize"))
    click = """<script>
    const report = document.createElement("p");
    const click = (column) => {
      document.querySelectorAll("#trials th button")[column].click();
      const names = [...document.querySelectorAll("#trials tbody td:first-child")].map((cell) => cell.textContent);
      report.append(`${names.join("")} `);
    };
    [0, 4, 4, 5].forEach(click);
    report.append(document.querySelector(".copy button").textContent);
    document.body.append(report);
    </script></body>"""
    # the policy forbids other scripts than the page's own, such as this one
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace("</body>", click)
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "<p>abcdz dabcz cbadz cbadz Copy</p>" in done.stdout
