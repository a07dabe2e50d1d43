"""How each kind of part is measured.

    ids            integers: the share that is equal
    distribution   sums to one along an axis: the share of positions with the same largest class. Positions where both
                   networks find the commonest class do not count: a network that only finds blanks would look good
    sequence       the same where the commonest class is the blank of CTC: repeats and blanks are removed, and the rest
                   is compared by edit distance, because characters may move by a position
    classes        one row of scores for each sample: the share of samples with the same largest class, and SQNR
    scores         probabilities in [0, 1] that are mostly near 0: overlap of what is above 0.1, in proportion to it
    map            scores in two dimensions, where a shift by one pixel counts little
    detections     boxes with scores: the share of boxes that both networks find, weighted by their scores
    values         everything else: SQNR

Ties do not count: a class that the float network finds nearly as likely as its first counts as agreeing in part.

A meter gathers a few sums for each sample. Its result has a figure over all samples together, which has to be good,
and that of the worst sample, which has to be good enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quark.fidelity.detections import BoxReader, box_weight, has_corners, score_weight, select, shared_weight, sigmoid
from quark.fidelity.verdict import PartFidelity, severity_of

Array = NDArray[Any]
Sample = Mapping[str, Array]


@dataclass(frozen=True)
class Bounds:
    """From which figure on a part is ok, and below which it is collapsed: over all samples, and on the worst one."""

    ok: float
    collapsed: float
    sample_ok: float
    sample_collapsed: float

    def severity(self, figure: float, worst: float) -> float:
        return max(
            severity_of(figure, self.ok, self.collapsed),
            severity_of(worst, self.sample_ok, self.sample_collapsed),
        )


IDS = Bounds(0.9, 0.5, 0.8, 0.2)
DISTRIBUTION = Bounds(0.93, 0.5, 0.7, 0.2)
CLASSES = (0.74, 0.4)
CLASS_OVERLAP = (0.8, 0.5)
CERTAIN_FLIPS = (0.95, 0.5)  # share of samples whose answer was not certain, or did not change
CERTAIN = 0.9  # how much likelier the float network finds its own class than the other network's
LOGITS, ALL_LOGITS = (9.0, 3.0), (8.0, 2.0)  # of the median sample, of all samples together
SCORES = Bounds(0.93, 0.5, 0.6, 0.2)
BOXES = Bounds(0.953, 0.5, 0.6, 0.2)
MAPS = Bounds(0.968, 0.7, 0.7, 0.2)
QUIET_SCORES = (3.0, -3.0)
DOUBTFUL = 0.5
VALUES = Bounds(10.0, 3.0, 8.0, 1.0)
ROWS = Bounds(8.0, 1.0, 6.0, 0.0)
CHANNELS = Bounds(7.0, 0.0, -math.inf, -math.inf)
FEWEST_ROWS = 8  # of a sample, for their median
FEWEST_CHANNELS = 16
FEWEST_POSITIONS = 32  # of all samples, to know a channel's mean and variance
LEAST_VARYING = 0.001  # share of a part's power that counts as signal even if it hardly varies
MOST_ROWS = 2000
NEAR_TIE = 0.2  # classes that float finds less likely than its first by this much, or more, do not agree at all


class PartMeter(Protocol):
    """Measures one part of an output, or of several outputs that belong together.

    `are_sets` is True if rows are matched with each other, so that their positions mean nothing.
    """

    @property
    def outputs(self) -> tuple[str, ...]: ...

    @property
    def are_sets(self) -> bool: ...

    def add(self, expected: Sample, actual: Sample) -> None:
        """Add one sample: all outputs of both networks."""

    def result(self) -> PartFidelity: ...


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


@dataclass
class OverlapMeter:
    """The base of meters whose figure is shared weight as a share of all weight: a Dice coefficient.

    `prior` is added to both, so that samples with hardly anything in them do not decide. Where all samples together
    have hardly anything, the SQNR of the scores themselves is the figure, as low as they are, and the severity is at
    least `DOUBTFUL`: a network that finds nothing on such samples may have lost everything.
    """

    place: Place
    kind: str
    measure: str
    bounds: Bounds
    prior: float
    shared: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    power: list[float] = field(default_factory=list)
    score_error: list[float] = field(default_factory=list)
    score_power: list[float] = field(default_factory=list)

    are_sets = False

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.place.output,)

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
            of_sample = min(of_sample, 2.0)  # too little in it to call the network collapsed
        of_all = severity_of(min(pooled, float(samples.mean())), self.bounds.ok, self.bounds.collapsed)
        severity = max(of_all, of_sample)
        distance = relative_error(self.error, self.power)
        if everything < 2 * self.prior and sum(self.score_power) > 0:
            levels = [sqnr_of(error, power) for error, power in zip(self.score_error, self.score_power, strict=True)]
            figure, worst = sqnr_of(sum(self.score_error), sum(self.score_power)), int(np.argmin(levels))
            severity = min(max(severity_of(figure, *QUIET_SCORES), DOUBTFUL), 2.0) if figure < math.inf else 0.0
            measure = "SQNR of scores, all of which are low"
            return PartFidelity(self.place.name, self.kind, measure, figure, worst, levels[worst], severity, distance)
        if everything < self.prior:
            severity = min(severity, 1.0)  # nothing to judge by: neither network finds anything
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
        self.shared.append(shared)
        self.total.append(float(a.sum(dtype=np.float64) + b.sum(dtype=np.float64)))
        self.error.append(_square(z - y))
        self.power.append(_square(y) + 0.1)
        self.score_error.append(_square(z - y))
        self.score_power.append(_square(y))


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
        self.are_sets = scores is None
        self._scores = scores
        self._outputs = outputs
        self._name = name
        self._reader = reader
        firing = [boxes[scores > 0.25] for boxes, scores, _ in map(reader, samples)]
        self._are_corners = has_corners(np.concatenate(firing))

    @property
    def outputs(self) -> tuple[str, ...]:
        return self._outputs

    def add(self, expected: Sample, actual: Sample) -> None:
        y, z = (select(*self._reader(sample), self._are_corners) for sample in (expected, actual))
        shared, difference, total = shared_weight(y, z)
        self.shared.append(shared)
        self.total.append(total)
        error, power = difference, float(box_weight(y.scores).sum()) + 0.1
        if self._scores is not None:  # smoother than a few boxes
            values, others = self._scores.of(expected), self._scores.of(actual)
            error, power = error + _square(others - values), power + _square(values)
            self.score_error.append(_square(others - values))
            self.score_power.append(_square(values))
        self.error.append(error)
        self.power.append(power)

    def result(self) -> PartFidelity:
        return replace(super().result(), name=self._name)


class IdsMeter(OverlapMeter):
    """Integers. Of different shapes the values are compared as sets.

    Positions where both have the value `commonest` do not count, if one is given. With `is_sequence` it is the blank of
    CTC: repeats and blanks are removed, and the rest is compared by edit distance.
    """

    def __init__(self, place: Place, commonest: int | None = None, is_sequence: bool = False) -> None:
        name = "share of equal values" + ("" if commonest is None else f" (other than {commonest})")
        if is_sequence:
            name = "agreement of the sequences"
        super().__init__(place, "sequence" if is_sequence else "ids", name, DISTRIBUTION if is_sequence else IDS, 1.0)
        self._commonest = commonest
        self._is_sequence = is_sequence

    def add(self, expected: Sample, actual: Sample) -> None:
        y, z = self.place.of(expected), self.place.of(actual)
        if self._is_sequence and self._commonest is not None:
            shared, total = _sequence_overlap(y.reshape(-1), z.reshape(-1), self._commonest)
        elif y.shape == z.shape:
            counts = np.full(y.shape, 2.0)
            if self._commonest is not None:
                counts = (y != self._commonest) * 1.0 + (z != self._commonest)
            shared, total = float(counts[y == z].sum()), float(counts.sum())
        else:
            (values, counts), (others, their_counts) = (np.unique(x, return_counts=True) for x in (y, z))
            _, here, there = np.intersect1d(values, others, return_indices=True)
            shared, total = 2.0 * int(np.minimum(counts[here], their_counts[there]).sum()), float(y.size + z.size)
        self.shared.append(shared)
        self.total.append(total)
        self.error.append(total - shared)
        self.power.append(total / 2 + 0.1)


def _sequence_overlap(first: Array, second: Array, blank: int) -> tuple[float, float]:
    """What two sequences of classes share by edit distance, without repeats and blanks, and the length of both."""
    y, z = (x[np.append(True, x[1:] != x[:-1]) & (x != blank)] for x in (first, second))
    length = float(max(len(y), len(z)))
    places = np.arange(len(z) + 1)
    row = places
    for count, symbol in enumerate(y, 1):
        best = np.minimum(row[:-1] + (z != symbol), row[1:] + 1)
        row = np.minimum.accumulate(np.append(count, best) - places) + places
    return 2 * (length - float(row[-1])), 2 * length


class RowsMeter(OverlapMeter):
    """Rows whose number differs between the networks: the share of rows that have a near neighbour in the other set.

    A row counts in full if it is equal to one of the other network's, and not at all from a distance of half the usual
    distance between rows on.
    """

    are_sets = True

    def __init__(self, place: Place, arrays: Sequence[Array]) -> None:
        super().__init__(place, "rows", "share of rows that both have", SCORES, 1.0)
        tables = [_as_rows(x) for x in arrays if x.size]
        rows = np.concatenate(tables) if tables else np.ones((1, arrays[0].shape[-1]))
        self._scale = np.maximum(rows.std(0), 1e-6 + 1e-3 * np.abs(rows).max(0))

    def add(self, expected: Sample, actual: Sample) -> None:
        y, z = (_as_rows(self.place.of(sample)) for sample in (expected, actual))
        if y.shape[1] != z.shape[1] or y.shape[1] != len(self._scale) or not len(y) or not len(z):
            shared = 0.0
        else:
            y, z = (x[:MOST_ROWS] / self._scale / math.sqrt(2 * x.shape[1]) for x in (y, z))
            squares = (y * y).sum(1)[:, None] + (z * z).sum(1) - 2 * y @ z.T
            distances = np.sqrt(np.maximum(squares, 0.0))
            shared = float(sum(np.clip(1 - 2 * distances.min(axis), 0, 1).sum() for axis in (0, 1)))
        self.shared.append(shared)
        self.total.append(float(len(y) + len(z)))
        self.error.append(self.total[-1] - shared)
        self.power.append(float(len(y)) + 0.1)


def _as_rows(values: Array) -> Array:
    width = values.shape[-1] if values.ndim > 1 else 1
    return values.reshape(-1, width).astype(np.float64) if values.size else np.zeros((0, width))


class DistributionMeter(OverlapMeter):
    """Classes along an axis: probabilities that sum to one, their logarithms, or logits.

    With `is_sequence`, the class `commonest` is the blank of CTC: repeats and blanks are removed, and the rest is
    compared by edit distance, because symbols may move by a step.
    """

    def __init__(
        self, place: Place, axis: int, commonest: int | None, is_log: bool = False, is_sequence: bool = False
    ) -> None:
        name = f"same largest class along axis {axis}" + ("" if commonest is None else f" (other than {commonest})")
        if is_sequence:
            name = "agreement of the sequences"
        super().__init__(place, "sequence" if is_sequence else "distribution", name, DISTRIBUTION, 1.0)
        self.commonest = commonest
        self._axis = axis
        self._is_log = is_log
        self._is_sequence = is_sequence

    def add(self, expected: Sample, actual: Sample) -> None:
        y, z = (np.moveaxis(self.place.of(sample), self._axis, -1) for sample in (expected, actual))
        y, z = (x.reshape(-1, x.shape[-1]) for x in (y, z))
        self.error.append(_square(z - y))
        self.power.append(_square(y) + 0.1)
        first, other = y.argmax(1), z.argmax(1)
        if self._is_sequence and self.commonest is not None:
            shared, total = _sequence_overlap(first, other, self.commonest)
        else:
            rows = np.arange(len(y))
            likely, less_likely = y[rows, first].astype(np.float64), y[rows, other].astype(np.float64)
            if self._is_log:
                norms = likely + np.log(np.exp(y - likely[:, None]).sum(1))
                likely, less_likely = np.exp(likely - norms), np.exp(less_likely - norms)
            agreement = np.clip(1 - (likely - less_likely) / NEAR_TIE, 0.0, 1.0)
            agreement[first == other] = 1.0
            counts = np.full(len(y), 2.0)
            if self.commonest is not None:
                counts = (first != self.commonest) * 1.0 + (other != self.commonest)
            shared, total = float((agreement * counts).sum()), float(counts.sum())
        self.shared.append(shared)
        self.total.append(total)


class ClassesMeter:
    """One row of scores for each class: logits, or probabilities that sum to one.

    A sample whose class changes does not decide by itself, because good classifiers change a few of their answers: only
    those that they are not certain of. So the figures are the agreement over all samples, the share of answers that
    were certain and changed, and the SQNR of the median sample for logits or the overlap for probabilities.
    """

    kind = "classes"
    are_sets = False

    def __init__(self, place: Place, is_distribution: bool) -> None:
        self.place = place
        self.outputs = (place.output,)
        self._is_distribution = is_distribution
        self._agreements: list[float] = []
        self._gaps: list[float] = []
        self._overlaps: list[float] = []
        self._error: list[float] = []
        self._power: list[float] = []

    def add(self, expected: Sample, actual: Sample) -> None:
        y, z = (self.place.of(sample).reshape(-1).astype(np.float64) for sample in (expected, actual))
        self._error.append(_square(z - y))
        self._power.append(_square(y))
        if not self._is_distribution:
            y, z = (np.exp(x - x.max()) for x in (y, z))
            y, z = y / y.sum(), z / z.sum()
        first, other = int(y.argmax()), int(z.argmax())
        gap = float(y[first] - y[other])
        self._gaps.append(gap)
        self._agreements.append(max(1 - gap / NEAR_TIE, 0.0))
        self._overlaps.append(float(np.minimum(y, z).sum()))

    def result(self) -> PartFidelity:
        count, agreement = len(self._agreements), float(np.mean(self._agreements))
        worst = int(np.lexsort((self._overlaps, self._agreements))[0])
        severity = severity_of((count * agreement + 1) / (count + 1), *CLASSES)
        severity = max(severity, severity_of(float(np.mean(np.array(self._gaps) < CERTAIN)), *CERTAIN_FLIPS))
        found = [("agreement of the largest class", agreement, worst, self._agreements[worst], severity)]
        distance = relative_error(self._error, self._power)
        if self._is_distribution:
            overlap, worst = float(np.mean(self._overlaps)), int(np.argmin(self._overlaps))
            severity = severity_of(overlap, *CLASS_OVERLAP)
            found.append(("overlap of the distributions", overlap, worst, self._overlaps[worst], severity))
            distance = 1 - overlap
        else:
            error, power = np.array(self._error), np.maximum(self._power, 1e-30)
            worst = int((error / power).argmax())
            own, median = _sqnr(error[worst], power[worst]), _sqnr(float(np.median(error / power)), 1.0)
            figure = _sqnr(float(error.sum()), float(power.sum()))
            severity = max(severity_of(median, *LOGITS), severity_of(figure, *ALL_LOGITS))
            found.append(("SQNR", figure, worst, own, severity))
        chosen = max(found, key=lambda each: each[-1])
        return PartFidelity(self.place.name, self.kind, *chosen, distance)


class ValuesMeter:
    """Values of one scale: SQNR of the whole, of the median row and of the median channel.

    A few large rows or channels hide the others in the whole. Channels lie along `axis`, and a row is all channels at
    one position. What a channel is on average does not count as signal, where its mean is known well enough.

    `weights` gives the weight of each position of a sample, with an axis of length 1 for the channels: a detector's
    boxes matter where its scores do.
    """

    kind = "values"
    are_sets = False

    def __init__(self, place: Place, axis: int = -1, weights: Callable[[Sample], Array] | None = None) -> None:
        self.place = place
        self.outputs = (place.output,)
        if weights is not None:
            self.kind = "values where scores fire"
        self._axis = axis
        self._weights = weights
        self._error: list[float] = []
        self._power: list[float] = []
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
        y, e = np.square(y), np.square(e)
        row_power, row_error = y.sum(1).ravel(), e.sum(1).ravel()
        channel_power, channel_error = (x.sum((0, 2), dtype=np.float64) for x in (y, e))
        self._power.append(float(channel_power.sum()))
        self._error.append(float(channel_error.sum()))
        has_signal = _has_signal(row_power)
        ratios = row_error[has_signal] / row_power[has_signal]
        is_table = ratios.size >= FEWEST_ROWS and form[1] >= FEWEST_CHANNELS
        self._rows.append(float(np.median(ratios)) if is_table else math.nan)
        self._channel_sums.append(np.stack([np.full(form[1], count), total, channel_power, channel_error]))

    def result(self) -> PartFidelity:
        error, power = np.array(self._error), np.array(self._power)
        counts, totals, squares, errors = np.sum(self._channel_sums, 0)
        variances = np.maximum(squares - totals**2 / np.maximum(counts, 1e-30), 0.0)
        if self._weights is None and counts[0] >= FEWEST_POSITIONS:
            power = power * max(float(variances.sum()) / max(float(squares.sum()), 1e-30), LEAST_VARYING)
        figure = _sqnr(float(error.sum()), float(power.sum()))
        floor = 0.25 * power.mean()
        worst = int((error / np.maximum(power, max(floor, 1e-30))).argmax())
        own = _sqnr(float(error[worst]), max(float(power[worst]), floor))
        found = [("SQNR", figure, worst, own, VALUES.severity(figure, own))]
        rows = np.array(self._rows)
        if not np.isnan(rows).any():
            median, worst = float(np.median(rows)), int(rows.argmax())
            figure, own = (_sqnr(ratio, 1.0) for ratio in (median, float(rows[worst])))
            found.append(("SQNR of the median row", figure, worst, own, ROWS.severity(figure, own)))
        channels = _has_signal(variances)
        if counts[0] >= FEWEST_POSITIONS and channels.sum() >= FEWEST_CHANNELS:
            figure = _sqnr(float(np.median(errors[channels] / variances[channels])), 1.0)
            severity = severity_of(figure, CHANNELS.ok, CHANNELS.collapsed)
            found.append(("SQNR of the median channel", figure, found[0][2], figure, severity))
        chosen = max(found, key=lambda each: each[-1])
        return PartFidelity(self.place.name, self.kind, *chosen, relative_error(error, power))


def _has_signal(powers: Array) -> Array:
    """True for rows or channels that are not as good as empty; most of those that are not zero count."""
    some = powers[powers > 1e-9 * powers.max(initial=0.0)]
    return np.asarray(powers > 1e-3 * np.median(some)) if some.size else np.zeros(len(powers), bool)


def relative_error(error: Sequence[float] | Array, power: Sequence[float] | Array) -> float:
    """The mean over samples of squared error by power; samples of little power count as if they had a tenth of it."""
    e, p = np.asarray(error, np.float64), np.asarray(power, np.float64)
    if not e.any():
        return 0.0
    return float((e / np.maximum(p + 0.1 * p.mean(), 1e-30)).mean())


def sqnr_of(error: float, power: float) -> float:
    """Signal to noise in decibels, from sums of squares."""
    if error == 0:
        return math.inf
    return 10 * math.log10(power / error) if power > 0 else -math.inf


def _square(values: Array) -> float:
    flat = values.reshape(-1)
    if flat.dtype.kind != "f":
        flat = flat.astype(np.float64)
    return float(np.einsum("i,i->", flat, flat, dtype=np.float64))


def _sqnr(error: float, power: float) -> float:
    if error == 0.0:
        return math.inf
    return 10.0 * math.log10(power / error) if power > 0 else -math.inf
