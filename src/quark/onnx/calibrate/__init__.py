"""Find the range of every wanted tensor, by running the float model over the calibration samples.

One pass finds the extremes; a second one, for methods that need it, fills histograms or candidate errors between them.
Only these and the activations of a sample or two are in memory, however many samples there are. Results depend neither
on the order of samples nor on the size of batches, except for a moving average and a majority of samples.

    with FloatRunner(model, wanted) as runner:
        ranges = calibrate(runner, wanted, samples, options)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from quark.errors import InvalidValueError
from quark.files.foreign import REPORT, Fields, read_json
from quark.files.output import complete
from quark.formats.spec import IntFormat
from quark.onnx.calibrate.passes import CalibrationOptions, Observers, Pass
from quark.onnx.calibrate.runner import FloatRunner
from quark.onnx.calibrate.survey import ChannelExtremes, Statistic, survey
from quark.onnx.data.samples import Samples
from quark.onnx.progress import Track, track
from quark.ranges import Observer, RangeMethod, TensorRange
from quark.ranges.histogram_methods import CandidateObserver
from quark.text import get_logger

__all__ = [
    "CalibrationOptions",
    "ChannelExtremes",
    "FloatRunner",
    "Statistic",
    "Wanted",
    "calibrate",
    "calibrate_candidates",
    "survey",
]

CACHE_VERSION = 1

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class Wanted:
    """How to find the range of a tensor, and for which codes."""

    method: RangeMethod
    integer: IntFormat
    is_symmetric: bool

    def observer(self) -> Observer:
        return self.method.observer(self.integer, self.is_symmetric)


def calibrate(
    runner: FloatRunner,
    wanted: Mapping[str, Wanted],
    samples: Samples,
    options: CalibrationOptions | None = None,
    progress: Track = track,
) -> dict[str, TensorRange]:
    """The range of each wanted tensor. NaN or Inf in one is an error that names it and the sample.

    >>> with FloatRunner(model, wanted) as runner:                                      # doctest: +SKIP
    ...     ranges = calibrate(runner, {"conv_out": Wanted(MinMax(), INT8, True)}, samples)
    """
    options = options or CalibrationOptions()
    if not wanted:
        return {}
    key = ""
    if options.cache is not None:
        import onnxruntime

        settings = [f"{name}: {each!r}" for name, each in sorted(wanted.items())]
        rest = [str(options.has_symmetric_ranges), str(options.providers), onnxruntime.__version__]
        facts = [CACHE_VERSION, runner.model_digest(), samples.digest(), *settings, *rest]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        cached = read_ranges(options.cache, key, wanted)
        if cached is not None:
            return cached
    observers = _observe(runner, {name: each.observer() for name, each in wanted.items()}, samples, options, progress)
    with ThreadPoolExecutor(runner.workers) as pool:  # searching histograms is arithmetic of numpy
        ranges = dict(zip(observers, pool.map(lambda each: each.result(), observers.values()), strict=True))
    if options.has_symmetric_ranges:
        for name, found in ranges.items():
            reach = max(-found.lowest, found.highest)
            ranges[name] = TensorRange(-reach, reach, found.position)
    result = {name: ranges[name] for name in wanted}
    if options.cache is not None:
        write_ranges(options.cache, key, result)
    return result


def calibrate_candidates(
    runner: FloatRunner,
    wanted: Mapping[str, Wanted],
    observed: Mapping[str, tuple[float, float]],
    samples: Samples,
    options: CalibrationOptions,
    progress: Track = track,
) -> dict[str, dict[str, TensorRange]]:
    """The ranges that several methods find for each tensor, by the name of the method.

    `observed` has the extremes of tensors that are known already; if all are, one pass over the samples is enough.
    """
    observers: dict[str, Observer] = {
        name: CandidateObserver(each.integer, each.is_symmetric, observed.get(name)) for name, each in wanted.items()
    }
    unknown = {name: each for name, each in observers.items() if name not in observed}
    limit = options.memory_limit_bytes
    if unknown:
        with progress(samples.count, "looking for extremes") as advance:
            observers |= Pass(runner, iter(samples), limit, lambda each, x: each.observe(x), advance).run(unknown)
    with progress(samples.count, "calibrating by several methods") as advance:
        counted = Pass(runner, iter(samples), limit, lambda each, x: each.observe_again(x), advance).run(observers)
    with ThreadPoolExecutor(runner.workers) as pool:
        found = list(pool.map(lambda each: cast(CandidateObserver, each).candidates(), counted.values()))
    return dict(zip(counted, found, strict=True))


def _observe(
    runner: FloatRunner, observers: Observers, samples: Samples, options: CalibrationOptions, progress: Track
) -> Observers:
    limit = options.memory_limit_bytes
    with progress(samples.count, "calibrating") as advance:
        observers = Pass(runner, iter(samples), limit, lambda each, x: each.observe(x), advance).run(observers)
    again = {name: each for name, each in observers.items() if each.needs_second_pass}
    if again:
        with progress(samples.count, "calibrating, second pass") as advance:
            again = Pass(runner, iter(samples), limit, lambda each, x: each.observe_again(x), advance).run(again)
    return {**observers, **again}


# The cache keeps ranges between runs: one JSON file in the user's folder for each key, a hash of everything that the
# ranges depend on (model, data, settings, versions).


def read_ranges(folder: Path, key: str, names: Iterable[str]) -> dict[str, TensorRange] | None:
    """The cached ranges of these tensors; None if there are none. A file that is not readable or not as expected is
    ignored with a warning, and replaced later."""
    path = _path(folder, key)
    if not path.exists():
        return None
    label = f"calibration cache '{path}'"
    try:
        content = Fields(read_json(path, label, REPORT), label)
        if content.text("key") != key:
            content.refuse("key", f"'{key}'")
        stored, ranges = content.mapping("ranges"), {}
        for name in names:
            numbers = dict(zip(("lowest", "highest", "position"), stored.array(name, 3), strict=True))
            parts = Fields(numbers, f"range of tensor '{name}'")
            position = parts.integer("position", -1024, 1024) if parts.has("position") else None
            ranges[name] = TensorRange(float(parts.number("lowest")), float(parts.number("highest")), position)
    except InvalidValueError as error:
        _LOG.warning("%s; it is ignored", error)
        return None
    return ranges


def write_ranges(folder: Path, key: str, ranges: Mapping[str, TensorRange]) -> None:
    """Write the file whole or not at all. If that fails, it is only a warning: the ranges themselves are known."""
    content = {"key": key, "ranges": {name: [r.lowest, r.highest, r.position] for name, r in ranges.items()}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with complete(_path(folder, key)) as unfinished:
            unfinished.write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        _LOG.warning("calibration cache %s is not written: %s", folder, error)


def _path(folder: Path, key: str) -> Path:
    return folder / f"ranges-{key[:32]}.json"
