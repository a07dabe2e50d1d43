"""Budgets as people write them."""

import math

import pytest

from quark.errors import InvalidValueError
from quark.search import Budget, Limits
from quark.search.trial import Limit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("size=25%", Budget(size=Limit(0.25, is_share=True))),
        ("size=10MB", Budget(size=Limit(10e6))),
        ("size=1.5 gb", Budget(size=Limit(1.5e9))),
        ("drop=1.0", Budget(drop=1.0)),
        ("drop=0", Budget(drop=0.0)),
        ("latency=5ms", Budget(latency=Limit(5.0))),
        ("latency=80%", Budget(latency=Limit(0.8, is_share=True))),
        ("time=10m", Budget(time=600.0)),
        ("TIME=1.5h", Budget(time=5400.0)),
        ("time=90s", Budget(time=90.0)),
    ],
)
def test_is_understood(text, expected):
    assert Budget.parse([text]) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("size", "KIND=VALUE"),
        ("sizes=1MB", "Did you mean size"),
        ("size=10", "size=10MB"),
        ("size=-1MB", "number with its unit"),
        ("size=0MB", "more than 0"),
        ("size=1e3MB", "number with its unit"),
        ("time=10", "time=10m"),
        ("drop=nan", "number with its unit"),
        ("latency=5GB", "latency=10ms"),
    ],
)
def test_is_refused_with_what_is_possible(text, said):
    with pytest.raises(InvalidValueError, match=said):
        Budget.parse([text])


def test_each_kind_once():
    with pytest.raises(InvalidValueError, match="once"):
        Budget.parse(["size=1MB", "size=20%"])


def test_shares_are_of_the_float_network():
    limits = Budget.parse(["size=25%", "latency=50%"]).resolved(1000, 8.0)
    assert limits == Limits(250.0, math.inf, 4.0)
    assert Budget().resolved(1000, 8.0) == Limits()
