"""Why a candidate is not worth its time, given what was tried: a pure function with one reason a line.

A dearer variant of a format has the size of its base. So it is left out where the base

    was left out or failed
    is beyond the size budget
    is within the drop budget already, or lost nothing where there is none
    is no smaller than something that is within all budgets
    is beaten by something else: finetuning is for those of the front

and anything is left out that cannot be small enough by the bits of its weights, or be done before the time is up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from quark.report.quantities import size_text
from quark.search.budget import Limits
from quark.search.candidates import Candidate
from quark.search.ranking import is_within, pareto_front
from quark.search.trial import Stage, Trial

COSTS: Mapping[Stage, float] = {Stage.DIRECT: 1.0, Stage.RECIPE: 1.5, Stage.MIXED: 6.0, Stage.FINETUNED: 20.0}


@dataclass(frozen=True)
class Situation:
    """Where the search stands. `weights` counts those of the float network; `seconds_left` may be infinite."""

    trials: Sequence[Trial]
    limits: Limits
    weights: int
    seconds_left: float = math.inf


def reason_to_skip(candidate: Candidate, now: Situation) -> str | None:
    """The reason in words, or None: try it."""
    if now.seconds_left <= 0:
        return "the time is up"
    smallest = now.weights * candidate.bits / 8
    if smallest > now.limits.size_bytes:
        return f"weights of {candidate.bits:g} bits take {size_text(int(smallest))}: more than the size budget"
    if candidate.base:
        reason = _reason_of_base(candidate, now)
        if reason is not None:
            return reason
    return _reason_of_time(candidate, now)


def _reason_of_base(candidate: Candidate, now: Situation) -> str | None:
    base = next((each for each in now.trials if each.name == candidate.base), None)
    if base is None or base.measured is None:
        return f"{candidate.base} {'was not tried' if base is None else 'failed'}"
    size, limits = base.measured.size_bytes, now.limits
    if size > limits.size_bytes:
        return f"{base.name} has the same size, which is beyond the budget"
    if base.measured.drop <= (limits.drop if limits.drop < math.inf else 0.0):
        return f"{base.name} is within the drop budget" if limits.drop < math.inf else f"{base.name} lost nothing"
    if limits.drop < math.inf:
        better = next((each for each in now.trials if is_within(each, limits) and _size(each) <= size), None)
        if better is not None:
            return f"{better.name} is as small and within all budgets"
    if candidate.stage is Stage.FINETUNED and base not in pareto_front(now.trials):
        return f"{base.name} is beaten in size, drop and latency"
    return None


def _size(trial: Trial) -> float:
    return math.inf if trial.measured is None else trial.measured.size_bytes


def _reason_of_time(candidate: Candidate, now: Situation) -> str | None:
    if now.seconds_left == math.inf:
        return None
    usual = [each.seconds for each in now.trials if each.stage is Stage.DIRECT and each.measured is not None]
    expected = COSTS[candidate.stage] * median(usual) if usual else 0.0
    if expected <= now.seconds_left:
        return None
    return f"it would take about {expected:.0f} s, and {now.seconds_left:.0f} s are left"
