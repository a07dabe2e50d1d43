"""Lower as many layers as possible while the network stays good enough.

Layers are lowered in the order of their sensitivity. Whether a number of them is good enough is found by trying the
real network, and the number by bisection; then single layers behind the first that was too much are tried on top.
Every trial takes a pass over the samples, so that there is a limit to them; the best that was found so far is handed
to `remember` as soon as it is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quark.mixed_precision.figures import Figure
from quark.mixed_precision.plan import LayerPrecision

MOST_TRIALS = 24


@dataclass(frozen=True)
class Trial:
    """A network with these layers lowered, and how it does."""

    lowered: tuple[str, ...]
    figures: tuple[Figure, ...]

    @property
    def is_met(self) -> bool:
        return all(each.is_met for each in self.figures)

    @property
    def rank(self) -> tuple[float, ...]:
        """Less is better: more layers lowered, then less harm."""
        return (-len(self.lowered), *(each.harm for each in self.figures))


Judge = Callable[[tuple[str, ...]], tuple[Figure, ...]]


def rising(layers: Iterable[LayerPrecision]) -> list[str]:
    """The names by rising sensitivity; equals stay in the order of the graph, those not measured come last."""
    known = [(math.inf if each.sensitivity is None else each.sensitivity, each.layer) for each in layers]
    return [name for _, name in sorted(known, key=lambda pair: pair[0])]


def lower_most(
    order: Sequence[str],
    judge: Judge,
    remember: Callable[[Trial], None] = lambda trial: None,
    most: int | None = None,
    most_trials: int = MOST_TRIALS,
) -> Trial:
    """The best trial. Where nothing is good enough, none lowered: `is_met` of that says so. `most` limits the layers.

    >>> from quark.mixed_precision.figures import Metric
    >>> error = {"a": 1.0, "b": 2.0, "c": 9.0, "d": 9.0}
    >>> judge = lambda lowered: (Figure(Metric.L2, sum(error[each] for each in lowered), limit=3.5),)
    >>> lower_most(list(error), judge).lowered
    ('a', 'b')
    """
    return _Search(order, judge, remember, len(order) if most is None else min(most, len(order)), most_trials).run()


class _Search:
    def __init__(
        self, order: Sequence[str], judge: Judge, remember: Callable[[Trial], None], most: int, most_trials: int
    ) -> None:
        self._order, self._judge, self._remember = order, judge, remember
        self._most, self._left = most, most_trials
        self._best: Trial | None = None

    def run(self) -> Trial:
        if self._try(self._order[: self._most]):
            return self._found()
        good, bad = self._bisect()
        if good or self._try(()):
            self._try_single_layers(list(self._order[:good]), self._order[bad:])
        return self._found()

    def _bisect(self) -> tuple[int, int]:
        """How many of the first are good enough, and one more than that. None at all is taken to be."""
        good, bad = 0, self._most
        while bad - good > 1 and self._left > 1:  # one is kept for none at all
            middle = (good + bad) // 2
            if self._try(self._order[:middle]):
                good = middle
            else:
                bad = middle
        return good, bad

    def _try_single_layers(self, lowered: list[str], rest: Sequence[str]) -> None:
        for name in rest:
            if len(lowered) >= self._most or not self._left:
                return
            if self._try([*lowered, name]):
                lowered.append(name)

    def _try(self, lowered: Sequence[str]) -> bool:
        self._left -= 1
        trial = Trial(tuple(lowered), self._judge(tuple(lowered)))
        is_first = self._best is None and not lowered  # with none lowered there is nothing better to go back to
        if is_first or (trial.is_met and (self._best is None or trial.rank < self._best.rank)):
            self._best = trial
            self._remember(trial)
        return trial.is_met

    def _found(self) -> Trial:
        assert self._best is not None
        return self._best
