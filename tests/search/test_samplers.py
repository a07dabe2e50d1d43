"""Samplers stay within the space, follow its conditions, and TPE finds what random sampling does not."""

from __future__ import annotations

import importlib.util
import math

import pytest

from quark.errors import MissingDependencyError, UnknownNameError
from quark.search.samplers import nested, sampler_named
from quark.search.spaces import space_of

SPACE = space_of(
    {
        "kind": ["a", "b", None],
        "a_params": {
            "rate": {"type": "float", "low": 1e-6, "high": 1e-1, "log": True},
            "steps": {"type": "int", "low": 3000, "high": 20000, "step": 3000},
            "only_if": {"kind": "a"},
        },
    }
)


@pytest.mark.parametrize("name", ["Random", "TPE"])
def test_points_are_in_the_space(name):
    sampler = sampler_named(name, SPACE, seed=3)
    kinds = set()
    for number in range(60):
        values = sampler.ask()
        kinds.add(values["kind"])
        assert ("a_params_rate" in values) == (values["kind"] == "a")
        if values["kind"] == "a":
            assert 1e-6 <= values["a_params_rate"] <= 1e-1
            assert values["a_params_steps"] in range(3000, 20001, 3000)
        config = nested(SPACE, values)
        assert ("a_params" in config) == (values["kind"] == "a")
        sampler.tell(values, float(number % 7))
    assert kinds == {"a", "b", None}


@pytest.mark.parametrize("name", ["Random", "TPE"])
def test_the_same_seed_gives_the_same_points(name):
    def points(seed):
        sampler, found = sampler_named(name, SPACE, seed), []
        for number in range(20):
            found.append(sampler.ask())
            sampler.tell(found[-1], float(number))
        return found

    assert points(1) == points(1)
    assert points(1) != points(2)


def loss(values):
    """Least at kind 'a', rate 1e-3, 12000 steps."""
    if values["kind"] != "a":
        return 10.0
    return abs(math.log10(values["a_params_rate"]) + 3) + abs(values["a_params_steps"] - 12000) / 3000


def mean_best(name, trials, seeds=8):
    total = 0.0
    for seed in range(seeds):
        sampler, best = sampler_named(name, SPACE, seed), math.inf
        for _ in range(trials):
            values = sampler.ask()
            best = min(best, loss(values))
            sampler.tell(values, loss(values))
        total += best
    return total / seeds


def test_tpe_learns():
    assert mean_best("TPE", 50) < 0.6 * mean_best("Random", 50)


def test_tpe_copes_with_failures_and_with_points_of_other_spaces():
    sampler = sampler_named("TPE", SPACE)
    for value in (math.nan, math.inf, 1.0):
        for _ in range(8):
            sampler.tell({"kind": "z", "a_params_rate": "text", "other": 3}, value)
    assert sampler.ask()["kind"] in ("a", "b", None)


def test_samplers_of_optuna_and_unknown_ones():
    with pytest.raises(UnknownNameError, match="TPE"):
        sampler_named("TPEE", SPACE)
    if importlib.util.find_spec("optuna") is None:
        with pytest.raises(MissingDependencyError, match="pip install optuna, or use 'TPE', 'Random' or 'Grid'"):
            sampler_named("CmaEs", SPACE)
    else:
        sampler = sampler_named("QMC", SPACE)
        sampler.tell(sampler.ask(), 1.0)
