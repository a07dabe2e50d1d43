"""The quality of a network of mixed precision, by the user's function or measure, and by its distance from float."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.compare.measures import ErrorSums
from quark.errors import InvalidValueError, MissingDependencyError, ModelError
from quark.features.mixed_precision.networks import Array, Network
from quark.features.mixed_precision.options import MixOptions, Score
from quark.features.mixed_precision.plan import Figure, Metric
from quark.features.mixed_precision.scores import number_from, score_of
from quark.measures import FunctionMeasure, Judge, Measure, OutputMeasure
from quark.measures.measure import check_count, output_of
from quark.onnx.data import Sample, Samples
from quark.onnx.data.samples import SampleStore


class Quality:
    """Compares networks with the float one: `evaluate` on all samples in the order in which they came, distances on
    some of those to calibrate on. What the float network gives is computed once; outputs are kept on the disk."""

    def __init__(self, reference: ir.Model, samples: Samples, options: MixOptions, providers: tuple[str, ...]) -> None:
        self._samples, self._options = samples, options
        self.output = output_name(reference, options.output_index)
        self._torch = _import_torch() if options.evaluate is not None else None
        self._has_distances = options.l2 is not None or options.sqnr_db is not None
        self._accuracy: float | None = None
        with Network(reference, providers) as network:
            self.sensitive = Expected(network, samples, options.sensitivity_samples, self.output)
            self._scored: Expected | None = None
            if options.score is not None:
                self._scored = InOrder(network, samples, options.sample_limit, self.output)
            count = options.distance_samples if self._has_distances else 0
            self._distant = Expected(network, samples, count, self.output)
            if options.evaluate is not None:
                self._accuracy = self._evaluated(network)
            self._judge = None
            if options.measure is not None:
                self._judge = _MeasureJudge(options.measure, network, reference, samples, options)

    def error(self, network: Network) -> float:
        """The squared error of the output relative to its power, over the samples for sensitivities."""
        return _distances(self.sensitive, network).relative_error

    def score(self, network: Network) -> float:
        """The score of a network that is compared with others: over the samples for sensitivities, or over all if a
        function of the user counts on their order."""
        score = self._options.score
        assert score is not None
        return self._score(score, network, None if score.function is not None else self.sensitive)

    def _score(self, score: Score, network: Network, expected: Expected | None = None) -> float:
        seen = expected or self._scored
        assert seen is not None
        return score_of(score, seen.__iter__, network.outputs(seen.samples(), seen.output))

    def figures(self, network: Network) -> tuple[Figure, ...]:
        """All that there is a target for."""
        options = self._options
        figures = []
        if options.accuracy_drop is not None and self._accuracy is not None:
            limit = self._accuracy - options.accuracy_drop
            figures.append(Figure(Metric.ACCURACY, self._evaluated(network), limit, self._accuracy))
        if options.score is not None and options.score.limit is not None:
            figures.append(Figure(Metric.SCORE, self._score(options.score, network), options.score.limit))
        if self._judge is not None and options.measure_drop is not None:
            figures.append(Figure(Metric.MEASURE_DROP, self._judge.drop(network), options.measure_drop))
        if self._has_distances:
            sums = _distances(self._distant, network)
            if options.l2 is not None:
                figures.append(Figure(Metric.L2, sums.mean_l2, options.l2))
            if options.sqnr_db is not None:
                figures.append(Figure(Metric.SQNR, sums.sqnr_db, options.sqnr_db))
        return tuple(figures)

    def _evaluated(self, network: Network) -> float:
        assert self._options.evaluate is not None
        parts = list(network.outputs(self._samples.in_order(), self.output))
        try:
            joined = np.concatenate([np.atleast_1d(part) for part in parts])
        except ValueError as error:
            raise ModelError(
                f"output '{self.output}' cannot be joined over samples for EvaluateFunction: {error}"
            ) from error
        return _called(self._options.evaluate, self._torch.from_numpy(joined))  # type: ignore[union-attr]


class _MeasureJudge:
    """Takes a measure of networks against the float one. Built-in measures compare the output they name, or the one of
    `OutputIndex`, on some of the samples to calibrate on."""

    def __init__(
        self, measure: Measure, network: Network, reference: ir.Model, samples: Samples, options: MixOptions
    ) -> None:
        self._expected: Expected | None = None
        if isinstance(measure, OutputMeasure):
            names = [str(value.name) for value in reference.graph.outputs]
            wanted = replace(measure, output=measure.output or output_name(reference, options.output_index))
            output = output_of(wanted, dict.fromkeys(names))
            check_count(measure, min(options.distance_samples, samples.rows))
            self._expected = expected = Expected(network, samples, options.distance_samples, output)
            self._judge = Judge(wanted, None, _Again(expected.samples), _Again(expected.outputs))
        else:
            assert isinstance(measure, FunctionMeasure)
            self._judge = Judge(measure, network.session)

    def drop(self, network: Network) -> float:
        if self._expected is None:
            return self._judge.judge(network.session).drop
        output = self._expected.output
        outputs = network.outputs(self._expected.samples(), output)
        return self._judge.judge_outputs({output: value} for value in outputs).drop


class _Again:
    """Iterates over samples that are read again each time, so that they need not be held in memory."""

    def __init__(self, read: Callable[[], Iterator[Sample]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Sample]:
        return self._read()


class Expected:
    """Some of the samples to calibrate on, evenly spaced, and the float network's outputs for them."""

    def __init__(self, network: Network, samples: Samples, count: int | None, output: str) -> None:
        self.output = output
        self._samples = samples
        self._limit = samples.batches(count) if count else count
        number = samples.count if self._limit is None else min(self._limit, samples.count)
        self._chosen = {i * samples.count // number for i in range(number)}
        self._kept = SampleStore()
        for value in network.outputs(self.samples(), output):
            self._kept.append({output: np.asarray(value)})

    def outputs(self) -> Iterator[Sample]:
        return ({self.output: value} for value in self)

    def samples(self) -> Iterator[Sample]:
        return (sample for i, sample in enumerate(self._samples) if i in self._chosen)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Array]:
        return (self._kept[i][self.output] for i in range(len(self._kept)))


