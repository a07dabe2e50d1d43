"""Choose what to lower so that enough is saved, with as little harm as possible.

    minimize   sum of harm of the lowered        so that   sum of saved of the lowered >= wanted

which is the 0/1 knapsack of those that stay: the most harm avoided within the room that is left. `least_harm` solves it
exactly, by the list of all sets that no other dominates (Nemhauser and Ullmann), less those that cannot become the best
any more: what a set could still gain is at most what it would with the last thing divisible. `least_harm_greedy` goes
by harm for what is saved, and then takes back what turned out not to be needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_SLACK = 1e-12  # relative: what sums of floats may be off


def least_harm(harm: Sequence[float], saved: Sequence[float], wanted: float) -> tuple[int, ...] | None:
    """The numbers of those to lower, rising; None where all together do not save enough. What saves nothing stays.

    >>> least_harm([3.0, 2.0, 2.0], [6, 4, 4], wanted=8)
    (1, 2)
    """
    room = _room(saved, wanted)
    if room is None:
        return None
    kept = _most_avoided(_finite(harm), np.asarray(saved, np.float64), room)
    return tuple(i for i, size in enumerate(saved) if size > 0 and i not in kept)


def least_harm_greedy(harm: Sequence[float], saved: Sequence[float], wanted: float) -> tuple[int, ...] | None:
    """The same without the promise that nothing is better.

    >>> least_harm_greedy([3.0, 2.0, 2.0], [6, 4, 4], wanted=8)
    (0, 1)
    """
    room = _room(saved, wanted)
    if room is None:
        return None
    costs = _finite(harm)
    useful = [i for i, size in enumerate(saved) if size > 0]
    order = sorted(useful, key=lambda i: (costs[i] / saved[i], i))
    lowered: list[int] = []
    total, enough = 0.0, float(sum(saved)) - room
    for i in order:
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
    """What those that stay may cost; None where it cannot be done."""
    total = float(sum(saved))
    room = total - max(wanted, 0.0) + _SLACK * max(total, 1.0)
    return room if room >= 0 else None


def _finite(harm: Sequence[float]) -> Array:
    """Infinite harm as more than all else together."""
    values = np.asarray(harm, np.float64)
    finite = values[np.isfinite(values)]
    return np.where(np.isfinite(values), values, 2 * finite.sum() + 1.0)


def _most_avoided(values: Array, costs: Array, room: float) -> set[int]:
    """The numbers of a set of the largest sum of values whose costs fit into the room."""
    candidates = [i for i in np.flatnonzero(costs > 0) if costs[i] <= room]
    order = np.array(sorted(candidates, key=lambda i: (-values[i] / costs[i], i)), np.int64)
    rest = _Rest(values[order], costs[order])
    taken_cost, taken_value = np.zeros(1), np.zeros(1)
    steps: list[tuple[Array, Array]] = []  # of each set the one that it came from, and whether it took the item
    for number, i in enumerate(order):
        cost = np.concatenate([taken_cost, taken_cost + costs[i]])
        value = np.concatenate([taken_value, taken_value + values[i]])
        parents = np.tile(np.arange(len(taken_cost)), 2)
        has_taken = np.repeat([False, True], len(taken_cost))
        chosen = _undominated(cost, value, room)
        chosen = chosen[rest.is_promising(cost[chosen], value[chosen], room, number + 1)]
        taken_cost, taken_value = cost[chosen], value[chosen]
        steps.append((parents[chosen], has_taken[chosen]))
    best = int(np.argmax(taken_value))
    kept = set()
    for i, (parents, has_taken) in zip(reversed(order), reversed(steps), strict=True):
        if has_taken[best]:
            kept.add(int(i))
        best = int(parents[best])
    return kept


def _undominated(cost: Array, value: Array, room: float) -> Array:
    """The sets that fit and than which no cheaper one is as good."""
    order = np.lexsort((-value, cost))
    order = order[cost[order] <= room]
    best_before = np.maximum.accumulate(np.concatenate([[-np.inf], value[order]]))[:-1]
    return order[value[order] > best_before]


class _Rest:
    """The items that were not yet looked at, by falling value for their cost."""

    def __init__(self, values: Array, costs: Array) -> None:
        self._values = np.concatenate([[0.0], np.cumsum(values)])
        self._costs = np.concatenate([[0.0], np.cumsum(costs)])
        self._density = np.concatenate([values / costs, [0.0]])

    def is_promising(self, cost: Array, value: Array, room: float, start: int) -> Array:
        """Of each set, whether it can still become the best, with the items from `start` on."""
        left = room - cost
        last = np.searchsorted(self._costs, self._costs[start] + left, side="right") - 1
        whole = self._values[last] - self._values[start]
        part = (left - (self._costs[last] - self._costs[start])) * self._density[last]
        certain = (value + whole).max()
        return np.asarray(value + whole + part >= certain * (1 - _SLACK))
