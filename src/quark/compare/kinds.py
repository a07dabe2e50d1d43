"""How each kind of part is measured.

    ids            integers: the share that is equal
    distribution   sums to one along an axis: the share of positions with the same largest class. Positions where both
                   networks find the commonest class do not count: a network that only finds blanks would look good
    sequence       the same where the commonest class is the blank of CTC: repeats and blanks are removed, and the rest
                   is compared by edit distance, because characters may move by a position
    classes        one row of scores for each sample: the share of samples with the same largest class, and SQNR
    scores         probabilities in [0, 1] that are mostly near 0: overlap of the scores above 0.1, weighted by them
    map            scores in two dimensions, where a shift by one pixel counts little
    detections     boxes with scores: the share of boxes that both networks find, weighted by their scores
    values         everything else: SQNR

A class that the float network finds nearly as likely as its first counts as agreeing in part, so ties do not decide.

A meter gathers a few sums for each sample. Its result has a figure over all samples together, which has to be good,
and that of the worst sample, which has to be good enough.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.compare.detections import BoxReader, box_weight, has_corners, score_weight, select, shared_weight, sigmoid
from quark.compare.measures import edit_distance, mean_relative_error, sqnr_of, square_sum
from quark.compare.verdict import PartFidelity, severity_of

Array = NDArray[Any]
Sample = Mapping[str, Array]


@dataclass(frozen=True)
class Bounds:
    """The figures from which a part is ok, and below which it is collapsed: over all samples, and on the worst one."""

    ok: float
    collapsed: float
    sample_ok: float
    sample_collapsed: float

    def severity(self, figure: float, worst: float) -> float:
        return max(
            severity_of(figure, self.ok, self.collapsed), severity_of(worst, self.sample_ok, self.sample_collapsed)
        )


IDS = Bounds(0.9, 0.5, 0.8, 0.2)
DISTRIBUTION = Bounds(0.93, 0.5, 0.7, 0.2)
CLASSES = (0.74, 0.4)
CLASS_OVERLAP = (0.8, 0.5)
CERTAIN_FLIPS = (0.95, 0.5)  # share of samples whose answer was uncertain, or did not change
CERTAIN = 0.9  # how much likelier the float network finds its own class than the other network's
LOGITS, ALL_LOGITS = (9.0, 3.0), (8.0, 2.0)  # for the median sample, for all samples together
SCORES = Bounds(0.93, 0.5, 0.6, 0.2)
BOXES = Bounds(0.953, 0.5, 0.6, 0.2)
MAPS = Bounds(0.968, 0.7, 0.7, 0.2)
QUIET_SCORES = (3.0, -3.0)
DOUBTFUL = 0.5
VALUES = Bounds(10.0, 3.0, 8.0, 1.0)
# One number per sample has no mean over many errors: the largest error is several times the usual one. The output is
# collapsed at twice its standard deviation.
NUMBERS = Bounds(10.0, 3.0, 4.0, -6.0)
ROWS = Bounds(8.0, 1.0, 6.0, 0.0)
CHANNELS = Bounds(7.0, 0.0, -math.inf, -math.inf)
FEWEST_ROWS = 8  # of a sample, to have a median
FEWEST_CHANNELS = 16
FEWEST_POSITIONS = 32  # of all samples, to know a channel's mean and variance
# A regressor that gives the mean is broken. The variance of a few numbers is known to some decibels from 8 samples on.
FEWEST_NUMBERS = 8
MOST_QUANTITIES = 8  # rows of more numbers are usually scores of classes
LEAST_VARYING_OF_FEW = 0.03
LEAST_VARYING = 0.001  # share of a part's power that counts as signal even if it hardly varies
MOST_ROWS = 2000
NO_TIE = 0.2  # classes that float finds less likely than its first by this much, or more, do not agree at all


@dataclass(frozen=True)
class Place:
    """A part of an output: a range of an axis, or all of it."""

    output: str
    axis: int | None = None
    start: int = 0
    stop: int = 0

    def of(self, sample: Sample) -> Array:
        """The part's values in one sample."""
        values = sample[self.output]
        if self.axis is None:
            return values
        return values[(slice(None),) * self.axis + (slice(self.start, self.stop),)]

    @property
    def name(self) -> str:
        if self.axis is None:
            return ""
        if self.stop == self.start + 1:
            return f"channel {self.start} of axis {self.axis}"
        return f"channels {self.start}..{self.stop - 1} of axis {self.axis}"


