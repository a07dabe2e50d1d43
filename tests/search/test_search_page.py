"""The page of a search: complete in itself, and safe whatever things are called."""

import re
from pathlib import Path

from hypothesis import given, settings
from made_trials import LIMITS, failed, trial, trials

from quark.search import FloatFacts, Limits, SearchResult
from quark.search.page import page
from quark.search.plot import plot

SOURCE = FloatFacts("net.onnx", 1000, 2.0, "8 samples of <img>", 0.75)


def made(some, limits=None, **fields):
    return SearchResult(Path("out"), SOURCE, limits or Limits(), tuple(some), **fields)


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
    text = page(made([trial(evil), failed("x", evil)], notes=(evil,), skipped=((evil, evil),), command=evil))
    assert evil not in text
    assert text.count("&lt;script&gt;alert(1)") >= 5


def test_needs_nothing_from_elsewhere():
    text = page(made([trial("a"), trial("b", size=50, drop=9.0)], Limits(70, 5.0, 3.0)))
    assert "http:" not in text
    assert "https:" not in text
    assert "src=" not in text
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert 'class="limit"' in text


def test_a_search_without_results_has_a_page():
    assert "nothing was tried yet" in page(made([]))
    assert "nothing worked" in page(made([failed("a")]))
