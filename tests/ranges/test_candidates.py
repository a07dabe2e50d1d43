"""One histogram gives the ranges that each method gives by itself."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from quark.errors import InvalidValueError
from quark.formats import get_format
from quark.formats.spec import IntFormat
from quark.ranges import Entropy, MinMax, MinMSE, Percentile, TensorRange, range_of
from quark.ranges.histogram import BINS
from quark.ranges.histogram_methods import CandidateObserver

Array = np.ndarray[Any, Any]


def integer(name: str) -> IntFormat:
    fmt = get_format(name)
    assert isinstance(fmt, IntFormat)
    return fmt


INT8, UINT8 = integer("int8"), integer("uint8")
METHODS = (MinMax(), Percentile(99.999), MinMSE(), Entropy())
codes = pytest.mark.parametrize(("fmt", "is_symmetric"), [(INT8, True), (UINT8, False)], ids=["int8", "uint8"])
RANDOM = np.random.default_rng(0)
DATA = {
    "heavy tails": RANDOM.standard_t(3, 50_000).astype(np.float32),
    "never negative": np.abs(RANDOM.standard_t(3, 50_000)).astype(np.float32),
    "far from zero": (9 + RANDOM.standard_normal(50_000)).astype(np.float32),
    "one outlier": np.append(RANDOM.standard_normal(50_000), 4000).astype(np.float32),
}


def candidates(x: Array, fmt: IntFormat, is_symmetric: bool, observed: Any = None) -> dict[str, TensorRange]:
    observer = CandidateObserver(fmt, is_symmetric, observed)
    pieces = np.array_split(x, 3)
    if observed is None:
        for piece in pieces:
            observer.observe(piece)
    for piece in pieces:
        observer.observe_again(piece)
    return observer.candidates()


@codes
@pytest.mark.parametrize("name", DATA)
def test_every_candidate_is_what_its_method_gives(name: str, fmt: IntFormat, is_symmetric: bool) -> None:
    x = DATA[name]
    found = candidates(x, fmt, is_symmetric)
    assert list(found) == [str(method) for method in METHODS]
    bin_width = 2 * float(np.abs(x).max()) / BINS
    for method in METHODS:
        own, shared = range_of(x, method, fmt, is_symmetric), found[str(method)]
        # asymmetric methods have a histogram of their own, which spans only the data
        tolerance = 0.0 if is_symmetric or isinstance(method, (MinMax, Entropy)) else 2 * bin_width
        if isinstance(method, MinMSE) and tolerance:
            tolerance += 0.03 * (own.highest - own.lowest)  # neighbouring factors, whose errors are nearly the same
        assert shared.lowest == pytest.approx(own.lowest, rel=0, abs=tolerance), method
        assert shared.highest == pytest.approx(own.highest, rel=0, abs=tolerance), method


def test_candidates_differ_where_there_is_an_outlier() -> None:
    found = candidates(DATA["one outlier"], UINT8, False)
    assert found["MinMax"].highest == 4000
    assert found["Entropy"].highest < 3000


@codes
def test_a_candidate_names_its_method_and_what_was_observed(fmt: IntFormat, is_symmetric: bool) -> None:
    x = DATA["heavy tails"]
    found = candidates(x, fmt, is_symmetric)
    assert {name: each.method for name, each in found.items()} == {name: name for name in found}
    assert found["MinMax"].observed == (x.min(), x.max())


@codes
@pytest.mark.parametrize("name", DATA)
def test_known_extremes_save_the_first_pass(name: str, fmt: IntFormat, is_symmetric: bool) -> None:
    x = DATA[name]
    observed = (float(x.min()), float(x.max()))
    assert candidates(x, fmt, is_symmetric, observed) == candidates(x, fmt, is_symmetric)


def test_without_extremes_there_is_nothing_to_count_in() -> None:
    observer = CandidateObserver(INT8, True, (-1.0, 1.0))
    with pytest.raises(InvalidValueError, match="needs the data twice"):
        observer.candidates()


@codes
@pytest.mark.parametrize("value", [0.0, 2.5, -3.0])
def test_data_of_one_value_have_that_range_by_every_method(value: float, fmt: IntFormat, is_symmetric: bool) -> None:
    found = candidates(np.full(100, value, np.float32), fmt, is_symmetric)
    assert len(found) == len(METHODS)
    assert set(found.values()) == {TensorRange(value, value)}


def test_two_observers_merge_into_one_of_all() -> None:
    x = DATA["heavy tails"]
    first = CandidateObserver(UINT8, False, (float(x.min()), float(x.max())))
    second = copy.deepcopy(first)
    first.observe_again(x[:20_000])
    second.observe_again(x[20_000:])
    first.merge(second)
    assert first.candidates() == candidates(x, UINT8, False)
