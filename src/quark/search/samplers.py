"""Samplers: which point of a space to try next, given what the points before it scored.

    Random    every value as likely as any other
    TPE       tree-structured Parzen estimator (Bergstra et al., 2011): the points so far are split into good and other
              ones, each half gives a density for every parameter, and of a few draws from the good one the draw with
              the largest ratio of both is taken. The first points are random
    others    CmaEs, GPS, NSGAII and QMC are optuna's, if it is installed

Both of ours depend on the seed and on the scores alone.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quark.errors import MissingDependencyError, unknown_name
from quark.search.spaces import Config, Parameter, Space, is_met

Values = dict[str, Any]  # by the label of the parameter

RANDOM_FIRST = 10
DRAWS = 24
GOOD_SHARE, MOST_GOOD = 0.1, 25
OF_OPTUNA = {"CmaEs": "CmaEsSampler", "GPS": "GPSampler", "NSGAII": "NSGAIISampler", "QMC": "QMCSampler"}
SAMPLERS = ("TPE", "Random", *OF_OPTUNA)


class Sampler(Protocol):
    """Proposes points. Scores are to be minimized; a point that failed scores infinity."""

    def ask(self) -> Values:
        """Return the next point."""

    def tell(self, values: Values, score: float) -> None:
        """Note the score of a point, of `ask` or of an earlier search."""


def sampler_named(name: str, space: Space, seed: int = 0) -> Sampler:
    """Return a new sampler."""
    if name == "TPE":
        return TreeParzen(space, seed)
    if name == "Random":
        return Uniform(space, seed)
    if name in OF_OPTUNA:
        return OfOptuna(space, OF_OPTUNA[name], seed)
    raise unknown_name("search_algo", name, ("Grid", *SAMPLERS))


def nested(space: Space, values: Values) -> Config:
    """Return a point as a config: the settings of a group in a mapping of their own."""
    config: Config = {one.name: values[one.label] for one in space.plain}
    for name, _, inner in space.groups:
        settings = {one.name: values[one.label] for one in inner if one.label in values}
        if settings:
            config[name] = settings
    return config


class _Independent:
    """A sampler that draws parameter by parameter, those of a group only if its condition is met."""

    def __init__(self, space: Space, seed: int) -> None:
        self.space = space
        self.random = np.random.default_rng(seed)

    def ask(self) -> Values:
        values = {one.label: self.draw(one) for one in self.space.plain}
        config = nested(self.space, values)
        for name, condition, inner in self.space.groups:
            if is_met(config, condition):
                values |= {one.label: self.draw(one) for one in inner}
                config[name] = True
        return values

    def draw(self, one: Parameter) -> Any:
        raise NotImplementedError

    def uniform(self, one: Parameter) -> Any:
        if one.is_choice:
            return one.values[int(self.random.integers(len(one.values)))]
        low, high = ends(one)
        return from_line(one, float(self.random.uniform(low, high)))


class Uniform(_Independent):
    """Every value as likely as any other."""

    def draw(self, one: Parameter) -> Any:
        return self.uniform(one)

    def tell(self, values: Values, score: float) -> None:
        """Scores make no difference."""


@dataclass
class _Seen:
    values: Values
    score: float


class TreeParzen(_Independent):
    """The tree-structured Parzen estimator, one parameter at a time."""

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        self.seen: list[_Seen] = []

    def tell(self, values: Values, score: float) -> None:
        parameters = [*self.space.plain, *(one for _, _, inner in self.space.groups for one in inner)]
        known = {
            one.label: values[one.label] for one in parameters if one.label in values and fits(one, values[one.label])
        }
        self.seen.append(_Seen(known, math.inf if math.isnan(score) else score))

    def draw(self, one: Parameter) -> Any:
        if len(self.seen) < RANDOM_FIRST:
            return self.uniform(one)
        count = min(math.ceil(GOOD_SHARE * len(self.seen)), MOST_GOOD)
        order = sorted(self.seen, key=lambda each: each.score)
        good, other = ([each.values[one.label] for each in part if one.label in each.values]
                       for part in (order[:count], order[count:]))  # fmt: skip
        if one.is_choice:
            ratio = _shares(one, good) / _shares(one, other)
            draws = self.random.choice(len(one.values), DRAWS, p=_shares(one, good))
            return one.values[int(draws[np.argmax(ratio[draws])])]
        of_good, of_other = (_Mixture.of(one, part) for part in (good, other))
        points = of_good.draw(self.random, DRAWS)
        return from_line(one, float(points[np.argmax(of_good.log_density(points) - of_other.log_density(points))]))


def _shares(one: Parameter, drawn: Sequence[Any]) -> NDArray[np.float64]:
    """Return how often each value was drawn, every one counted once more in advance, as shares."""
    counts = np.array([1.0 + sum(each == value for each in drawn) for value in one.values])
    shares: NDArray[np.float64] = counts / counts.sum()
    return shares


def ends(one: Parameter) -> tuple[float, float]:
    """The ends of a range on the line that it is sampled on: logarithms if asked for, half a step more for integers."""
    margin = one.step / 2
    low, high = one.low - margin, one.high + margin
    if not one.is_log:
        return low, high
    return math.log(max(low, one.low / 2)), math.log(high)


def to_line(one: Parameter, value: float) -> float:
    """A number as a point on that line."""
    return math.log(value) if one.is_log else float(value)


def fits(one: Parameter, value: Any) -> bool:
    """True if the parameter can have that value; one of an earlier search may be from another space."""
    if one.is_choice:
        return any(value == each for each in one.values)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and one.low <= value <= one.high


def from_line(one: Parameter, point: float) -> Any:
    """A point on that line as a number: within the range, and a step if there are steps."""
    value = math.exp(point) if one.is_log else point
    if one.step:
        most = math.floor((one.high - one.low) / one.step)
        steps = min(max(round((value - one.low) / one.step), 0), most)
        return round(one.low + steps * one.step)
    return min(max(value, one.low), one.high)


@dataclass(frozen=True)
class _Mixture:
    """Normal distributions of equal weight, cut off at the ends: one on each point, and a wide one in the middle."""

    centres: NDArray[np.float64]
    widths: NDArray[np.float64]
    low: float
    high: float
    masses: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        upper, lower = ((edge - self.centres) / self.widths for edge in (self.high, self.low))
        object.__setattr__(self, "masses", np.maximum(_normal(upper) - _normal(lower), 1e-12))

    @classmethod
    def of(cls, one: Parameter, values: Sequence[float]) -> _Mixture:
        """The width of each is the distance to the farther of its neighbours, within bounds."""
        low, high = ends(one)
        whole = max(high - low, 1e-12)
        points = np.sort(np.array([*(to_line(one, value) for value in values), (low + high) / 2]))
        padded = np.concatenate([[low], points, [high]])
        gaps = np.diff(padded)
        widths = np.clip(np.maximum(gaps[:-1], gaps[1:]), whole / min(100.0, 1.0 + len(points)), whole)
        widths[np.searchsorted(points, (low + high) / 2)] = whole
        return cls(points, widths, low, high)

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Return points of the mixture."""
        found: list[float] = []
        while len(found) < count:
            index = random.integers(len(self.centres), size=count)
            points = random.normal(self.centres[index], self.widths[index])
            found += [point for point in points if self.low <= point <= self.high]
        return np.array(found[:count])

    def log_density(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the logarithm of the density, up to a constant."""
        distances = (points[:, None] - self.centres) / self.widths
        terms = np.exp(-0.5 * distances**2) / (self.widths * self.masses)
        density: NDArray[np.float64] = np.log(terms.mean(axis=1) + 1e-300)
        return density


def _normal(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of a standard normal distribution below each number."""
    return np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in x])