class InOrder(Expected):
    """The first samples in the order in which they came, all if there is no number."""

    def samples(self) -> Iterator[Sample]:
        return islice(self._samples.in_order(), self._limit)


def _distances(expected: Expected, network: Network) -> ErrorSums:
    """The errors of a network's output over the samples of `expected`."""
    sums = ErrorSums()
    for wanted, actual in zip(expected, network.outputs(expected.samples(), expected.output), strict=True):
        sums.add(wanted, actual)
    return sums


def output_name(model: ir.Model, index: int) -> str:
    """The output of that number; an error where there are not so many."""
    names = [str(value.name) for value in model.graph.outputs]
    if index >= len(names):
        listed = ", ".join(f"{number}: '{name}'" for number, name in enumerate(names[:8]))
        raise InvalidValueError(
            f"AutoMixprecision.OutputIndex {index}: the model has {len(names)} outputs, expected one of {listed}"
        )
    return names[index]


def _import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise MissingDependencyError(
            "EvaluateFunction is called with a torch.Tensor, and torch is not installed: "
            "pip install torch, or use L2Target or SQNRTarget, which need none"
        ) from error


def _called(function: Callable[[Any], Any], outputs: Any) -> float:
    name = f"EvaluateFunction {getattr(function, '__name__', function)!r}"
    given = f"the outputs of all calibration samples, a tensor of shape {tuple(outputs.shape)}"
    value = number_from(function, name, [outputs], given, "a number, the higher the better")
    if not math.isfinite(value):
        raise InvalidValueError(f"{name} returned {value!r}: expected a finite number, the higher the better")
    return value
