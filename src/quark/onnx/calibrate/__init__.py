"""Find the range of every wanted tensor, by running the float model over the calibration samples.

One pass for the extremes; a second one where a method needs it, with histograms or candidate errors over them. What is
held in memory are those and the activations of a sample or two, however many samples there are, and results depend
neither on their order nor on the size of batches (a moving average and a majority of samples by their nature do).

    with FloatRunner(model, wanted) as runner:
        ranges = calibrate(runner, wanted, samples, options)
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

from quark.formats.spec import IntFormat
from quark.onnx.calibrate.cache import cache_key, read_ranges, write_ranges
from quark.onnx.calibrate.moments import ChannelMoments
from quark.onnx.calibrate.options import CalibrationOptions
from quark.onnx.calibrate.passes import Observers, Pass
from quark.onnx.calibrate.runner import FloatRunner
from quark.onnx.calibrate.survey import ChannelExtremes, Statistic, survey
from quark.onnx.data.samples import Samples
from quark.onnx.progress import Track, track
from quark.ranges import Observer, RangeMethod, TensorRange
from quark.ranges.candidates import CandidateObserver

__all__ = [
    "CalibrationOptions",
    "ChannelExtremes",
    "ChannelMoments",
    "FloatRunner",
    "Statistic",
    "Wanted",
    "calibrate",
    "calibrate_candidates",
    "survey",
]


@dataclass(frozen=True)
class Wanted:
    """How the range of a tensor is to be found, and for which codes."""

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
        key = cache_key(_facts(runner, wanted, samples, options))
        cached = read_ranges(options.cache, key, wanted)
        if cached is not None:
            return cached
    observers = _observe(runner, {name: each.observer() for name, each in wanted.items()}, samples, options, progress)
    with ThreadPoolExecutor(runner.workers) as pool:  # searching histograms is arithmetic of numpy
        ranges = dict(zip(observers, pool.map(lambda each: each.result(), observers.values()), strict=True))
    if options.has_symmetric_ranges:
        ranges = {name: _make_even(each) for name, each in ranges.items()}
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
    """The ranges that several methods would give each tensor, by the name of the method.

    `observed` has the extremes of tensors that are known already: if all are, this takes one pass over the samples.
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


def _make_even(found: TensorRange) -> TensorRange:
    reach = max(-found.lowest, found.highest)
    return TensorRange(-reach, reach, found.position)


def _facts(
    runner: FloatRunner, wanted: Mapping[str, Wanted], samples: Samples, options: CalibrationOptions
) -> list[str]:
    """Everything that the ranges follow from."""
    import onnxruntime

    settings = [f"{name}: {each!r}" for name, each in sorted(wanted.items())]
    rest = [str(options.has_symmetric_ranges), str(options.providers), onnxruntime.__version__]
    return [runner.model_digest(), samples.digest(), *settings, *rest]