class PartMeter(ABC):
    """Measures one part of an output, or of several outputs that belong together.

    Attributes that are lists have an entry for each sample. `are_sets` is True if rows are matched with each other, so
    that their positions mean nothing.
    """

    kind = ""
    are_sets = False

    def __init__(self, place: Place) -> None:
        self.place = place
        self.outputs: tuple[str, ...] = (place.output,)
        self.error: list[float] = []
        self.power: list[float] = []

    @abstractmethod
    def add(self, expected: Sample, actual: Sample) -> None:
        """Add one sample: all outputs of both networks."""

    @abstractmethod
    def result(self) -> PartFidelity:
        """The figures over all samples."""


class OverlapMeter(PartMeter):
    """The base of meters whose figure is shared weight as a share of all weight: a Dice coefficient.

    `prior` is added to both, so that samples with hardly anything in them do not decide. Where all samples together
    have hardly anything, the SQNR of the scores themselves is the figure, as low as they are, and the severity is at
    least `DOUBTFUL`: a network that finds nothing on such samples may have lost everything.
    """

    def __init__(self, place: Place, kind: str, measure: str, bounds: Bounds, prior: float) -> None:
        super().__init__(place)
        self.kind, self.measure, self.bounds, self.prior = kind, measure, bounds, prior
        self.shared: list[float] = []
        self.total: list[float] = []
        self.score_error: list[float] = []
        self.score_power: list[float] = []

    def keep(self, shared: float, total: float, error: float, power: float) -> None:
        """Keep the sums of one sample."""
        self.shared.append(shared)
        self.total.append(total)
        self.error.append(error)
        self.power.append(power)

    def result(self) -> PartFidelity:
        shared, total = np.array(self.shared), np.array(self.total)
        everything = float(total.sum())
        figure = float(shared.sum()) / everything if everything > 0 else 1.0
        pooled = (float(shared.sum()) + self.prior) / (everything + self.prior)
        samples = (shared + self.prior) / (total + self.prior)
        worst = int(samples.argmin())
        own = float(shared[worst] / total[worst]) if total[worst] > 0 else 1.0
        of_sample = severity_of(float(samples[worst]), self.bounds.sample_ok, self.bounds.sample_collapsed)
        if total[worst] < total.mean() / 2:
            of_sample = min(of_sample, 2.0)  # too little in the sample to call the network collapsed
        of_all = severity_of(min(pooled, float(samples.mean())), self.bounds.ok, self.bounds.collapsed)
        severity = max(of_all, of_sample)
        distance = mean_relative_error(self.error, self.power)
        if everything < 2 * self.prior and sum(self.score_power) > 0:
            levels = [sqnr_of(error, power) for error, power in zip(self.score_error, self.score_power, strict=True)]
            figure, worst = sqnr_of(sum(self.score_error), sum(self.score_power)), int(np.argmin(levels))
            severity = min(max(severity_of(figure, *QUIET_SCORES), DOUBTFUL), 2.0) if figure < math.inf else 0.0
            measure = "SQNR (all scores are low)"
            return PartFidelity(self.place.name, self.kind, measure, figure, worst, levels[worst], severity, distance)
        if everything < self.prior:
            severity = min(severity, 1.0)  # no evidence: neither network finds anything
        return PartFidelity(self.place.name, self.kind, self.measure, figure, worst, own, severity, distance)


