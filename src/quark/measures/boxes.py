"""Boxes from the outputs of detectors, and how many of two sets of boxes match.

    yolov8   centre x, centre y, width, height, a score for each class; [n, k, anchors] or [n, anchors, k]
    yolov5   the same with an objectness score in front of the class scores
    rows     x1, y1, x2, y2, score, class; [n, boxes, 6] or [boxes, 6], after non-maximum suppression

A detection here is a row x1, y1, x2, y2, score, class. Scores are expected from 0 to 1.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.compare.detections import overlaps
from quark.errors import ModelError

Array = NDArray[Any]

MATCH_IOU, NMS_IOU = 0.5, 0.45
MOST_CANDIDATES = 1000  # per image, with the highest scores: a broken network may find a box at every anchor
ROW_LENGTH = 6


class Layout(str, Enum):
    """The layout of a detector's output."""

    YOLOV8 = "yolov8"
    YOLOV5 = "yolov5"
    ROWS = "rows"


def find_layout(output: Array, name: str = "auto") -> Layout:
    """Return the layout called `name`, or for 'auto' the one that the float network's output looks like.

    Six numbers per box are rows if the last is a class number and the corners are in order. Otherwise the shorter of
    the last two axes has the numbers of an anchor: if it is the first of the two, YOLOv8, else YOLOv5.
    """
    if output.ndim not in (2, 3):
        raise ModelError(f"the output of shape {list(output.shape)} holds no boxes: expected [n, k, anchors] or [n, k]")
    if name != "auto":
        layout = Layout(name)
    elif output.shape[-1] == ROW_LENGTH and _are_rows(output.reshape(-1, ROW_LENGTH)):
        layout = Layout.ROWS
    else:
        layout = Layout.YOLOV8 if output.shape[-2] < output.shape[-1] else Layout.YOLOV5
    least = {Layout.YOLOV8: 5, Layout.YOLOV5: 6, Layout.ROWS: ROW_LENGTH}[layout]
    count = output.shape[-1] if layout is Layout.ROWS else min(output.shape[-2:])
    if count < least or (layout is Layout.ROWS and count > least):
        expected = least if layout is Layout.ROWS else f"at least {least}"
        raise ModelError(
            f"the output of shape {list(output.shape)} holds no boxes of layout {layout.value}: expected {expected} "
            f"numbers a box. Choose another output with output=NAME, or give layout=yolov8, yolov5 or rows"
        )
    return layout


def _are_rows(rows: Array) -> bool:
    finite = rows[np.isfinite(rows).all(1)].astype(np.float64)
    in_order = (finite[:, 2] >= finite[:, 0]) & (finite[:, 3] >= finite[:, 1])
    return bool((in_order & (finite[:, 5] == np.round(finite[:, 5]))).all())


def detections(output: Array, layout: Layout, threshold: float, nms_iou: float = NMS_IOU) -> list[Array]:
    """Return the detections of each image of an output, the highest score first."""
    images = output[None] if output.ndim == 2 else output
    if layout is not Layout.ROWS and images.shape[1] < images.shape[2]:
        images = images.swapaxes(1, 2)
    boxes = []
    for values in images.astype(np.float64):
        if layout is Layout.ROWS:
            rows = values
        else:
            scores = values[:, 4:] if layout is Layout.YOLOV8 else values[:, 5:] * values[:, 4:5]
            centre, half = values[:, :2], values[:, 2:4] / 2
            rows = np.column_stack([centre - half, centre + half, scores.max(1), scores.argmax(1)])
        rows = rows[np.isfinite(rows).all(1) & (rows[:, 4] > threshold)]
        rows = rows[np.argsort(-rows[:, 4], kind="stable")][:MOST_CANDIDATES]
        boxes.append(rows if layout is Layout.ROWS else _suppressed(rows, nms_iou))
    return boxes


def _suppressed(rows: Array, limit: float) -> Array:
    """Leave out boxes that overlap one of the same class with a higher score by more than the limit."""
    kept = []
    is_left = np.ones(len(rows), bool)
    for i in range(len(rows)):
        if is_left[i]:
            kept.append(i)
            is_left &= ~((rows[:, 5] == rows[i, 5]) & (overlaps(rows[i : i + 1], rows)[0] > limit))
    return rows[kept]


def count_matches(truth: Array, predicted: Array, limit: float = MATCH_IOU) -> int:
    """Count the predicted boxes, best first, that overlap an unmatched true box of their class."""
    is_free = np.ones(len(truth), bool)
    matches = 0
    for box in predicted:
        shares = np.where(is_free & (truth[:, 5] == box[5]), overlaps(box[None], truth)[0], -1.0)
        if len(shares) and shares.max() >= limit:
            is_free[shares.argmax()] = False
            matches += 1
    return matches
