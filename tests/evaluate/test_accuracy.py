"""Top-1 and top-5, against a loop that sorts by hand."""

import numpy as np
import pytest

from quark.errors import InvalidValueError
from quark.evaluate.evaluation import AccuracyMeter, ranked


@pytest.mark.parametrize("classes", [2, 5, 11])
def test_counts_are_those_of_sorting_by_hand(classes):
    rng = np.random.default_rng(classes)
    scores = np.stack([rng.permutation(classes) for _ in range(200)]).astype(np.float32)
    labels = rng.integers(0, classes, 200)
    meter = AccuracyMeter()
    for start in range(0, 200, 7):
        meter.add(scores[start : start + 7], labels[start : start + 7])

    def largest(row):
        return sorted(range(classes), key=lambda c: (-row[c], c))[:5]

    best = [largest(row) for row in scores]
    result = meter.result()
    assert result.count == 200
    assert result.top1 == np.mean([order[0] == label for order, label in zip(best, labels, strict=True)])
    assert result.top5 == np.mean([label in order for order, label in zip(best, labels, strict=True)])


def test_nan_is_the_lowest_score():
    assert ranked(np.array([[np.nan, -1.0, -np.inf]])).tolist() == [[1, 2, 0]]


def test_of_equal_scores_one_of_the_best_wins():
    scores = np.random.default_rng(0).integers(0, 4, (100, 1000)).astype(np.float32)
    order = ranked(scores)
    assert (np.take_along_axis(scores, order, axis=1) == 3).all()
    assert all(len(set(row)) == 5 for row in order.tolist())


@pytest.mark.parametrize("label", [-1, 3])
def test_label_beyond_the_classes(label):
    with pytest.raises(InvalidValueError, match=f"label {label}: the model has 3 classes"):
        AccuracyMeter().add(np.zeros((2, 3)), np.array([label, 1]))


def test_no_samples():
    with pytest.raises(InvalidValueError, match="no samples"):
        AccuracyMeter().result()