class ScoresMeter(OverlapMeter):
    """Probabilities in [0, 1], element by element.

    With `are_logits`, the network leaves Sigmoid to others. `axes` are those of a map in two dimensions, if it is one.
    There a score that moved by one pixel counts four fifths: thin structures would otherwise look bad when only their
    borders move.
    """

    def __init__(self, place: Place, axes: tuple[int, ...] = (), are_logits: bool = False) -> None:
        kind, bounds = ("map", MAPS) if axes else ("scores", SCORES)
        what = "scores behind Sigmoid" if are_logits else "scores"
        super().__init__(place, kind, f"overlap of {what}", bounds, 1.0)
        self._axes = axes
        self._are_logits = are_logits

    def add(self, expected: Sample, actual: Sample) -> None:
        y, z = self.place.of(expected), self.place.of(actual)
        if self._are_logits:
            y, z = sigmoid(y), sigmoid(z)
        a, b = score_weight(y), score_weight(z)
        shared = 2 * float(np.minimum(a, b).sum(dtype=np.float64))
        if self._axes:
            near = np.minimum(a, _dilated(b, self._axes)).sum(dtype=np.float64)
            near += np.minimum(b, _dilated(a, self._axes)).sum(dtype=np.float64)
            shared = (shared + 4 * float(near)) / 5
        error, power = square_sum(z - y), square_sum(y)
        self.keep(shared, float(a.sum(dtype=np.float64) + b.sum(dtype=np.float64)), error, power + 0.1)
        self.score_error.append(error)
        self.score_power.append(power)


def _dilated(values: Array, axes: tuple[int, ...]) -> Array:
    """The largest of each value and its neighbours along the axes."""
    for axis in axes:
        lead = (slice(None),) * axis
        ahead, behind = (*lead, slice(1, None)), (*lead, slice(None, -1))
        wider = values.copy()
        np.maximum(wider[ahead], values[behind], out=wider[ahead])
        np.maximum(wider[behind], values[ahead], out=wider[behind])
        values = wider
    return values


class DetectionsMeter(OverlapMeter):
    """Boxes with scores, as sets. `outputs` are those that they are read from, and `scores` the part with their scores
    if both networks have them in the same positions."""

    def __init__(
        self,
        place: Place,
        name: str,
        reader: BoxReader,
        samples: Sequence[Sample],
        outputs: tuple[str, ...],
        scores: Place | None = None,
    ) -> None:
        super().__init__(place, "detections", "agreement of boxes", BOXES, 0.5)
        self.outputs = outputs
        self.are_sets = scores is None
        self._name, self._reader, self._scores = name, reader, scores
        firing = [boxes[scores > 0.25] for boxes, scores, _ in map(reader, samples)]
        self._are_corners = has_corners(np.concatenate(firing))

    def add(self, expected: Sample, actual: Sample) -> None:
        y, z = (select(*self._reader(sample), self._are_corners) for sample in (expected, actual))
        shared, error, total = shared_weight(y, z)
        power = float(box_weight(y.scores).sum()) + 0.1
        if self._scores is not None:  # smoother than a few boxes
            values, others = self._scores.of(expected), self._scores.of(actual)
            self.score_error.append(square_sum(others - values))
            self.score_power.append(square_sum(values))
            error, power = error + self.score_error[-1], power + self.score_power[-1]
        self.keep(shared, total, error, power)

    def result(self) -> PartFidelity:
        return replace(super().result(), name=self._name)


class SymbolsMeter(OverlapMeter):
    """The base of meters of symbols: integers, or the largest classes along an axis.

    Positions where both have the symbol `commonest` do not count, if one is given. With `is_sequence` it is the blank
    of CTC, and the sequences are compared by edit distance; of a near tie, both have the float network's symbol.
    """

    def __init__(
        self, place: Place, kind: str, measure: str, bounds: Bounds, commonest: int | None, is_sequence: bool
    ) -> None:
        if is_sequence:
            kind, measure, bounds = "sequence", "agreement of the sequences", DISTRIBUTION
        elif commonest is not None:
            measure += f" (other than {commonest})"
        super().__init__(place, kind, measure, bounds, 1.0)
        self.commonest = commonest
        self._is_sequence = is_sequence

    def overlap(self, first: Array, second: Array, agreement: Array) -> tuple[float, float]:
        """The weight that both sides share and the weight of all; `agreement` of each position is from 0 to 1."""
        if self._is_sequence and self.commonest is not None:
            second = np.where(agreement > 0.5, first, second) if first.shape == second.shape else second
            y, z = (x[np.append(True, x[1:] != x[:-1]) & (x != self.commonest)] for x in (first, second))
            length = float(max(len(y), len(z)))
            return 2 * (length - edit_distance(y, z)), 2 * length
        counts = np.full(first.shape, 2.0)
        if self.commonest is not None:
            counts = (first != self.commonest) * 1.0 + (second != self.commonest)
        return float((agreement * counts).sum()), float(counts.sum())


