"""Pictures of histograms: where bars, marks and ticks are, and the names of files."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from quark.errors import InvalidValueError
from quark.report.histogram_picture import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    histogram_of,
    picture_names,
    ticks,
    write_histogram,
)

BAR, MARK = (52, 106, 166), (200, 40, 40)


def test_bars_have_their_height_and_marks_their_place(tmp_path):
    path = write_histogram(tmp_path / "new" / "x.png", [10, 0, 5, 0], [0, 1, 2, 3, 4], "x", [(3.5, "limit")])
    pixels = np.array(Image.open(path).convert("RGB"))
    column = lambda value: round(LEFT + value / 4 * (RIGHT - LEFT))  # noqa: E731
    blue = lambda value: int((pixels[TOP:BOTTOM, column(value)] == BAR).all(1).sum())  # noqa: E731
    assert blue(0.5) == pytest.approx((BOTTOM - TOP) / 1.05, abs=2)
    assert blue(2.5) == pytest.approx((BOTTOM - TOP) / 2.1, abs=2)
    assert blue(1.5) == blue(3.2) == 0
    red = (pixels[BOTTOM - 100 : BOTTOM] == MARK).all(2).any(0).nonzero()[0]
    assert abs(red.mean() - column(3.5)) <= 1


def test_many_bins_are_joined_and_single_values_have_a_picture(tmp_path):
    counts, edges = histogram_of(np.random.default_rng(0).normal(size=5000))
    assert (counts.sum(), len(edges)) == (5000, len(counts) + 1)
    pixels = np.array(Image.open(write_histogram(tmp_path / "n.png", counts, edges, "n")).convert("RGB"))
    assert (pixels[BOTTOM - 5] == BAR).all(1).sum() > 0.5 * (RIGHT - LEFT)
    for values in (np.zeros(7), np.array([]), np.array([1e30, np.inf])):
        write_histogram(tmp_path / "single.png", *histogram_of(values), "a\x1bname\u4e2d " * 40)


def test_ticks_are_round_and_few():
    assert ticks(0, 1e6) == [0, 200000, 400000, 600000, 800000, 1000000]
    assert all(3 <= len(ticks(-width, width)) <= 10 for width in (1e-30, 3e-7, 0.11, 77, 4e20))


def test_names_of_pictures_do_not_collide():
    names = picture_names(["a/b", "a.b", "A:b", "x" * 500, "../../up", ""])
    assert names["a/b"] == "a_b.png"
    assert len({name.casefold() for name in names.values()}) == 6
    assert all("/" not in name and len(name) < 255 for name in names.values())


def test_bad_histograms_are_refused(tmp_path):
    with pytest.raises(InvalidValueError, match="2 counts needs 3 edges, not 2"):
        write_histogram(tmp_path / "x.png", [1, 2], [0, 1], "x")
    with pytest.raises(InvalidValueError, match="finite"):
        write_histogram(tmp_path / "x.png", [1, np.nan], [0, 1, 2], "x")
    assert not list(tmp_path.iterdir())