class OfOptuna:
    """A sampler of optuna."""

    def __init__(self, space: Space, name: str, seed: int) -> None:
        try:
            self._optuna: Any = importlib.import_module("optuna")
        except ImportError as error:
            raise MissingDependencyError(
                f"search_algo of optuna's {name}: optuna is not installed. pip install optuna, or use 'TPE', 'Random' "
                "or 'Grid', which need nothing"
            ) from error
        self._space = space
        sampler = getattr(self._optuna.samplers, name)(seed=seed)
        self._study = self._optuna.create_study(direction="minimize", sampler=sampler)
        self._open: list[tuple[Values, Any]] = []

    def ask(self) -> Values:
        """Return the next point."""
        trial = self._study.ask()
        values = {one.label: self._suggested(trial, one) for one in self._space.plain}
        config = nested(self._space, values)
        for name, condition, inner in self._space.groups:
            if is_met(config, condition):
                values |= {one.label: self._suggested(trial, one) for one in inner}
                config[name] = True
        self._open.append((values, trial))
        return values

    def _suggested(self, trial: Any, one: Parameter) -> Any:
        if one.is_choice:
            return one.values[trial.suggest_categorical(one.label, list(range(len(one.values))))]
        if one.step:
            return trial.suggest_int(one.label, round(one.low), round(one.high), step=max(1, round(one.step)))
        return trial.suggest_float(one.label, one.low, one.high, log=one.is_log)

    def tell(self, values: Values, score: float) -> None:
        """Note the score of a point of `ask`. Those of an earlier search are not known to optuna."""
        trial = next((trial for asked, trial in self._open if asked is values), None)
        if trial is None:
            return
        state = self._optuna.trial.TrialState
        failed = not math.isfinite(score)
        self._study.tell(trial, None if failed else score, state=state.FAIL if failed else state.COMPLETE)