class IdsMeter(SymbolsMeter):
    """Integers. Those of different shapes are compared as sets."""

    def __init__(self, place: Place, commonest: int | None = None, is_sequence: bool = False) -> None:
        super().__init__(place, "ids", "share of equal values", IDS, commonest, is_sequence)

    def add(self, expected: Sample, actual: Sample) -> None:
        y, z = (self.place.of(sample).reshape(-1) for sample in (expected, actual))
        if self._is_sequence or self.place.of(expected).shape == self.place.of(actual).shape:
            shared, total = self.overlap(y, z, y == z if y.shape == z.shape else np.zeros(y.shape))
        else:
            (values, counts), (others, their_counts) = (np.unique(x, return_counts=True) for x in (y, z))
            _, here, there = np.intersect1d(values, others, return_indices=True)
            shared, total = 2.0 * int(np.minimum(counts[here], their_counts[there]).sum()), float(y.size + z.size)
        self.keep(shared, total, total - shared, total / 2 + 0.1)


class DistributionMeter(SymbolsMeter):
    """Classes along an axis: probabilities that sum to one, their logarithms, or logits."""

    def __init__(
        self, place: Place, axis: int, commonest: int | None, is_log: bool = False, is_sequence: bool = False
    ) -> None:
        measure = f"same largest class along axis {axis}"
        super().__init__(place, "distribution", measure, DISTRIBUTION, commonest, is_sequence)
        self._axis, self._is_log = axis, is_log

    def add(self, expected: Sample, actual: Sample) -> None:
        y, z = (np.moveaxis(self.place.of(sample), self._axis, -1) for sample in (expected, actual))
        y, z = (x.reshape(-1, x.shape[-1]) for x in (y, z))
        first, other = y.argmax(1), z.argmax(1)
        rows = np.arange(len(y))
        likely, less_likely = y[rows, first].astype(np.float64), y[rows, other].astype(np.float64)
        if self._is_log:
            norms = likely + np.log(np.exp(y - likely[:, None]).sum(1))
            likely, less_likely = np.exp(likely - norms), np.exp(less_likely - norms)
        agreement = np.clip(1 - (likely - less_likely) / NO_TIE, 0.0, 1.0)
        agreement[first == other] = 1.0
        self.keep(*self.overlap(first, other, agreement), square_sum(z - y), square_sum(y) + 0.1)


class RowsMeter(OverlapMeter):
    """Rows whose number differs between the networks: the share of rows that have a near neighbour in the other set.

    A row counts in full if it is equal to one of the other network's, and not at all from a distance of half the usual
    distance between rows on. Where the length of a row depends on the sample, as of a waveform, there are no rows to
    find again: values are compared place by place, and those that one network lacks are zero.
    """

    are_sets = True

    def __init__(self, place: Place, arrays: Sequence[Array]) -> None:
        tables = [_as_rows(x) for x in arrays if x.size]
        self._has_rows = len({x.shape[1] for x in tables}) <= 1
        what = "rows" if self._has_rows else "the signal"
        super().__init__(place, "rows", f"share of {what} that both have", SCORES, 1.0)
        rows = np.concatenate(tables) if tables and self._has_rows else np.ones((1, arrays[0].shape[-1]))
        self._scale = np.maximum(rows.std(0), 1e-6 + 1e-3 * np.abs(rows).max(0))

    def add(self, expected: Sample, actual: Sample) -> None:
        if not self._has_rows:
            self._add_places(self.place.of(expected), self.place.of(actual))
            return
        y, z = (_as_rows(self.place.of(sample)) for sample in (expected, actual))
        if y.shape[1] != z.shape[1] or y.shape[1] != len(self._scale) or not len(y) or not len(z):
            shared = 0.0
        else:
            y, z = (x[:MOST_ROWS] / self._scale / math.sqrt(2 * x.shape[1]) for x in (y, z))
            squares = (y * y).sum(1)[:, None] + (z * z).sum(1) - 2 * y @ z.T
            distances = np.sqrt(np.maximum(squares, 0.0))
            shared = float(sum(np.clip(1 - 2 * distances.min(axis), 0, 1).sum() for axis in (0, 1)))
        total = float(len(y) + len(z))
        self.keep(shared, total, total - shared, float(len(y)) + 0.1)

    def _add_places(self, y: Array, z: Array) -> None:
        if y.ndim == z.ndim:
            sizes = [max(pair) for pair in zip(y.shape, z.shape, strict=True)]
            y, z = (np.pad(x, [(0, size - own) for size, own in zip(sizes, x.shape, strict=True)]) for x in (y, z))
            error, power = square_sum(z.astype(np.float64) - y), square_sum(y)
        else:
            error = power = square_sum(y)
        total = power + 1e-30
        self.keep(max(total - error, 0.0), total, error, power)


