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
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import onnx_ir as ir

from quark.errors import InvalidValueError
from quark.files.foreign import REPORT, Fields, read_json
from quark.files.output import complete
from quark.formats.spec import IntFormat
from quark.onnx.calibrate.passes import CalibrationOptions, Observers, Pass
from quark.onnx.calibrate.range_files import read_range_file, write_range_file
from quark.onnx.calibrate.runner import FloatRunner
from quark.onnx.calibrate.survey import ChannelExtremes, Statistic, survey, survey_together
from quark.onnx.data.samples import Samples
from quark.onnx.progress import Track, track
from quark.ranges import Observer, RangeMethod, TensorRange
from quark.ranges.histogram_methods import CandidateObserver
from quark.ranges.power_of_two import POSITION_METHODS, histogram_observer
from quark.text import get_logger

__all__ = [
    "CalibrationOptions",
    "ChannelExtremes",
    "FloatRunner",
    "Statistic",
    "Wanted",
    "calibrate",
    "calibrate_candidates",
    "restored",
    "survey",
    "survey_together",
]

CACHE_VERSION = 1

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class Wanted:
    """The method for the range of a tensor, and the codes that it is for."""

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
    known: dict[str, TensorRange] = {}
    if options.ranges_file is not None:
        stored = dict(restored(options).known_ranges or ())
        for name, request in wanted.items():
            if name in stored:
                known[name] = stored[name].range_for(request.integer, isinstance(request.method, POSITION_METHODS))
        if known:
            _LOG.info("%d of %d ranges are taken from %s", len(known), len(wanted), options.ranges_file)
    missing = {name: request for name, request in wanted.items() if name not in known}
    if not missing:
        return known
    known |= _passed_on(runner, missing, samples, options, progress)
    if options.ranges_file is not None:
        formats = {name: request.integer for name, request in missing.items()}
        write_range_file(options.ranges_file, {name: known[name] for name in missing}, formats)
    return {name: known[name] for name in wanted}


def restored(options: CalibrationOptions) -> CalibrationOptions:
    """The options with the ranges that the file of ranges has now: those that a run adds to it are for the next run."""
    if options.ranges_file is None or options.known_ranges is not None:
        return options
    return replace(options, known_ranges=tuple(read_range_file(options.ranges_file).items()))


def range_sources(model: ir.Model, op_types: Collection[str]) -> dict[str, str]:
    """Return the source of the range of each output of these operators, which only move values: the nearest tensor
    before it, along the first inputs, that another operator computes. Constants and integers have none."""
    sources: dict[str, str] = {}
    for node in model.graph:
        first = node.inputs[0] if node.inputs else None
        if node.op_type not in op_types or first is None or first.name is None:
            continue
        source = sources.get(first.name, first.name)
        is_moved = first.name in sources or _is_float_activation(model, first)
        if is_moved:
            sources |= {str(value.name): source for value in node.outputs if _is_float_activation(model, value)}
    return sources


def _is_float_activation(model: ir.Model, value: ir.Value) -> bool:
    is_float = value.dtype is None or value.dtype.is_floating_point()
    return is_float and value.name is not None and value.name not in model.graph.initializers


def _passed_on(
    runner: FloatRunner, wanted: Mapping[str, Wanted], samples: Samples, options: CalibrationOptions, progress: Track
) -> dict[str, TensorRange]:
    """The ranges, where outputs of `passthrough_op_types` have that of the tensor that they come from."""
    sources = range_sources(runner.model, options.passthrough_op_types)
    origins = {name: sources.get(name, name) for name in wanted}
    runner.watch(origins.values())
    passed_on: dict[str, TensorRange] = {}
    pending = dict(wanted)
    while pending:  # once, unless tensors with one origin are wanted by several methods
        measured: dict[str, Wanted] = {}
        for name, request in pending.items():
            measured.setdefault(origins[name], request)
        ranges = _cached(runner, measured, samples, options, progress)
        passed_on |= {
            name: ranges[origins[name]] for name, request in pending.items() if measured[origins[name]] == request
        }
        pending = {name: request for name, request in pending.items() if name not in passed_on}
    return passed_on


def _cached(
    runner: FloatRunner, wanted: Mapping[str, Wanted], samples: Samples, options: CalibrationOptions, progress: Track
) -> dict[str, TensorRange]:
    key = ""
    if options.cache is not None:
        import onnxruntime

        settings = [f"{name}: {request!r}" for name, request in sorted(wanted.items())]
        rest = [str(options.has_symmetric_ranges), str(options.providers), onnxruntime.__version__]
        rest += [] if options.histogram_bins is None else [str(options.histogram_bins)]
        facts = [CACHE_VERSION, runner.model_digest(), samples.digest(), *settings, *rest]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        cached = read_ranges(options.cache, key, wanted)
        if cached is not None and options.histogram_folder is None:
            return cached
    observers = {name: request.observer() for name, request in wanted.items()}
    if options.histogram_bins is not None:
        counting = [inner for observer in observers.values() if (inner := histogram_observer(observer)) is not None]
        for inner in counting:
            inner.set_bins(options.histogram_bins)
        if not counting:
            _LOG.warning("NumBins: no range is found from a histogram, so that it is not used")
    observers = _observe(runner, observers, samples, options, progress)
    with ThreadPoolExecutor(runner.workers) as pool:  # searching histograms is arithmetic of numpy
        ranges = dict(zip(observers, pool.map(lambda observer: observer.result(), observers.values()), strict=True))
    if options.histogram_folder is not None:
        from quark.onnx.calibrate.pictures import draw_histograms  # late: it loads pillow

        draw_histograms(options.histogram_folder, observers, ranges)
    if options.has_symmetric_ranges:
        for name, range_ in ranges.items():
            reach = max(-range_.lowest, range_.highest)
            ranges[name] = TensorRange(-reach, reach, range_.position)
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
        name: CandidateObserver(request.integer, request.is_symmetric, observed.get(name))
        for name, request in wanted.items()
    }
    unknown = {name: observer for name, observer in observers.items() if name not in observed}
    limit = options.memory_limit_bytes
    if unknown:
        with progress(samples.count, "looking for extremes") as advance:
            observers |= Pass(runner, iter(samples), limit, lambda observer, x: observer.observe(x), advance).run(
                unknown
            )
    with progress(samples.count, "calibrating by several methods") as advance:
        counted = Pass(runner, iter(samples), limit, lambda observer, x: observer.observe_again(x), advance).run(
            observers
        )
    with ThreadPoolExecutor(runner.workers) as pool:
        candidates = list(pool.map(lambda observer: cast(CandidateObserver, observer).candidates(), counted.values()))
    return dict(zip(counted, candidates, strict=True))


def _observe(
    runner: FloatRunner, observers: Observers, samples: Samples, options: CalibrationOptions, progress: Track
) -> Observers:
    limit = options.memory_limit_bytes
    with progress(samples.count, "calibrating") as advance:
        observers = Pass(runner, iter(samples), limit, lambda observer, x: observer.observe(x), advance).run(observers)
    again = {name: observer for name, observer in observers.items() if observer.needs_second_pass}
    if again:
        with progress(samples.count, "calibrating, second pass") as advance:
            again = Pass(runner, iter(samples), limit, lambda observer, x: observer.observe_again(x), advance).run(
                again
            )
    last = {name: observer for name, observer in again.items() if observer.needs_third_pass}
    if last:
        with progress(samples.count, "calibrating, third pass") as advance:
            last = Pass(runner, iter(samples), limit, lambda observer, x: observer.observe_finally(x), advance).run(
                last
            )
    return {**observers, **again, **last}


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
