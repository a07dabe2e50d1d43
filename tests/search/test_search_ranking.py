"""The front and the order, as properties."""

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from made_trials import LIMITS, failed, trial, trials

from quark.search import Limits, Trial, pareto_front, ranked
from quark.search.trial import ALIKE_IN_SIZE, dominates, excess, is_within


@settings(max_examples=40)
@given(trials())
def test_nothing_beats_the_front_and_everything_else_is_beaten_by_it(some):
    front = pareto_front(some)
    able = [each for each in some if each.measured is not None]
    for each in front:
        assert not any(dominates(other.measured, each.measured) for other in able)
    for each in able:
        if each not in front:
            assert any(dominates(other.measured, each.measured) for other in front)


@settings(max_examples=40)
@given(trials(), st.randoms(use_true_random=False))
def test_neither_front_nor_order_hang_on_how_trials_came(some, generator: random.Random):
    shuffled = generator.sample(some, len(some))
    limits = Limits(drop=1.0)
    assert pareto_front(shuffled) == pareto_front(some)
    assert ranked(shuffled, limits) == ranked(some, limits)


@settings(max_examples=40)
@given(trials(), trials())
def test_what_is_beaten_stays_beaten(some, more):
    renamed = [Trial(f"m{each.name}", each.preset, each.stage, (), each.measured, each.failure) for each in more]
    names = {trial.name for trial in pareto_front(some)}
    beaten = {each.name for each in some} - names
    assert not beaten & {trial.name for trial in pareto_front([*some, *renamed])}


@settings(max_examples=40)
@given(trials(), LIMITS)
def test_the_order_is_within_then_beyond_then_failed(some, limits):
    order = ranked(some, limits)
    assert sorted(each.name for each in order) == sorted(each.name for each in some)
    kinds = [0 if is_within(each, limits) else 1 if each.measured is not None else 2 for each in order]
    assert kinds == sorted(kinds)
    beyond = [excess(each.measured, limits) for each, kind in zip(order, kinds, strict=True) if kind == 1]
    assert beyond == sorted(beyond)
    assert all(each > 0 for each in beyond)


@settings(max_examples=40)
@given(trials(least=1), LIMITS)
def test_the_first_is_not_beaten_by_another_within_the_limits(some, limits):
    within = [each for each in ranked(some, limits) if is_within(each, limits)]
    if within:
        assert within[0] in pareto_front(within)
        best = within[0].measured
        if limits.drop < float("inf"):
            smallest = min(each.measured.size_bytes for each in within)
            assert best.size_bytes <= ALIKE_IN_SIZE * smallest
        else:
            assert best.drop == min(each.measured.drop for each in within)


def test_a_limit_on_the_drop_asks_for_the_smallest_and_files_alike_in_size_stand_by_drop():
    some = [trial("tiny", 1000, 0.9), trial("alike", 1049, -0.5), trial("good", 1100, -1.0)]
    assert [each.name for each in ranked(some, Limits(drop=1.0))] == ["alike", "tiny", "good"]
    assert [each.name for each in ranked(some, Limits())] == ["good", "alike", "tiny"]


def test_divergence_decides_between_equal_drops():
    some = [trial("b", 10, latency=2.0, kl=0.2), trial("a", 10, latency=2.0), trial("c", 20, latency=1.0, kl=0.1)]
    beaten = trial("d", 30, latency=3.0, kl=0.0)
    assert [each.name for each in ranked([*some, beaten], Limits())] == ["c", "b", "a", "d"]


def test_equal_trials_are_on_the_front_together():
    assert len(pareto_front([trial("a"), trial("b"), failed("c")])) == 2


@settings(max_examples=40)
@given(trials())
def test_trials_survive_json(some):
    assert [Trial.from_dict(json.loads(json.dumps(each.to_dict(), allow_nan=False))) for each in some] == some


@settings(max_examples=40)
@given(trials(), LIMITS)
def test_what_the_target_gains_nothing_by_comes_behind_the_rest_within_the_limits(some, limits):
    def gains(each: Trial) -> bool:
        return each.figures.latency_ms <= 1.0

    order = ranked(some, limits, gains)
    within = [each for each in order if is_within(each, limits)]
    assert [gains(each) for each in within] == sorted((gains(each) for each in within), reverse=True)
    plain = [each for each in ranked(some, limits) if is_within(each, limits) and gains(each)]
    assert [each for each in within if gains(each)] == plain