def _as_rows(values: Array) -> Array:
    width = values.shape[-1] if values.ndim > 1 else 1
    return values.reshape(-1, width).astype(np.float64) if values.size else np.zeros((0, width))


class ClassesMeter(PartMeter):
    """One row of scores for each class: logits, or probabilities that sum to one.

    A sample whose class changes does not decide by itself, because good classifiers change a few of their answers: only
    those that they are not certain of. So the figures are the agreement over all samples, the share of answers that
    were certain and changed, and the SQNR of the median sample for logits or the overlap for probabilities.
    """

    kind = "classes"

    def __init__(self, place: Place, is_distribution: bool) -> None:
        super().__init__(place)
        self._is_distribution = is_distribution
        self._agreements: list[float] = []
        self._gaps: list[float] = []
        self._overlaps: list[float] = []

    def add(self, expected: Sample, actual: Sample) -> None:
        y, z = (self.place.of(sample).reshape(-1).astype(np.float64) for sample in (expected, actual))
        self.error.append(square_sum(z - y))
        self.power.append(square_sum(y))
        if not self._is_distribution:
            y, z = (np.exp(x - x.max()) for x in (y, z))
            y, z = y / y.sum(), z / z.sum()
        first, other = int(y.argmax()), int(z.argmax())
        gap = float(y[first] - y[other])
        self._gaps.append(gap)
        self._agreements.append(max(1 - gap / NO_TIE, 0.0))
        self._overlaps.append(float(np.minimum(y, z).sum()))

    def result(self) -> PartFidelity:
        count, agreement = len(self._agreements), float(np.mean(self._agreements))
        worst = int(np.lexsort((self._overlaps, self._agreements))[0])
        severity = severity_of((count * agreement + 1) / (count + 1), *CLASSES)
        severity = max(severity, severity_of(float(np.mean(np.array(self._gaps) < CERTAIN)), *CERTAIN_FLIPS))
        candidates = [("agreement of the largest class", agreement, worst, self._agreements[worst], severity)]
        distance = mean_relative_error(self.error, self.power)
        if self._is_distribution:
            overlap, worst = float(np.mean(self._overlaps)), int(np.argmin(self._overlaps))
            severity = severity_of(overlap, *CLASS_OVERLAP)
            candidates.append(("overlap of the distributions", overlap, worst, self._overlaps[worst], severity))
            distance = 1 - overlap
        else:
            error, power = np.array(self.error), np.maximum(self.power, 1e-30)
            worst = int((error / power).argmax())
            own, median = sqnr_of(error[worst], power[worst]), sqnr_of(float(np.median(error / power)), 1.0)
            figure = sqnr_of(float(error.sum()), float(power.sum()))
            severity = max(severity_of(median, *LOGITS), severity_of(figure, *ALL_LOGITS))
            candidates.append(("SQNR", figure, worst, own, severity))
        chosen = max(candidates, key=lambda candidate: candidate[-1])
        return PartFidelity(self.place.name, self.kind, *chosen, distance)


