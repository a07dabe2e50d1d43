"""Which trials are best: the front of those that none beats, and an order by the budgets. Pure functions.

A trial beats another where it is no worse in size, drop and latency, and better in one. The Pareto front holds all that
none beats.

The order: those within all limits come first. Among them,

    with a limit on the drop     the smallest file first: that much loss is agreed to. Files up to 5 % larger than the
                                 smallest count as equally small, and stand by the next line; then those up to 5 %
                                 larger than the smallest of the rest, and so on
    else                         the least drop first; of equal ones those that none beats, then the least divergence
                                 from float, then the smallest file, then the fastest

So the first is never beaten by another within the limits. After them come those beyond a limit, by how far they are
beyond, as a share of each limit and summed; then those that failed. What is still equal stands by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from quark.search.budget import Limits
from quark.search.trial import Measurement, Trial

ALIKE_IN_SIZE = 1.05
_DROP_UNIT = 1.0  # a limit on the drop below one point counts as one when shares are taken: it may be 0


def dominates(one: Measurement, other: Measurement) -> bool:
    """That `one` beats `other`."""
    first, second = _costs(one), _costs(other)
    return all(a <= b for a, b in zip(first, second, strict=True)) and first != second


def pareto_front(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Those that none beats, the smallest file first. Trials with equal figures are all in it, or none is."""
    able = [each for each in trials if each.measured is not None]
    front = [
        each
        for each in able
        if not any(dominates(_figures(other), _figures(each)) for other in able if other is not each)
    ]
    return tuple(sorted(front, key=lambda each: (*_costs(_figures(each)), each.name)))


def excess(measured: Measurement, limits: Limits) -> float:
    """How far beyond the limits, 0 within: shares of the limits, summed."""
    over = [
        max(0.0, measured.size_bytes / limits.size_bytes - 1.0),
        max(0.0, measured.latency_ms / limits.latency_ms - 1.0),
        max(0.0, measured.drop - limits.drop) / max(limits.drop, _DROP_UNIT) if limits.drop < math.inf else 0.0,
    ]
    return sum(over)


def is_within(trial: Trial, limits: Limits) -> bool:
    """That it worked and keeps to every limit."""
    measured = trial.measured
    return (
        measured is not None
        and measured.size_bytes <= limits.size_bytes
        and measured.drop <= limits.drop
        and measured.latency_ms <= limits.latency_ms
    )


def ranked(trials: Iterable[Trial], limits: Limits) -> tuple[Trial, ...]:
    """All trials, the best first."""
    listed = sorted(trials, key=lambda each: each.name)
    within = [each for each in listed if is_within(each, limits)]
    front = {each.name for each in pareto_front(within)}
    within.sort(key=lambda each: (_figures(each).drop, each.name not in front, *_after_drop(_figures(each))))
    if limits.drop < math.inf:
        within = [each for group in _alike_in_size(within) for each in group]
    beyond = [each for each in listed if each.measured is not None and not is_within(each, limits)]
    beyond.sort(key=lambda each: (excess(_figures(each), limits), _figures(each).drop))
    return (*within, *beyond, *(each for each in listed if each.measured is None))


def _after_drop(figures: Measurement) -> tuple[float, float, float]:
    return math.inf if figures.kl is None else figures.kl, figures.size_bytes, figures.latency_ms


def _alike_in_size(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Groups of about the same size, the smallest first; the order inside stays."""
    groups: list[list[Trial]] = []
    rest = list(trials)
    while rest:
        most = ALIKE_IN_SIZE * min(_figures(each).size_bytes for each in rest)
        groups.append([each for each in rest if _figures(each).size_bytes <= most])
        rest = [each for each in rest if _figures(each).size_bytes > most]
    return groups


def _figures(trial: Trial) -> Measurement:
    assert trial.measured is not None
    return trial.measured


def _costs(measured: Measurement) -> tuple[float, float, float]:
    return measured.size_bytes, measured.drop, measured.latency_ms
