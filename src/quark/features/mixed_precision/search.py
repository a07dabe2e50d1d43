"""Choose which layers to lower: as many as quality allows, or with the least harm within a budget.

By quality, layers are lowered in the order of their sensitivity. Whether a number of them is good enough is found by
trying the real network, and the number by bisection; then single layers behind the first that was too much are tried on
top. Every trial takes a pass over the samples, so their number is limited. `remember` gets the best so far as soon as
it is known.

Within a budget,

    minimize   sum of harm of the lowered        so that   sum of saved of the lowered >= wanted

which is the 0/1 knapsack of those that stay: the most harm avoided within the room that is left. `least_harm` solves it
exactly, with the list of all sets that no other dominates (Nemhauser and Ullmann), except those that cannot become the
best any more: the gain of a set is bounded by what it would be if the last item were divisible. `least_harm_greedy`
goes by harm per saving, and then takes back what turned out not to be needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.features.mixed_precision.plan import Figure, LayerPrecision

Array = NDArray[Any]
MOST_TRIALS = 24
_SLACK = 1e-12  # relative error of sums of floats


@dataclass(frozen=True)
class Trial:
    """A network with these layers lowered, and its figures."""

    lowered: tuple[str, ...]
    figures: tuple[Figure, ...]

    @property
    def is_met(self) -> bool:
        return all(figure.is_met for figure in self.figures)

    @property
    def rank(self) -> tuple[float, ...]:
        """Less is better: more layers lowered, then less harm."""
        return (-len(self.lowered), *(figure.harm for figure in self.figures))


Judge = Callable[[tuple[str, ...]], tuple[Figure, ...]]


def rising(layers: Iterable[LayerPrecision]) -> list[str]:
    """The names by rising sensitivity; equal ones stay in the order of the graph, those not measured come last."""
    return [planned.layer for planned in sorted(layers, key=lambda planned: planned.rank)]


def lower_most(
    order: Sequence[str],
    judge: Judge,
    remember: Callable[[Trial], None] = lambda trial: None,
    most: int | None = None,
    most_trials: int = MOST_TRIALS,
) -> Trial:
    """Return the best trial, with at most `most` layers lowered.

    If nothing is good enough, it is the one with none lowered, whose `is_met` says so.

    >>> from quark.features.mixed_precision.plan import Metric
    >>> error = {"a": 1.0, "b": 2.0, "c": 9.0, "d": 9.0}
    >>> judge = lambda lowered: (Figure(Metric.L2, sum(error[layer] for layer in lowered), limit=3.5),)
    >>> lower_most(list(error), judge).lowered
    ('a', 'b')
    """
    most = len(order) if most is None else min(most, len(order))
    best: Trial | None = None
    left = most_trials

    def is_good(lowered: Sequence[str]) -> bool:
        nonlocal best, left
        left -= 1
        trial = Trial(tuple(lowered), judge(tuple(lowered)))
        is_first = best is None and not lowered  # with none lowered there is nothing better to go back to
        if is_first or (trial.is_met and (best is None or trial.rank < best.rank)):
            best = trial
            remember(trial)
        return trial.is_met

    # the first `good` layers can be lowered, which is assumed of none at all; the first `bad` cannot
    good, bad = 0, most
    if is_good(order[:most]):
        good = most
    else:
        while bad - good > 1 and left > 1:  # one trial is reserved for none at all
            middle = (good + bad) // 2
            good, bad = (middle, bad) if is_good(order[:middle]) else (good, middle)
        if good or is_good(()):
            lowered = list(order[:good])
            for name in order[bad:]:
                if len(lowered) >= most or not left:
                    break
                if is_good([*lowered, name]):
                    lowered.append(name)
    assert best is not None
    return best


def raise_least(
    order: Sequence[str], judge: Judge, remember: Callable[[Trial], None] = lambda trial: None, most: int | None = None
) -> Trial:
    """Return the trial with the fewest of the first layers raised that is good enough; with all of them if none is.

    `Trial.lowered` are those that are raised here.

    >>> from quark.features.mixed_precision.plan import Metric
    >>> judge = lambda raised: (Figure(Metric.L2, 5.0 - len(raised), limit=3.5),)
    >>> raise_least("abcd", judge).lowered
    ('a', 'b')
    """
    most = len(order) if most is None else min(most, len(order))
    trials: dict[int, Trial] = {}

    def is_good(count: int) -> bool:
        names = tuple(order[:count])
        trials[count] = Trial(names, judge(names))
        return trials[count].is_met

    bad, good = -1, most
    if most and is_good(0):
        good = 0
    elif is_good(most):
        bad = 0
        while good - bad > 1:
            middle = (good + bad) // 2
            bad, good = (bad, middle) if is_good(middle) else (middle, good)
    remember(trials[good])
    return trials[good]


def least_harm(harm: Sequence[float], saved: Sequence[float], wanted: float) -> tuple[int, ...] | None:
    """The indices of those to lower, rising; None if all together do not save enough. What saves nothing stays.

    >>> least_harm([3.0, 2.0, 2.0], [6, 4, 4], wanted=8)
    (1, 2)
    """
    room = _room(saved, wanted)
    if room is None:
        return None
    kept = _most_avoided(_finite(harm), np.asarray(saved, np.float64), room)
    return tuple(i for i, size in enumerate(saved) if size > 0 and i not in kept)


def least_harm_greedy(harm: Sequence[float], saved: Sequence[float], wanted: float) -> tuple[int, ...] | None:
    """The same without the guarantee that nothing is better.

    >>> least_harm_greedy([3.0, 2.0, 2.0], [6, 4, 4], wanted=8)
    (0, 1)
    """
    room = _room(saved, wanted)
    if room is None:
        return None
    costs = _finite(harm)
    useful = [i for i, size in enumerate(saved) if size > 0]
    lowered: list[int] = []
    total, enough = 0.0, float(sum(saved)) - room
    for i in sorted(useful, key=lambda i: (costs[i] / saved[i], i)):
        if total >= enough:
            break
        lowered.append(i)
        total += saved[i]
    for i in sorted(lowered, key=lambda i: -costs[i]):
        if total - saved[i] >= enough:
            lowered.remove(i)
            total -= saved[i]
    return tuple(sorted(lowered))


def _room(saved: Sequence[float], wanted: float) -> float | None:
    """The cost that the remaining items may have; None if there is no solution."""
    total = float(sum(saved))
    room = total - max(wanted, 0.0) + _SLACK * max(total, 1.0)
    return room if room >= 0 else None


def _finite(harm: Sequence[float]) -> Array:
    """Infinite harm as more than all else together."""
    values = np.asarray(harm, np.float64)
    finite = values[np.isfinite(values)]
    return np.where(np.isfinite(values), values, 2 * finite.sum() + 1.0)


def _most_avoided(values: Array, costs: Array, room: float) -> set[int]:
    """The indices of a set of the largest sum of values whose costs fit into the room."""
    candidates = [i for i in np.flatnonzero(costs > 0) if costs[i] <= room]
    order = np.array(sorted(candidates, key=lambda i: (-values[i] / costs[i], i)), np.int64)
    # of the items that were not looked at yet, by falling value for their cost
    sum_of_values, sum_of_costs = (np.concatenate([[0.0], np.cumsum(amounts[order])]) for amounts in (values, costs))
    density = np.concatenate([values[order] / costs[order], [0.0]])
    taken_cost, taken_value = np.zeros(1), np.zeros(1)
    steps: list[tuple[Array, Array]] = []  # for each set, the one that it came from, and whether it took the item
    for number, i in enumerate(order, start=1):
        cost = np.concatenate([taken_cost, taken_cost + costs[i]])
        value = np.concatenate([taken_value, taken_value + values[i]])
        parents = np.tile(np.arange(len(taken_cost)), 2)
        has_taken = np.repeat([False, True], len(taken_cost))
        # sets that fit, and for which no cheaper set is as good
        chosen = np.lexsort((-value, cost))
        chosen = chosen[cost[chosen] <= room]
        best_before = np.maximum.accumulate(np.concatenate([[-np.inf], value[chosen]]))[:-1]
        chosen = chosen[value[chosen] > best_before]
        # sets that can still become the best with the items that are left
        free = room - cost[chosen]
        last = np.searchsorted(sum_of_costs, sum_of_costs[number] + free, side="right") - 1
        whole = value[chosen] + sum_of_values[last] - sum_of_values[number]
        part = (free - (sum_of_costs[last] - sum_of_costs[number])) * density[last]
        chosen = chosen[whole + part >= whole.max() * (1 - _SLACK)]
        taken_cost, taken_value = cost[chosen], value[chosen]
        steps.append((parents[chosen], has_taken[chosen]))
    best = int(np.argmax(taken_value))
    kept = set()
    for i, (parents, has_taken) in zip(reversed(order), reversed(steps), strict=True):
        if has_taken[best]:
            kept.add(int(i))
        best = int(parents[best])
    return kept