class ValuesMeter(PartMeter):
    """Values of one scale: SQNR of the whole, of the median row and of the median channel.

    A few large rows or channels hide the others in the whole. Channels lie along `axis`, and a row is all channels at
    one position. The mean of a channel does not count as signal if it is known well enough: from 32 positions on, and
    from 8 samples on if the output is one number, or a row of a few.

    `weights` returns the weight of each position of a sample, with an axis of length 1 for the channels: a detector's
    boxes matter where its scores do.
    """

    def __init__(self, place: Place, axis: int = -1, weights: Callable[[Sample], Array] | None = None) -> None:
        super().__init__(place)
        self.kind = "values" if weights is None else "values where scores fire"
        self._axis, self._weights = axis, weights
        self._rows: list[float] = []
        self._channel_sums: list[Array] = []  # of each sample: positions, sum of values, of squares, of squared errors

    def add(self, expected: Sample, actual: Sample) -> None:
        y, z = self.place.of(expected), self.place.of(actual)
        axis = self._axis % y.ndim
        form = (int(np.prod(y.shape[:axis])), y.shape[axis], int(np.prod(y.shape[axis + 1 :])))
        y, z = y.reshape(form), z.reshape(form)
        e = z - y
        count = np.float64(form[0] * form[2])
        if self._weights is not None:
            weights = np.sqrt(self._weights(expected)).reshape(form[0], 1, form[2])
            y, e, count = y * weights, e * weights, np.square(weights).sum()
            total = (y * weights).sum((0, 2), dtype=np.float64)
        else:
            total = y.sum((0, 2), dtype=np.float64)
        with np.errstate(over="ignore"):  # beyond 1e19 a square is Inf, and the verdict says so
            y, e = np.square(y), np.square(e)
        row_power, row_error = y.sum(1).ravel(), e.sum(1).ravel()
        channel_power, channel_error = (x.sum((0, 2), dtype=np.float64) for x in (y, e))
        self.power.append(float(channel_power.sum()))
        self.error.append(float(channel_error.sum()))
        has_signal = _has_signal(row_power)
        ratios = row_error[has_signal] / row_power[has_signal]
        is_table = ratios.size >= FEWEST_ROWS and form[1] >= FEWEST_CHANNELS
        self._rows.append(float(np.median(ratios)) if is_table else math.nan)
        self._channel_sums.append(np.stack([np.full(form[1], count), total, channel_power, channel_error]))

    def result(self) -> PartFidelity:
        error, power = np.array(self.error), np.array(self.power)
        has_channels = len({sums.shape for sums in self._channel_sums}) == 1  # false if the length of an axis varies
        counts, totals, squares, errors = np.sum(self._channel_sums, 0) if has_channels else np.zeros((4, 1))
        variances = np.maximum(squares - totals**2 / np.maximum(counts, 1e-30), 0.0)
        has_rows = has_channels and self._weights is None and set(counts.tolist()) == {len(power)}  # one a sample
        is_number = has_rows and len(counts) == 1
        varying = float(variances.sum()) / max(float(squares.sum()), 1e-30)
        if self._weights is None and counts[0] >= FEWEST_POSITIONS:
            power = power * max(varying, LEAST_VARYING)
        elif has_rows and len(counts) <= MOST_QUANTITIES and len(power) >= FEWEST_NUMBERS:
            power = power * min(max(varying * len(power) / (len(power) - 1), LEAST_VARYING_OF_FEW), 1.0)
        figure = sqnr_of(float(error.sum()), float(power.sum()))
        bounds, floor = (NUMBERS, power.mean()) if is_number else (VALUES, 0.25 * power.mean())
        worst = int((error / np.maximum(power, max(floor, 1e-30))).argmax())
        own = sqnr_of(float(error[worst]), max(float(power[worst]), floor))
        candidates = [("SQNR", figure, worst, own, bounds.severity(figure, own))]
        rows = np.array(self._rows)
        if not np.isnan(rows).any():
            median, worst = float(np.median(rows)), int(rows.argmax())
            figure, own = (sqnr_of(ratio, 1.0) for ratio in (median, float(rows[worst])))
            candidates.append(("SQNR of the median row", figure, worst, own, ROWS.severity(figure, own)))
        channels = _has_signal(variances)
        if counts[0] >= FEWEST_POSITIONS and channels.sum() >= FEWEST_CHANNELS:
            figure = sqnr_of(float(np.median(errors[channels] / variances[channels])), 1.0)
            severity = severity_of(figure, CHANNELS.ok, CHANNELS.collapsed)
            candidates.append(("SQNR of the median channel", figure, candidates[0][2], figure, severity))
        chosen = max(candidates, key=lambda candidate: candidate[-1])
        return PartFidelity(self.place.name, self.kind, *chosen, mean_relative_error(error, power))


def _has_signal(powers: Array) -> Array:
    """True for rows or channels that are not nearly empty; most of those that are not zero count."""
    nonzero = powers[powers > 1e-9 * powers.max(initial=0.0)]
    return np.asarray(powers > 1e-3 * np.median(nonzero)) if nonzero.size else np.zeros(len(powers), bool)
