"""Find what the outputs of a network are, and the parts that have a scale of their own, from the float values.

Names and shapes of outputs say little, so the values of a few samples decide:

    integers                                            ids
    boxes, scores and classes with as many rows each    detections, over several outputs
    rows sorted by a score, or of varying number        detections
    sums to one along an axis                           distribution; with one row a sample, classes
    channels in [0, 1] that are mostly near 0 or 1      scores; four other channels beside them are boxes
    neighbouring channels of scales that differ 8-fold  parts of their own
    one row a sample                                    classes; values if its norm or length is that of an embedding,
                                                        or if it is short and always largest in one place
    the rest                                            values
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.compare.detections import BoxReader, Sample, as_corners, has_corners, overlaps, score_weight, sigmoid
from quark.compare.kinds import (
    FEWEST_NUMBERS,
    MOST_QUANTITIES,
    ClassesMeter,
    DetectionsMeter,
    DistributionMeter,
    IdsMeter,
    PartMeter,
    Place,
    RowsMeter,
    ScoresMeter,
    ValuesMeter,
)

Array = NDArray[Any]

TOLERANCE = 5e-3  # for sums of one, and for values in [0, 1]
MOST_UNDECIDED = 0.35  # share of values in (0.15, 0.85) up to which numbers in [0, 1] are scores
SCALE_JUMP = 8.0  # ratio of the RMS of neighbouring channels that starts another part
MOST_RANGES = 8  # of one axis: an output with more is not a concatenation
MOST_VALUES = 1 << 22  # the most values that are searched for ranges
FEWEST_STEPS = 8  # the shortest sequence of ids
FEWEST_CLASSES = 8  # the fewest classes of logits in rows
LARGEST_EMBEDDING = 8192
FEWEST_SYMBOLS = 20  # from this many classes on, a distribution along a sequence is taken for text with blanks
SMALLEST_MAP = 24  # positions along both axes
FIRING = 0.25
ROW_WIDTHS = range(5, 9)  # box, score, and perhaps class, batch and the like
FEWEST_ROWS = 2
FEWEST_POSITIONS = 16  # from this many positions on, other outputs are weighted by scores of the same positions
MOST_FIRING = 0.5
MOST_OVERLAP = 0.35  # mean overlap of the boxes of different samples


def find_parts(expected: Sequence[Sample], actual: Sequence[Sample]) -> list[PartMeter]:
    """Return a meter for each part of each output; the samples are those that the kinds are decided by."""
    meters: list[PartMeter] = []
    left = [name for name in expected[0] if any(sample[name].size for sample in (*expected, *actual))]
    group = _detection_outputs(left, expected)
    if group is not None:
        meters.append(group)
        left = [name for name in left if name not in group.outputs]
    for name in left:
        arrays = [sample[name] for sample in expected]
        others = [sample[name] for sample in actual]
        if not any(array.size for array in arrays):
            meters.append(RowsMeter(Place(name), arrays))
        elif arrays[0].dtype.kind != "f":
            if not _is_row_count(name, expected):
                meters.append(_ids(name, arrays))
        elif (rows := _detection_rows(name, expected)) is not None:
            meters.append(rows)
        elif any(y.shape != z.shape for y, z in zip(arrays, others, strict=True)):
            meters.append(RowsMeter(Place(name), arrays))
        else:
            meters.extend(_float_parts(name, expected, arrays))
    return meters


def _ids(name: str, arrays: Sequence[Array]) -> IdsMeter:
    """A meter for integers. A value that takes more than a fifth of many positions is a background, which must not hide
    the others."""
    values, counts = np.unique(np.concatenate([x.reshape(-1) for x in arrays]), return_counts=True)
    commonest, share = int(values[counts.argmax()]), float(counts.max() / counts.sum())
    if min(x.size for x in arrays) < FEWEST_STEPS or not 0.2 < share < 1:
        return IdsMeter(Place(name))
    is_sequence = all(x.size == max(x.shape) for x in arrays) and commonest in (values[0], values[-1])
    return IdsMeter(Place(name), commonest, is_sequence)


def _is_row_count(name: str, samples: Sequence[Sample]) -> bool:
    """True if a single integer says how many rows another output has: the rows are judged there."""
    if any(sample[name].size != 1 for sample in samples):
        return False
    counts = [int(sample[name].reshape(-1)[0]) for sample in samples]
    others = [other for other in samples[0] if other != name and samples[0][other].ndim >= 1]
    return any(
        all(count in sample[other].shape[:2] for count, sample in zip(counts, samples, strict=True))
        for other in others
        if max(counts) > 1
    )


# ---------------------------------------------------------------- detections
def _detection_outputs(names: Sequence[str], samples: Sequence[Sample]) -> DetectionsMeter | None:
    """Boxes [.., n, 4], scores [.., n] or [.., n, classes] and perhaps classes [.., n] as outputs of their own."""

    def rows_of(name: str, has_columns: bool) -> list[int] | None:
        shapes = [tuple(sample[name].shape) for sample in samples]
        lead = [shape[:-1] if has_columns else shape for shape in shapes]
        if any(not shape or any(size != 1 for size in shape[:-1]) for shape in lead):
            return None
        return [shape[-1] for shape in lead]

    for boxes in names:
        counts = rows_of(boxes, True)
        first = samples[0][boxes]
        if first.dtype.kind != "f" or first.shape[-1:] != (4,) or counts is None or max(counts) < FEWEST_ROWS:
            continue
        floats = [name for name in names if name != boxes and samples[0][name].dtype.kind == "f"]
        plain = [name for name in floats if rows_of(name, False) == counts]
        tables = [name for name in floats if name not in plain and rows_of(name, True) == counts]
        scores = next((name for name in plain if _lies_in_unit([sample[name] for sample in samples])), None)
        if scores is None:
            scores = next((name for name in tables if samples[0][name].shape[-1] != 4), None)
        if scores is None:
            continue
        classes = None
        if scores in plain:
            others = (name for name in names if name not in (boxes, scores) and rows_of(name, False) == counts)
            classes = next(
                (name for name in others if all((s[name] == np.round(s[name])).all() for s in samples)), None
            )
        reader = _output_reader(boxes, scores, classes, samples)
        if _are_boxes(reader, samples):
            used = ", ".join(f"'{name}'" for name in (boxes, *((classes,) if classes else ())))
            consumed = tuple(name for name in (boxes, scores, classes) if name is not None)
            return DetectionsMeter(Place(scores), f"with {used}", reader, samples, consumed)
    return None


def _output_reader(boxes: str, scores: str, classes: str | None, samples: Sequence[Sample]) -> BoxReader:
    table = [sample[scores] for sample in samples]
    is_unit = _lies_in_unit(table)
    is_sparse = float(np.mean([(x > 0).mean() for x in table if x.size])) < 0.05
    meter = _distribution(scores, table) if is_unit and table[0].ndim > 1 and table[0].shape[-1] > 1 else None
    background = meter.commonest if isinstance(meter, DistributionMeter) else None

    def read(sample: Sample) -> tuple[Array, Array, Array]:
        corners = sample[boxes].reshape(-1, 4)
        values = sample[scores].reshape(len(corners), -1) if len(corners) else np.zeros((0, 1), np.float32)
        if not is_unit and is_sparse:  # logits of independent classes
            values = sigmoid(values)
        elif not is_unit:  # logits of exclusive classes, the last of which is "no object"
            values = np.exp(values - values.max(1, keepdims=True))
            values = (values / values.sum(1, keepdims=True))[:, :-1]
        if background is not None:
            values = np.delete(values, background, 1)
        if classes is not None:
            labels = sample[classes].reshape(-1)
        else:
            labels = values.argmax(1) if values.shape[1] else np.zeros(len(values), int)
        return corners, values.max(1, initial=0.0), labels

    return read


def _detection_rows(name: str, samples: Sequence[Sample]) -> DetectionsMeter | None:
    """Rows of a box, a score and perhaps a class, sorted by the score or of varying number."""
    arrays = [sample[name] for sample in samples]
    if any(x.ndim < 2 or x.ndim > 3 or (x.ndim == 3 and x.shape[0] != 1) for x in arrays):
        return None
    if arrays[0].shape[-1] not in ROW_WIDTHS or len({x.shape[-1] for x in arrays}) > 1:
        return None
    tables = [x.reshape(-1, x.shape[-1]) for x in arrays]
    rows = np.concatenate(tables)
    if max(map(len, tables)) < FEWEST_ROWS or not np.isfinite(rows).all():
        return None
    width = rows.shape[1]
    is_unit = [_lies_in_unit([column]) for column in rows.T]
    is_whole = [bool((column == np.round(column)).all()) for column in rows.T]
    falls = [all((np.diff(table[:, column]) <= 1e-6).all() for table in tables) for column in range(width)]
    scores = [column for column in range(width) if is_unit[column] and not is_whole[column] and falls[column]]
    if not scores and len(set(map(len, tables))) > 1:  # sorted by class first, as some NMS operators do
        scores = [column for column in range(width) if is_unit[column] and not is_whole[column]]
    for score in scores:
        rest = [column for column in range(width) if column != score and not is_whole[column]]
        classes = [column for column in range(width) if column != score and is_whole[column] and rows[:, column].any()]
        starts = [column for column in rest if all(column + i in rest for i in range(4))]
        starts += [column for column in (0, width - 4) if score not in range(column, column + 4)]  # whole pixels
        for start in starts:
            label = next((column for column in classes if column not in range(start, start + 4)), None)

            def read(sample: Sample, start: int = start, score: int = score, label: int | None = label) -> Any:
                table = sample[name].reshape(-1, width)
                classes = table[:, label] if label is not None else np.zeros(len(table))
                return table[:, start : start + 4], table[:, score], np.round(classes)

            if _are_boxes(read, samples):
                return DetectionsMeter(Place(name), f"boxes in columns {start}..{start + 3}", read, samples, (name,))
    return None


def _are_boxes(reader: BoxReader, samples: Sequence[Sample]) -> bool:
    """True if some scores fire, and the four numbers beside them can be corners, or a centre and a size."""
    firing = [boxes[scores > FIRING] for boxes, scores, _ in map(reader, samples)]
    boxes = np.concatenate(firing) if firing else np.zeros((0, 4))
    if not len(boxes) or not np.isfinite(boxes).all():
        return False
    are_corners = has_corners(boxes)
    if not are_corners and ((boxes[:, 2:] > 0).mean() <= 0.99 or (boxes[:, :2] > 0).mean() <= 0.9):
        return False
    # Offsets from anchors may look like boxes that all lie in one place: boxes of different pictures seldom overlap.
    corners = [as_corners(x[:: -(-len(x) // 32)], are_corners) for x in firing if len(x)]
    shares = [overlaps(x, y).mean() for x, y in combinations(corners[:8], 2)]
    return not shares or float(np.mean(shares)) < MOST_OVERLAP


# ---------------------------------------------------------------- other floats
def _float_parts(name: str, samples: Sequence[Sample], arrays: Sequence[Array]) -> list[PartMeter]:
    distribution = _distribution(name, arrays)
    if distribution is not None:
        return [distribution]
    axis, ranges = _ranges(arrays)
    if len(ranges) == 1:
        place = Place(name)
        if ranges[0][2]:
            return [ScoresMeter(place, _map_axes(arrays))]
        if all(x.size > 1 and x.size == max(x.shape) for x in arrays):
            # Vectors rather than scores of classes have all the same norm, or a length that is usual for them.
            norms = [float(np.linalg.norm(x)) for x in arrays]
            is_normed = len(norms) > 1 and max(norms) - min(norms) < 1e-3 * max(norms)
            is_embedding = is_normed or all(x.size >= 64 and x.size % 64 == 0 for x in arrays)
            is_values = is_embedding or _are_quantities(arrays)
            return [ValuesMeter(place) if is_values else ClassesMeter(place, is_distribution=False)]
        axis = _channel_axis(arrays)
        part_meters: list[PartMeter] = []
        logits = _logits(name, arrays) if arrays[0].ndim == 3 else None
        if logits is not None:
            part_meters.append(logits)
        if _are_score_logits(arrays):
            part_meters.append(ScoresMeter(place, _map_axes(arrays), are_logits=True))
        return [*part_meters, ValuesMeter(place, axis, _weights(name, axis, samples))]
    meters: list[PartMeter] = []
    scored = ranges
    for index, (start, stop, is_scores) in enumerate(ranges):
        boxes = Place(name, axis, start, stop)
        if is_scores or stop - start != 4 or index + 1 == len(ranges) or not ranges[index + 1][2]:
            continue
        scores = Place(name, axis, *ranges[index + 1][:2])
        reader = _dense_reader(boxes, scores, samples)
        if _are_boxes(reader, samples):
            both = Place(name, axis, boxes.start, scores.stop)
            meters.append(DetectionsMeter(both, both.name, reader, samples, (name,), scores))
            ranges = [part for part in ranges if part[0] not in (boxes.start, scores.start)]
            break
    fired = next((Place(name, axis, start, stop) for start, stop, is_scores in scored if is_scores), None)
    for start, stop, is_scores in ranges:
        place = Place(name, axis, start, stop)
        weights = None if fired is None else _fired(fired, axis, axis, None, samples)
        meters.append(ScoresMeter(place) if is_scores else ValuesMeter(place, axis, weights))
    return meters


def _are_quantities(arrays: Sequence[Array]) -> bool:
    """True for a few numbers of which the same one is always the largest: grades of speech rather than logits."""
    largest = {int(x.argmax()) for x in arrays}
    return len(arrays) >= FEWEST_NUMBERS and arrays[0].size <= MOST_QUANTITIES and len(largest) == 1


def _logits(name: str, arrays: Sequence[Array]) -> DistributionMeter | None:
    """A meter if each row of [1, rows, classes] or [rows, 1, classes] has one class far more likely than the others."""
    if any(1 not in x.shape[:2] for x in arrays) or len({x.shape[2] for x in arrays}) > 1:
        return None
    classes = arrays[0].shape[2]
    if classes % 64 == 0 and classes <= LARGEST_EMBEDDING and "logit" not in name.lower():
        return None  # a hidden state may have a channel that always is the largest
    likely, winners = [], []
    for x in arrays:
        rows = x.reshape(-1, classes)
        table = rows[:: -(-x.size // MOST_VALUES)]
        highest = table.max(1, keepdims=True)
        likely.append(1 / np.exp(table - highest).sum(1))
        winners.append(rows.argmax(1))
    if classes < FEWEST_CLASSES or np.median(np.concatenate(likely)) < 0.7:
        return None
    counts = np.bincount(np.concatenate(winners), minlength=classes)
    commonest = int(counts.argmax()) if 0.2 < counts.max() / counts.sum() < 1 else None
    is_sequence = commonest in (0, classes - 1) and classes >= FEWEST_SYMBOLS
    return DistributionMeter(Place(name), 2, commonest, is_log=True, is_sequence=is_sequence)


def _are_score_logits(arrays: Sequence[Array]) -> bool:
    """True if Sigmoid would make scores of the values: most are far below 0, and some are above."""
    if any(x.size < SMALLEST_MAP**2 for x in arrays):
        return False
    thinned = [_thinned(x) for x in arrays]
    below = float(np.mean([(x < -2).mean() for x in thinned]))
    above = float(np.mean([(x > 0).mean() for x in thinned]))
    return below >= 0.5 and 0 < above <= 0.4


def _channel_axis(arrays: Sequence[Array]) -> int:
    """The axis of channels: the last, or the second where others follow that are larger. If only one of these has the
    same size in all samples, it is that one: lengths differ, and numbers of channels do not."""
    last = arrays[0].ndim - 1
    if last < 2:
        return last
    fixed = [axis for axis in (1, last) if len({x.shape[axis] for x in arrays}) == 1]
    if len(fixed) == 1:
        return fixed[0]
    is_last = last < 3 or min(x.shape[last] for x in arrays) < min(min(x.shape[1:last]) for x in arrays)
    return last if is_last else 1


def _weights(name: str, axis: int, samples: Sequence[Sample]) -> Callable[[Sample], Array] | None:
    """How much each position of an output matters, by another output that has scores for the same positions."""

    def positions(output: str, channels: int | None, sample: Sample) -> tuple[int, ...]:
        shape = tuple(sample[output].shape)
        return shape if channels is None else shape[:channels] + shape[channels + 1 :]

    for other in samples[0]:
        arrays = [sample[other] for sample in samples]
        if other == name or arrays[0].dtype.kind != "f":
            continue
        are_logits = not _lies_in_unit(arrays)
        if are_logits and not _are_score_logits(arrays):
            continue
        ndim = arrays[0].ndim
        for channels in dict.fromkeys((None, 1, ndim - 1)):
            if channels is not None and not 0 <= channels < ndim:
                continue
            wanted = [positions(name, axis, sample) for sample in samples]
            if max(map(np.prod, wanted)) < FEWEST_POSITIONS:
                continue
            if wanted == [positions(other, channels, sample) for sample in samples]:
                meter = None if are_logits else _distribution(other, arrays)
                background = meter.commonest if isinstance(meter, DistributionMeter) else None
                fired = _fired(Place(other), channels, axis, background, samples, are_logits)
                if fired is not None:
                    return fired
    return None


def _fired(
    place: Place,
    channels: int | None,
    axis: int,
    background: int | None,
    samples: Sequence[Sample],
    are_logits: bool = False,
) -> Callable[[Sample], Array] | None:
    """The weight of the largest score at each position, without the class `background`; None if scores fire nowhere,
    or nearly everywhere."""

    def weights(sample: Sample) -> Array:
        scores = place.of(sample)
        if channels is not None:
            if background is not None:
                scores = np.delete(scores, background, channels)
            scores = scores.max(channels)
        if are_logits:
            scores = sigmoid(scores)
        return np.expand_dims(score_weight(scores), axis)

    shares = [float((weights(sample) > 0).mean()) for sample in samples]
    return weights if 0 < np.mean(shares) < MOST_FIRING else None


def _map_axes(arrays: Sequence[Array]) -> tuple[int, ...]:
    """The two axes of a map: the largest of four axes, if there are many positions along both."""
    if arrays[0].ndim != 4:
        return ()
    smallest = np.min([x.shape for x in arrays], 0)
    axes = sorted(np.argsort(-smallest[1:], kind="stable")[:2] + 1)
    return tuple(int(axis) for axis in axes) if min(smallest[axis] for axis in axes) >= SMALLEST_MAP else ()


def _dense_reader(boxes: Place, scores: Place, samples: Sequence[Sample]) -> BoxReader:
    """Boxes from four channels, the score from the largest of the channels behind them.

    The first of those channels is how likely there is an object at all if other channels fire wherever it does.
    """
    axis = boxes.axis or 0

    def table(place: Place, sample: Sample) -> Array:
        values = np.moveaxis(place.of(sample), axis, -1)
        return values.reshape(-1, values.shape[-1])

    tables = [table(scores, sample) for sample in samples]
    both = [x[x[:, 0] > FIRING] for x in tables]
    firing = np.concatenate(both) if both else np.zeros((0, 1))
    has_objectness = bool(firing.shape[1] > 1 and len(firing) and (firing[:, 1:].max(1) > FIRING).mean() > 0.7)

    def read(sample: Sample) -> tuple[Array, Array, Array]:
        values = table(scores, sample)
        if has_objectness:
            values = values[:, 1:] * values[:, :1]
        return table(boxes, sample), values.max(1), values.argmax(1)

    return read


def _distribution(name: str, arrays: Sequence[Array]) -> PartMeter | None:
    """A meter if the values, or their exponentials, sum to one along an axis."""
    lowest, highest = min(x.min() for x in arrays if x.size), max(x.max() for x in arrays if x.size)
    is_log = bool(highest <= TOLERANCE and lowest < -TOLERANCE)
    if not is_log and (lowest < -TOLERANCE or highest > 1 + TOLERANCE):
        return None
    ndim = arrays[0].ndim
    for axis in dict.fromkeys((ndim - 1, min(1, ndim - 1))):
        sizes = {x.shape[axis] for x in arrays}
        if len(sizes) > 1 or sizes.pop() < 2:
            continue
        values = [np.exp(x) if is_log else x for x in arrays]
        if all(bool((np.abs(x.sum(axis, dtype=np.float64) - 1) <= TOLERANCE).all()) for x in values):
            if all(x.size == x.shape[axis] for x in arrays):
                return ClassesMeter(Place(name), is_distribution=not is_log)
            winners = np.concatenate([x.argmax(axis).reshape(-1) for x in values])
            commonest, classes = int(np.bincount(winners).argmax()), arrays[0].shape[axis]
            is_sequence = all(x.size == x.shape[axis] * max(np.delete(x.shape, axis)) for x in arrays)
            is_sequence = is_sequence and classes >= FEWEST_SYMBOLS and commonest in (0, classes - 1)
            return DistributionMeter(Place(name), axis, commonest, is_log, is_sequence)
    return None


def _ranges(arrays: Sequence[Array]) -> tuple[int, list[tuple[int, int, bool]]]:
    """The axis along which an output is composed, and its ranges: start, stop, whether they are scores."""
    thinned = [_thinned(x) for x in arrays if x.size]
    thinned = thinned[:: -(-sum(x.size for x in thinned) // MOST_VALUES)]
    whole = bool(
        _lies_in_unit(thinned)
        and np.mean([_undecided(x).mean() for x in thinned]) <= MOST_UNDECIDED
        and any(x.max() > x.min() for x in thinned)
    )
    ndim = arrays[0].ndim
    best: tuple[int, list[tuple[int, int, bool]]] = (0, [(0, 0, whole)])
    if whole or ndim < 2:
        return best
    for axis in (_channel_axis(arrays),) if ndim > 3 else dict.fromkeys((1, ndim - 1)):
        sizes = {x.shape[axis] for x in arrays}
        others = min(x.size // max(x.shape[axis], 1) for x in arrays)
        if len(sizes) > 1 or sizes.pop() < 2 or others * len(arrays) < 8:
            continue
        ranges = _ranges_along(thinned, axis)
        if len(ranges) > 1 and (len(best[1]) == 1 or len(ranges) < len(best[1])):
            best = (axis, ranges)
    return best


def _ranges_along(arrays: Sequence[Array], axis: int) -> list[tuple[int, int, bool]]:
    rest = tuple(i for i in range(arrays[0].ndim) if i != axis)
    lowest = np.min([x.min(rest) for x in arrays], 0)
    highest = np.max([x.max(rest) for x in arrays], 0)
    undecided = np.mean([_undecided(x).mean(rest) for x in arrays], 0)
    scales = np.sqrt(np.mean([np.square(x, dtype=np.float64).mean(rest) for x in arrays], 0))
    is_scores = (lowest >= -TOLERANCE) & (highest <= 1 + TOLERANCE) & (undecided <= MOST_UNDECIDED)
    kind_changes = is_scores[1:] != is_scores[:-1]
    ratios = np.maximum(scales[1:], 1e-30) / np.maximum(scales[:-1], 1e-30)
    jumps = np.maximum(ratios, 1 / ratios) > SCALE_JUMP
    for changes in (kind_changes | (jumps & ~is_scores[1:] & ~is_scores[:-1]), kind_changes):
        edges = [0, *(np.flatnonzero(changes) + 1), len(scales)]
        ranges = [(int(a), int(b), bool(is_scores[a])) for a, b in pairwise(edges)]
        # A scale that recurs behind a few larger channels is not a concatenation: hidden states have such channels.
        levels = sorted(float(np.median(scales[a:b])) for a, b, is_unit in ranges if not is_unit)
        if len(ranges) <= MOST_RANGES and all(high > SCALE_JUMP / 2 * low for low, high in pairwise(levels)):
            return ranges
        first, second = ranges[:2]
        if first[1] == 4 and not first[2] and second[2]:  # a detector with something else behind its scores
            return [first, second, (second[1], len(scales), False)]
    return [(0, len(scales), False)]


def _lies_in_unit(arrays: Sequence[Array]) -> bool:
    return all(bool((x >= -TOLERANCE).all() and (x <= 1 + TOLERANCE).all()) for x in arrays)


def _undecided(values: Array) -> Array:
    return (values > 0.15) & (values < 0.85)


def _thinned(values: Array) -> Array:
    """About 2^17 values of a large array: evenly spaced along its largest axes that are not channels."""
    while values.size > 1 << 18:
        inner = [axis for axis in range(values.ndim) if values.ndim < 3 or axis not in (1, values.ndim - 1)]
        sizes = [(values.shape[axis], axis) for axis in inner or range(values.ndim)]
        size, axis = max(sizes)
        if size < 4:
            break
        values = values[(slice(None),) * axis + (slice(None, None, 2),)]
    return values
