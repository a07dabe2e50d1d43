"""Mixed precision without a graph: plans as files, the search, and budgets against all subsets."""

from __future__ import annotations

import json
import math
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest

from quark.errors import InvalidValueError, UnknownNameError
from quark.features.mixed_precision.plan import Figure, LayerPrecision, Metric, MixedPlan, Precision
from quark.features.mixed_precision.search import least_harm, least_harm_greedy, lower_most, rising

PLAN = MixedPlan(
    (
        LayerPrecision("a/b", "Conv", 1.5e-3, 864, 10_838_016, Precision.LOW),
        LayerPrecision("c", "MatMul", math.inf, 0, None, Precision.HIGH),
        LayerPrecision("d", "Gemm", None, 10, 10, Precision.HIGH),
    ),
    "int16 activations, int8 weights",
    "int8",
    (Figure(Metric.ACCURACY, 0.748, 0.744, 0.754), Figure(Metric.SQNR, -math.inf, 20.0)),
    "model",
    "basis",
    16,
)


def test_a_plan_survives_its_file():
    assert MixedPlan.from_json(PLAN.to_json()) == PLAN


def test_every_layer_has_a_line():
    lines = [line for line in PLAN.to_json().splitlines() if '"layer":' in line]
    assert [json.loads(line.strip().rstrip(","))["layer"] for line in lines] == ["a/b", "c", "d"]


def test_a_person_may_write_names_and_choices_alone():
    plan = MixedPlan.from_json('{"layers": [{"layer": "x", "choice": "low"}, {"layer": "y", "choice": "high"}]}')
    assert plan.lowered == ("x",)
    assert plan.layers[0].sensitivity is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a mapping of fields"),
        ("{}", "list of 'layers'"),
        ('{"layers": 3}', "'layers' is 3: expected a list"),
        ('{"version": 9, "layers": []}', "version 9"),
        ('{"layers": [{"choice": "low"}]}', r"'layers\[0\]\.layer' is missing"),
        (
            '{"layers": [{"layer": "x", "choice": "lower"}]}',
            "layer 'x': field 'choice' is 'lower': expected .* high, low",
        ),
        ('{"layers": [{"layer": "x"}]}', "layer 'x': field 'choice' is missing"),
        ('{"layers": [{"layer": "x", "choice": "low", "sensitivity": "much"}]}', "layer 'x': field 'sensitivity'"),
        ('{"layers": [{"layer": "x", "choice": "low", "sensitivity": -1}]}', "at least 0"),
        ('{"layers": [{"layer": "x", "choice": "low", "weights": true}]}', "layer 'x': field 'weights' is True"),
        ('{"layers": [{"layer": "x", "choice": "low"}, {"layer": "x", "choice": "low"}]}', "'x' is in it more"),
        ('{"layers": [], "figures": [{"metric": "luck"}]}', "figures"),
        ('{"layers": [], "measured": 3}', "measured"),
        ('{"layers": [], "figures": 7}', "'figures' is 7: expected a list"),
        ('{"layers": [], "measured": {"samples": Infinity}}', "'measured.samples' is inf: expected a finite number"),
        ('{"layers": [{"layer": "x", "choice": "low", "weights": 1' + "0" * 400 + "}]}", "401 digits"),
        ("[" * 3000, "plan of mixed precision is nested"),
        ('{"layers": [], "high": 3}', "'high' is 3"),
    ],
)
def test_mistakes_in_a_file_are_named(text, message):
    with pytest.raises(InvalidValueError, match=message):
        MixedPlan.from_json(text)


def test_an_unknown_field_offers_the_nearest():
    with pytest.raises(UnknownNameError, match="layer 'x' 'choices'. Did you mean choice"):
        MixedPlan.from_json('{"layers": [{"layer": "x", "choices": "low"}]}')


def test_accuracy_at_the_limit_is_enough():
    assert Figure(Metric.ACCURACY, 0.74, 0.75 - 0.01).is_met
    assert not Figure(Metric.ACCURACY, 0.7399, 0.75 - 0.01).is_met
    assert Figure(Metric.L2, 1.0, 1.0).is_met
    assert not Figure(Metric.L2, math.inf, 1.0).is_met


