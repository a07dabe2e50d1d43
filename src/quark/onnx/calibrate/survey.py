"""Statistics of tensors other than ranges: one pass of the float model over the samples.

with FloatRunner(model, statistics) as runner:
    found = survey(runner, {"conv_out": ChannelExtremes(axis=1)}, samples)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.onnx.calibrate.passes import CalibrationOptions, Pass, Watch
from quark.onnx.calibrate.runner import FloatRunner
from quark.onnx.data.samples import Samples
from quark.onnx.progress import Track, track
from quark.ranges import Observer


class Statistic(Protocol):
    """A statistic of one tensor. `is_mergeable`: the statistics of two halves of the samples merge into that of all, at
    least nearly to the last bit; the pass deep-copies it for that before anything is observed."""

    is_mergeable: bool

    def observe(self, x: NDArray[Any]) -> None:
        """Add the tensor's values for one sample, or a piece of its batch. The array is freed after the call."""

    def end_of_sample(self) -> None:
        """Note that everything observed since the last call was one sample."""

    def merge(self, other: Any) -> None:
        """Add the values of another one."""


Found = TypeVar("Found", bound=Statistic)


def survey(
    runner: FloatRunner,
    statistics: Mapping[str, Found],
    samples: Samples,
    options: CalibrationOptions | None = None,
    *,
    sample_limit: int | None = None,
    title: str = "looking at activations",
    progress: Track = track,
) -> dict[str, Found]:
    """Return the statistics by tensor, filled in from the calibration samples, or from `sample_limit` of them, evenly
    spaced."""
    survey_together(runner, [(statistics, sample_limit)], samples, options, title=title, progress=progress)
    return dict(statistics)


def survey_together(
    runner: FloatRunner,
    sets: Sequence[tuple[Mapping[str, Statistic], int | None]],
    samples: Samples,
    options: CalibrationOptions | None = None,
    *,
    title: str = "looking at activations",
    progress: Track = track,
) -> None:
    """Fill in sets of statistics by tensor, each from all calibration samples or as many as its limit, evenly spaced.
    The float model runs once on each sample that is in a set."""
    options = options or CalibrationOptions()
    chosen = []
    for statistics, limit in sets:
        count = samples.count if limit is None else min(samples.batches(limit), samples.count)
        chosen.append([i * samples.count // count for i in range(count)] if statistics else [])
    places = {index: place for place, index in enumerate(sorted({index for indices in chosen for index in indices}))}
    if not places:
        return
    watches = [
        Watch(name, cast(Observer, statistic), frozenset(places[index] for index in indices))
        for (statistics, _), indices in zip(sets, chosen, strict=True)
        for name, statistic in statistics.items()
    ]
    with progress(len(places), title) as advance:
        seen = itertools.compress(samples, (i in places for i in range(samples.count)))
        Pass(runner, seen, options.memory_limit_bytes, lambda statistic, x: statistic.observe(x), advance).show_to(
            watches
        )


class ChannelExtremes:
    """The lowest and the highest value of every channel, counted along `axis` (negative: from the end)."""

    is_mergeable = True

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.lowest: NDArray[np.float32] = np.zeros(0, np.float32)  # one for each channel, after the first observation
        self.highest: NDArray[np.float32] = np.zeros(0, np.float32)

    @property
    def reach(self) -> NDArray[np.float32]:
        """The largest magnitude of every channel."""
        reach: NDArray[np.float32] = np.maximum(-self.lowest, self.highest)
        return reach

    def observe(self, x: NDArray[Any]) -> None:
        if not -x.ndim <= self.axis < x.ndim:
            raise InvalidValueError(f"channels along axis {self.axis} of {x.ndim} dimensions")
        if not x.size:
            return
        axis = self.axis % x.ndim
        lines = x.reshape(math.prod(x.shape[:axis]), x.shape[axis], -1)
        lowest, highest = lines.min(axis=(0, 2)), lines.max(axis=(0, 2))
        if not (np.isfinite(lowest).all() and np.isfinite(highest).all()):
            raise InvalidValueError("has NaN or Inf")
        self._take(lowest, highest)

    def end_of_sample(self) -> None:
        pass

    def merge(self, other: ChannelExtremes) -> None:
        if other.lowest.size:
            self._take(other.lowest, other.highest)

    def _take(self, lowest: NDArray[Any], highest: NDArray[Any]) -> None:
        if not self.lowest.size:
            self.lowest, self.highest = lowest.astype(np.float32), highest.astype(np.float32)
            return
        if lowest.size != self.lowest.size:
            raise InvalidValueError(f"has {lowest.size} channels, and had {self.lowest.size} before")
        self.lowest, self.highest = np.minimum(self.lowest, lowest), np.maximum(self.highest, highest)
