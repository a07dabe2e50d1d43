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
    config: Config = {parameter.name: values[parameter.label] for parameter in space.plain}
    for name, _, inner in space.groups:
        settings = {parameter.name: values[parameter.label] for parameter in inner if parameter.label in values}
        if settings:
            config[name] = settings
    return config


class _Independent:
    """A sampler that draws parameter by parameter, those of a group only if its condition is met."""

    def __init__(self, space: Space, seed: int) -> None:
        self.space = space
        self.random = np.random.default_rng(seed)

    def ask(self) -> Values:
        values = {parameter.label: self.draw(parameter) for parameter in self.space.plain}
        config = nested(self.space, values)
        for name, condition, inner in self.space.groups:
            if is_met(config, condition):
                values |= {parameter.label: self.draw(parameter) for parameter in inner}
                config[name] = True
        return values

    def draw(self, parameter: Parameter) -> Any:
        raise NotImplementedError

    def uniform(self, parameter: Parameter) -> Any:
        if parameter.is_choice:
            return parameter.values[int(self.random.integers(len(parameter.values)))]
        low, high = ends(parameter)
        return from_line(parameter, float(self.random.uniform(low, high)))


class Uniform(_Independent):
    """Every value as likely as any other."""

    def draw(self, parameter: Parameter) -> Any:
        return self.uniform(parameter)

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
        parameters = [*self.space.plain, *(parameter for _, _, inner in self.space.groups for parameter in inner)]
        known = {
            parameter.label: values[parameter.label]
            for parameter in parameters
            if parameter.label in values and fits(parameter, values[parameter.label])
        }
        self.seen.append(_Seen(known, math.inf if math.isnan(score) else score))

    def draw(self, parameter: Parameter) -> Any:
        if len(self.seen) < RANDOM_FIRST:
            return self.uniform(parameter)
        count = min(math.ceil(GOOD_SHARE * len(self.seen)), MOST_GOOD)
        order = sorted(self.seen, key=lambda seen: seen.score)
        good, other = ([seen.values[parameter.label] for seen in part if parameter.label in seen.values]
                       for part in (order[:count], order[count:]))  # fmt: skip
        if parameter.is_choice:
            ratio = _shares(parameter, good) / _shares(parameter, other)
            draws = self.random.choice(len(parameter.values), DRAWS, p=_shares(parameter, good))
            return parameter.values[int(draws[np.argmax(ratio[draws])])]
        of_good, of_other = (_Mixture.of(parameter, part) for part in (good, other))
        points = of_good.draw(self.random, DRAWS)
        return from_line(
            parameter, float(points[np.argmax(of_good.log_density(points) - of_other.log_density(points))])
        )


def _shares(parameter: Parameter, drawn: Sequence[Any]) -> NDArray[np.float64]:
    """Return how often each value was drawn, every one counted once more in advance, as shares."""
    counts = np.array([1.0 + sum(choice == value for choice in drawn) for value in parameter.values])
    shares: NDArray[np.float64] = counts / counts.sum()
    return shares


def ends(parameter: Parameter) -> tuple[float, float]:
    """The ends of a range on the line that it is sampled on: logarithms if asked for, half a step more for integers."""
    margin = parameter.step / 2
    low, high = parameter.low - margin, parameter.high + margin
    if not parameter.is_log:
        return low, high
    return math.log(max(low, parameter.low / 2)), math.log(high)


def to_line(parameter: Parameter, value: float) -> float:
    """A number as a point on that line."""
    return math.log(value) if parameter.is_log else float(value)


def fits(parameter: Parameter, value: Any) -> bool:
    """True if the parameter can have that value; one of an earlier search may be from another space."""
    if parameter.is_choice:
        return any(value == choice for choice in parameter.values)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and parameter.low <= value <= parameter.high


def from_line(parameter: Parameter, point: float) -> Any:
    """A point on that line as a number: within the range, and a step if there are steps."""
    value = math.exp(point) if parameter.is_log else point
    if parameter.step:
        most = math.floor((parameter.high - parameter.low) / parameter.step)
        steps = min(max(round((value - parameter.low) / parameter.step), 0), most)
        return round(parameter.low + steps * parameter.step)
    return min(max(value, parameter.low), parameter.high)


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
    def of(cls, parameter: Parameter, values: Sequence[float]) -> _Mixture:
        """The width of each is the distance to the farther of its neighbours, within bounds."""
        low, high = ends(parameter)
        whole = max(high - low, 1e-12)
        points = np.sort(np.array([*(to_line(parameter, value) for value in values), (low + high) / 2]))
        padded = np.concatenate([[low], points, [high]])
        gaps = np.diff(padded)
        widths = np.clip(np.maximum(gaps[:-1], gaps[1:]), whole / min(100.0, 1.0 + len(points)), whole)
        widths[np.searchsorted(points, (low + high) / 2)] = whole
        return cls(points, widths, low, high)

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Return points of the mixture."""
        drawn: list[float] = []
        while len(drawn) < count:
            index = random.integers(len(self.centres), size=count)
            points = random.normal(self.centres[index], self.widths[index])
            drawn += [point for point in points if self.low <= point <= self.high]
        return np.array(drawn[:count])

    def log_density(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the logarithm of the density, up to a constant."""
        distances = (points[:, None] - self.centres) / self.widths
        terms = np.exp(-0.5 * distances**2) / (self.widths * self.masses)
        density: NDArray[np.float64] = np.log(terms.mean(axis=1) + 1e-300)
        return density


def _normal(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of a standard normal distribution below each number."""
    return np.array([0.5 * math.erfc(-number / math.sqrt(2)) for number in x])


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
        values = {parameter.label: self._suggested(trial, parameter) for parameter in self._space.plain}
        config = nested(self._space, values)
        for name, condition, inner in self._space.groups:
            if is_met(config, condition):
                values |= {parameter.label: self._suggested(trial, parameter) for parameter in inner}
                config[name] = True
        self._open.append((values, trial))
        return values

    def _suggested(self, trial: Any, parameter: Parameter) -> Any:
        if parameter.is_choice:
            return parameter.values[trial.suggest_categorical(parameter.label, list(range(len(parameter.values))))]
        if parameter.step:
            return trial.suggest_int(
                parameter.label, round(parameter.low), round(parameter.high), step=max(1, round(parameter.step))
            )
        return trial.suggest_float(parameter.label, parameter.low, parameter.high, log=parameter.is_log)

    def tell(self, values: Values, score: float) -> None:
        """Note the score of a point of `ask`. Those of an earlier search are not known to optuna."""
        trial = next((trial for asked, trial in self._open if asked is values), None)
        if trial is None:
            return
        state = self._optuna.trial.TrialState
        failed = not math.isfinite(score)
        self._study.tell(trial, None if failed else score, state=state.FAIL if failed else state.COMPLETE)