def test_layers_rise_by_sensitivity_and_stay_in_order_where_equal():
    layers = [LayerPrecision(n, sensitivity=s) for n, s in (("a", 2.0), ("b", 1.0), ("c", 1.0), ("d", None))]
    assert rising(layers) == ["b", "c", "a", "d"]


def additive(errors, limit, calls):
    def judge(lowered):
        calls.append(lowered)
        return (Figure(Metric.L2, sum(errors[name] for name in lowered), limit),)

    return judge


@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_the_longest_good_start_within_its_trials(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 60))
    errors = {f"n{i}": float(each) for i, each in enumerate(np.sort(random.random(count)))}
    limit = float(random.random() * sum(errors.values()) * 1.1)
    calls: list[Any] = []
    remembered: list[Any] = []
    best = lower_most(list(errors), additive(errors, limit, calls), remembered.append)
    assert best.is_met
    assert len(best.lowered) == int((np.cumsum(list(errors.values())) <= limit).sum())
    assert len(calls) <= 24
    assert remembered[-1] == best
    ranks = [each.rank for each in remembered]
    assert ranks == sorted(ranks, reverse=True)


def test_single_layers_behind_the_first_bad_one_are_tried():
    errors = {"a": 1.0, "b": 50.0, "c": 1.0, "d": 1.0, "e": 60.0}  # sensitivities were wrong about b
    best = lower_most(list(errors), additive(errors, 3.5, []))
    assert best.lowered == ("a", "c", "d")
    errors = {"a": 50.0, "b": 1.0, "c": 60.0, "d": 1.0}
    assert lower_most(list(errors), additive(errors, 3.5, [])).lowered == ("b", "d")


def test_where_nothing_is_good_enough_none_is_lowered():
    best = lower_most(["a", "b", "c"], lambda lowered: (Figure(Metric.L2, 9.0 + len(lowered), 1.0),))
    assert best.lowered == ()
    assert not best.is_met


@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_no_more_are_lowered_than_wanted(most):
    errors = dict.fromkeys("abc", 0.1)
    assert len(lower_most(list(errors), additive(errors, 1.0, []), most=most).lowered) == min(most, 3)


def subsets(count):
    return chain.from_iterable(combinations(range(count), size) for size in range(count + 1))


@pytest.mark.parametrize("seed", range(40))
def test_the_exact_choice_is_the_best_of_all_subsets(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 11))
    harm, saved = random.random(count), random.integers(0, 30, count)
    wanted = float(random.integers(0, saved.sum() + 4))
    enough = [subset for subset in subsets(count) if saved[list(subset)].sum() >= wanted]
    exact, greedy = least_harm(harm, saved, wanted), least_harm_greedy(harm, saved, wanted)
    if not enough:
        assert exact is None
        assert greedy is None
        return
    best = min(harm[list(each)].sum() for each in enough)
    for value in (exact, greedy):
        assert saved[list(value)].sum() >= wanted
        assert harm[list(value)].sum() >= best - 1e-12
    assert harm[list(exact)].sum() == pytest.approx(best)


def test_large_budgets_take_no_time_and_are_no_worse_than_greedy():
    random = np.random.default_rng(0)
    saved = random.integers(100, 3_000_000, 300) * 8
    harm = random.random(300) * np.sqrt(saved)
    exact, greedy = (solve(harm, saved, saved.sum() * 0.6) for solve in (least_harm, least_harm_greedy))
    assert saved[list(exact)].sum() >= saved.sum() * 0.6
    assert harm[list(exact)].sum() <= harm[list(greedy)].sum()


def test_what_breaks_the_network_is_lowered_last():
    assert least_harm([math.inf, 1.0, 1.0], [10, 5, 5], 10) == (1, 2)
    assert len(least_harm([math.inf, 1.0, 1.0], [10, 5, 5], 11)) == 2
    assert least_harm([1.0, 1.0], [0, 0], 0) == ()
