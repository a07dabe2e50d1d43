"""Detections: boxes with scores and classes, in whatever form a network outputs them.

    dense      one output with four box channels and then a score for each class (YOLO)
    rows       one output of rows such as (class, score, left, top, right, bottom), sorted by score or of varying number
    outputs    boxes, scores and perhaps classes as outputs of their own (DETR, SSD, networks with NMS inside)

Boxes are compared as sets, because two networks that find the same objects may list them in another order, another
number, or from another of several neighbouring anchors. Near-duplicates are suppressed first. Then each box of the
float network is matched with the box of the same class that overlaps it most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Sample = Mapping[str, Array]
# returns boxes [n, 4], scores [n] and classes [n] of a sample
BoxReader = Callable[[Sample], tuple[Array, Array, Array]]

LOWEST_SCORE = 0.05
EQUAL_SCORES = 0.02
MOST_BOXES = 300
DUPLICATE_OVERLAP = 0.6


@dataclass(frozen=True)
class Boxes:
    """Corners [n, 4], scores [n] and classes [n] of one sample, best score first."""

    corners: Array
    scores: Array
    classes: Array


def score_weight(scores: Array) -> Array:
    """The weight of a score: nothing up to 0.1, then linear up to 1."""
    return np.clip((scores - 0.1) / 0.9, 0.0, 1.0)


def box_weight(scores: Array) -> Array:
    """The weight of a box: its score, and less below 0.15, down to nothing at 0.05."""
    return scores * np.clip((scores - 0.05) / 0.1, 0.0, 1.0)


def sigmoid(values: Array) -> Array:
    """Logits as probabilities."""
    return np.asarray(1 / (1 + np.exp(-np.clip(values, -60, 60))))


def has_corners(boxes: Array) -> bool:
    """True if the boxes are given by two corners, and not by a centre and a size."""
    return bool((boxes[:, 2:] >= boxes[:, :2]).all())


def as_corners(boxes: Array, are_corners: bool) -> Array:
    """Boxes as two corners: left, top, right, bottom."""
    if are_corners:
        return boxes
    return np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)


def select(boxes: Array, scores: Array, classes: Array, are_corners: bool) -> Boxes:
    """Return the boxes worth comparing, without near-duplicates of a better box of the same class."""
    order = np.argsort(-scores, kind="stable")[:MOST_BOXES]
    order = order[scores[order] > LOWEST_SCORE]
    corners, scores, classes = boxes[order].astype(np.float64), scores[order].astype(np.float64), classes[order]
    corners = as_corners(corners, are_corners)
    is_rival = (overlaps(corners, corners) > DUPLICATE_OVERLAP) & (classes[:, None] == classes)
    kept = np.ones(len(order), bool)
    for index in range(len(order)):
        if kept[index]:
            kept[index + 1 :] &= ~is_rival[index, index + 1 :]
    return Boxes(corners[kept], scores[kept], classes[kept])


def overlaps(first: Array, second: Array) -> Array:
    """Intersection over union of all pairs of boxes: left, top, right, bottom, and columns that do not count.

    >>> overlaps(np.array([[0.0, 0, 2, 2]]), np.array([[0, 0, 2, 2], [1, 0, 3, 2], [5, 5, 6, 6]])).round(3).tolist()
    [[1.0, 0.333, 0.0]]
    """
    sides = []
    for low, high in ((0, 2), (1, 3)):
        start = np.maximum.outer(first[:, low], second[:, low])
        sides.append(np.maximum(np.minimum.outer(first[:, high], second[:, high]) - start, 0))
    shared = sides[0] * sides[1]
    areas = [np.prod(np.maximum(boxes[:, 2:4] - boxes[:, :2], 0), axis=1) for boxes in (first, second)]
    union = np.add.outer(areas[0], areas[1]) - shared
    shares: Array = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return shares


def shared_weight(expected: Boxes, actual: Boxes) -> tuple[float, float, float]:
    """Return the weight that the boxes share, what their weights differ by, and the weight of all boxes of both.

    A pair shares the weight of both boxes less their difference, in full from an overlap of 0.6 and not at all up to
    0.4. Differences up to `EQUAL_SCORES` do not count for what is shared: they decide nothing, and where all scores are
    low they would be most of it.
    """
    y, z = box_weight(expected.scores), box_weight(actual.scores)
    shares = overlaps(expected.corners, actual.corners) * (expected.classes[:, None] == actual.classes)
    total = float(y.sum() + z.sum())
    shared, difference = 0.0, total
    if len(y) and len(z):
        for index in range(len(y)):
            best = int(shares[index].argmax())
            closeness = min(max((shares[index, best] - 0.4) / 0.2, 0.0), 1.0)
            if closeness > 0:
                both, gap = y[index] + z[best], abs(y[index] - z[best])
                shared += closeness * (both - max(gap - EQUAL_SCORES, 0.0))
                difference -= closeness * (both - gap)
                shares[:, best] = 0
    return shared, difference, total
