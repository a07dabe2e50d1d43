"""Each built-in measure against an example computed by hand, or by another formula."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quark.errors import InvalidValueError, ModelError, UnknownNameError
from quark.measures import Measure, MeasureResult, measure_names
from quark.measures.boxes import Layout, detections, find_layout
from quark.measures.measure import OutputMeasure

RANDOM = np.random.default_rng(3)


def measure_of(spec):
    found = Measure.of(spec)
    assert isinstance(found, OutputMeasure)
    return found


def value_of(spec, expected, actual):
    """Of lists of arrays, one a sample."""
    return measure_of(spec).compare(
        [{"y": np.asarray(each)} for each in expected], [{"y": np.asarray(each)} for each in actual]
    )


@pytest.mark.parametrize("spec", ["cosine", "argmax", "top1", "mask_iou", "ssim", "cer", "wer?separator=9"])
def test_float_against_itself_is_perfect(spec):
    shape = (1, 6, 10) if "er" in spec.partition("?")[0] else (1, 12) if spec == "top1" else (1, 2, 16, 16)
    outputs = [RANDOM.normal(size=shape) for _ in range(3)]
    assert value_of(spec, outputs, outputs) == (1.0 if Measure.of(spec).is_higher_better else 0.0)


def test_every_name_makes_a_measure():
    names = measure_names()
    assert set(names) == {"cosine", "rank", "argmax", "top1", "box_f1", "mask_iou", "psnr", "ssim", "cer", "wer"}
    for name in names:
        spec = "wer?separator=0" if name == "wer" else name
        assert Measure.of(spec).name == spec


def test_cosine_is_the_mean_of_the_samples():
    assert value_of("cosine", [[[1.0, 0.0]], [[100.0, 0.0]]], [[[1.0, 1.0]], [[100.0, 0.0]]]) == pytest.approx(
        (math.sqrt(0.5) + 1) / 2
    )


def test_cosine_of_pooled_tokens():
    expected, actual = np.array([[[1.0, 0.0], [1.0, 2.0]]]), np.array([[[0.0, 1.0], [2.0, 1.0]]])
    assert value_of("cosine?pool=mean", [expected], [actual]) == 1.0
    assert value_of("cosine", [expected], [actual]) == pytest.approx(4 / 6)


def test_cosine_of_zeros_and_of_nan():
    assert value_of("cosine", [[0.0, 0.0]], [[0.0, 0.0]]) == 1.0
    assert value_of("cosine", [[0.0, 0.0]], [[1.0, 0.0]]) == 0.0
    assert value_of("cosine", [[1.0, 2.0]], [[np.nan, 2.0]]) == 0.0
    assert value_of("cosine", [[1.0, -np.inf]], [[2.0, -np.inf]]) == 1.0  # float's infinities are left out


def test_rank_is_spearman_of_similarities_of_mean_vectors():
    expected = [RANDOM.normal(size=(1, 5, 8)) for _ in range(7)]
    actual = [each + RANDOM.normal(size=each.shape) for each in expected]

    def similarities(outputs):
        vectors = [output[0].mean(0) for output in outputs]
        return [
            float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
            for i, a in enumerate(vectors)
            for b in vectors[i + 1 :]
        ]

    places = [np.argsort(np.argsort(similarities(value))) for value in (expected, actual)]
    count = len(places[0])
    by_distances = 1 - 6 * ((places[0] - places[1]) ** 2).sum() / (count * (count**2 - 1))  # Spearman without ties
    assert value_of("rank", expected, actual) == pytest.approx(by_distances)


def test_rank_shares_ranks_between_equal_similarities():
    unit = np.eye(3)
    expected = [unit[:1], unit[1:2], unit[:1] + unit[2:], unit[:1] + 2 * unit[1:2]]
    actual = [each * 5 for each in expected]
    assert value_of("rank", expected, actual) == 1.0


def test_rank_needs_three_samples_and_an_order():
    with pytest.raises(InvalidValueError, match="at least 3 samples, and there are 2"):
        value_of("rank", [[[1.0, 2.0]]] * 2, [[[1.0, 2.0]]] * 2)
    with pytest.raises(InvalidValueError, match="no order"):
        value_of("rank", [[[1.0, 2.0]]] * 3, [RANDOM.normal(size=(1, 2)) for _ in range(3)])
    assert value_of("rank", [RANDOM.normal(size=(1, 4)) for _ in range(3)], [np.ones((1, 4))] * 3) == 0.0


def test_argmax_along_an_axis():
    expected = np.array([[[1.0, 0.0], [0.0, 2.0]]])
    actual = np.array([[[1.0, 0.0], [0.0, -1.0]]])
    assert value_of("argmax", [expected], [actual]) == 0.5
    assert value_of("argmax?axis=1", [expected], [actual]) == 0.5
    assert value_of("argmax?axis=1", [expected], [expected * 3]) == 1.0
    assert value_of("argmax", [expected], [np.full_like(expected, np.nan)]) == 0.0
    with pytest.raises(InvalidValueError, match=r"axis 3.*\[1, 2, 2\]"):
        value_of("argmax?axis=3", [expected], [actual])


def test_top1_counts_samples():
    assert value_of("top1", [[[1, 2]], [[3, 1]], [[0, 5]]], [[[1, 2]], [[0, 1]], [[0, 5]]]) == pytest.approx(2 / 3)
    assert value_of("top1", [np.ones((1, 3, 1, 1))], [np.ones((1, 3, 1, 1))]) == 1.0
    with pytest.raises(ModelError, match="argmax.axis"):
        value_of("top1", [np.ones((1, 3, 2))], [np.ones((1, 3, 2))])


def boxes_to_yolo(boxes, classes, anchors, has_objectness=False):
    """[anchors, k]: rows of x1 y1 x2 y2 score class as YOLO writes them, the rest without a score."""
    output = np.zeros((anchors, 4 + has_objectness + classes))
    for row, (x1, y1, x2, y2, score, number) in zip(output, boxes, strict=False):
        row[:4] = (x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1
        if has_objectness:
            row[4], row[5 + int(number)] = score, 1.0
        else:
            row[4 + int(number)] = score
    return output


BOXES = [(0, 0, 10, 10, 0.9, 0), (1, 0, 11, 10, 0.8, 0), (50, 50, 60, 60, 0.7, 1), (80, 80, 90, 90, 0.2, 1)]


@pytest.mark.parametrize(
    ("layout", "output"),
    [
        (Layout.YOLOV8, boxes_to_yolo(BOXES, 3, 40).T[None]),
        (Layout.YOLOV5, boxes_to_yolo(BOXES, 3, 40, has_objectness=True)[None]),
        (Layout.ROWS, np.array([BOXES])),
        (Layout.ROWS, np.array(BOXES)),
        (Layout.ROWS, np.zeros((0, 6))),
    ],
)
def test_layouts_of_boxes_are_recognized(layout, output):
    assert find_layout(output) is layout
    found = detections(output, layout, 0.25)[0]
    kept = [] if not output.size else BOXES[:3] if layout is Layout.ROWS else [BOXES[0], BOXES[2]]
    np.testing.assert_allclose(found, np.reshape(kept, (-1, 6)))


def test_yolov8_with_anchors_first_is_said():
    output = boxes_to_yolo(BOXES, 3, 40)[None]
    np.testing.assert_allclose(detections(output, find_layout(output, "yolov8"), 0.25)[0], [BOXES[0], BOXES[2]])


def test_what_holds_no_boxes():
    with pytest.raises(ModelError, match="layout=yolov8"):
        value_of("box_f1", [np.zeros((1, 3, 40))], [np.zeros((1, 3, 40))])
    with pytest.raises(ModelError, match="holds no boxes"):
        value_of("box_f1", [np.zeros(7)], [np.zeros(7)])
    with pytest.raises(InvalidValueError, match="finds no boxes with a score above 0.25"):
        value_of("box_f1", [np.zeros((1, 8, 40))], [np.zeros((1, 8, 40))])


def test_box_f1_by_hand():
    expected = boxes_to_yolo([(0, 0, 10, 10, 0.9, 0), (50, 50, 60, 60, 0.8, 1), (20, 20, 30, 30, 0.7, 2)], 3, 40).T[
        None
    ]
    moved = boxes_to_yolo(
        [
            (2, 0, 12, 10, 0.9, 0),  # overlap 80 / 120: a match
            (50, 50, 60, 60, 0.8, 2),  # another class
            (26, 20, 36, 30, 0.7, 2),  # overlap 40 / 160: none
            (70, 70, 80, 80, 0.6, 1),  # not there in float
        ],
        3,
        40,
    ).T[None]
    assert value_of("box_f1", [expected], [moved]) == pytest.approx(2 * 1 / (3 + 4))
    assert value_of("box_f1?iou=0.7", [expected], [moved]) == 0.0
    assert value_of("box_f1?iou=0.2", [expected], [moved]) == pytest.approx(2 * 2 / (3 + 4))
    assert value_of("box_f1?threshold=0.75", [expected], [moved]) == pytest.approx(2 * 1 / (2 + 2))
    assert value_of("box_f1", [expected, expected], [expected, moved]) == pytest.approx(2 * 4 / (6 + 7))
    assert value_of("box_f1", [expected], [np.full_like(expected, np.nan)]) == 0.0


def test_two_boxes_cannot_match_the_same_one():
    expected = np.array([[(0, 0, 10, 10, 0.9, 0)]])
    twice = np.array([[(0, 0, 10, 10, 0.9, 0), (0, 0, 10, 9, 0.8, 0)]])
    assert value_of("box_f1", [expected], [twice]) == pytest.approx(2 / 3)
    assert value_of("box_f1?layout=rows", [expected[0]], [twice[0]]) == pytest.approx(2 / 3)


def test_mask_iou_by_hand():
    first = [[0.9, 0.8, 0.1, 0.1]]
    second = [[0.9, 0.1, 0.9, 0.1]]
    empty = [[0.0] * 4]
    assert value_of("mask_iou", [first], [second]) == pytest.approx(1 / 3)
    assert value_of("mask_iou", [first, empty], [second, empty]) == pytest.approx((1 / 3 + 1) / 2)
    assert value_of("mask_iou?threshold=0.05", [first], [second]) == 1.0
    with pytest.raises(InvalidValueError, match="masks are empty"):
        value_of("mask_iou", [empty], [first])


def test_psnr_by_hand():
    expected = np.array([[0.0, 1.0, 2.0, 4.0]])
    assert value_of("psnr", [expected], [expected + 0.4]) == pytest.approx(20.0)  # a tenth of the range
    assert value_of("psnr?peak=255", [expected], [expected + 2.55]) == pytest.approx(40.0)
    assert value_of("psnr", [expected], [expected]) == math.inf
    assert value_of("psnr", [expected], [expected * np.nan]) == -math.inf


def test_ssim_is_the_formula_pixel_by_pixel():
    expected = RANDOM.uniform(0, 255, (1, 1, 14, 13))
    actual = expected + RANDOM.normal(0, 20, expected.shape)
    places = np.arange(11) - 5
    window = np.exp(-(places[:, None] ** 2 + places**2) / (2 * 1.5**2))
    window /= window.sum()
    values = []
    for row in range(4):
        for column in range(3):
            y, z = (value[0, 0, row : row + 11, column : column + 11] for value in (expected, actual))
            mean_y, mean_z = (window * y).sum(), (window * z).sum()
            variances = (window * (y - mean_y) ** 2).sum() + (window * (z - mean_z) ** 2).sum()
            covariance = (window * (y - mean_y) * (z - mean_z)).sum()
            c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
            top = (2 * mean_y * mean_z + c1) * (2 * covariance + c2)
            values.append(top / ((mean_y**2 + mean_z**2 + c1) * (variances + c2)))
    assert value_of("ssim?peak=255", [expected], [actual]) == pytest.approx(np.mean(values))
    swapped = [np.moveaxis(value, 1, -1) for value in (expected, actual)]
    assert value_of("ssim?peak=255&layout=nhwc", [swapped[0]], [swapped[1]]) == pytest.approx(np.mean(values))
    assert value_of("ssim", [expected[..., :5]], [actual[..., :5]]) < 1.0  # smaller than the window
    assert value_of("ssim", [expected], [actual * np.nan]) == 0.0


def scores_of(ids, classes=6):
    return np.eye(classes)[list(ids)][None]


def test_error_rates_of_ctc_scores():
    expected = scores_of([1, 1, 0, 1, 2, 0, 5, 3, 3, 0])  # decodes to 1 1 2 5 3
    actual = scores_of([1, 1, 0, 0, 2, 0, 5, 4, 4, 0])  # 1 2 5 4: one is missing, one is another
    assert value_of("cer", [expected], [actual]) == pytest.approx(2 / 5)
    assert value_of("wer?separator=5", [expected], [actual]) == 1.0  # (1 1 2) (3) and (1 2) (4)
    assert value_of("wer?separator=5", [expected], [scores_of([1, 0, 1, 2, 5, 0, 4])]) == 0.5
    assert value_of("cer?layout=tnc", [expected.swapaxes(0, 1)], [actual.swapaxes(0, 1)]) == pytest.approx(2 / 5)
    assert value_of("cer?blank=5", [expected], [expected]) == 0.0
    assert value_of("cer?blank=5", [scores_of([0, 0, 5, 0])], [scores_of([0, 5, 5, 5])]) == 0.5


def test_error_rates_of_ids_pool_all_samples():
    expected = [np.array([[1, 1, 2, 3]]), np.array([[7]])]
    actual = [np.array([[1, 1, 2]]), np.array([[8]])]
    assert value_of("cer", expected, actual) == pytest.approx(2 / 5)


def test_wer_wants_its_separator():
    with pytest.raises(InvalidValueError, match="separator=ID"):
        Measure.of("wer")
    with pytest.raises(ModelError, match="holds no sequences"):
        value_of("cer", [np.zeros((1, 2, 3, 4))], [np.zeros((1, 2, 3, 4))])


def test_the_output_can_be_named():
    expected, actual = (
        {"a": np.array([[1.0, 0]]), "b": np.array([[1.0, 0]])},
        {"a": np.array([[0, 1.0]]), "b": np.array([[1.0, 0]])},
    )
    assert measure_of("cosine").compare([expected], [actual]) == 0.0
    assert measure_of("cosine?output=b").compare([expected], [actual]) == 1.0
    with pytest.raises(UnknownNameError, match="'c'.*Known: a, b"):
        measure_of("cosine?output=c").compare([expected], [actual])
    colon = {"Identity:0": np.ones((1, 2))}
    assert measure_of("cosine?output=Identity:0").compare([colon], [colon]) == 1.0


def test_shapes_that_differ_are_named():
    with pytest.raises(ModelError, match=r"output 'y' has shape \[1, 2\] .* \[1, 3\]"):
        value_of("cosine", [np.ones((1, 2))], [np.ones((1, 3))])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("cosin", "Did you mean cosine"),
        ("box_f1?treshold=1", "Did you mean threshold"),
        ("box_f1?threshold=2", "from 0 to 1"),
        ("box_f1?threshold=a", "a number"),
        ("box_f1?layout=yolo9", "one of auto, yolov8"),
        ("argmax?axis=1.5", "an integer"),
        ("argmax?axis", "NAME=VALUE"),
        ("argmax?axis=1&axis=2", "twice"),
        ("-cosine", "only a function"),
        ("wer.py", "FILE.py:FUNCTION"),
    ],
)
def test_mistakes_in_a_spec(spec, said):
    with pytest.raises(InvalidValueError, match=said):
        Measure.of(spec)


@pytest.mark.parametrize(
    ("result", "drop", "text"),
    [
        (MeasureResult("f1", 0.8, 0.6), 0.25, "f1 0.8 -> 0.6, 25.00 % lost"),
        (MeasureResult("f1", 0.8, 1.0), -0.25, "f1 0.8 -> 1, 25.00 % gained"),
        (MeasureResult("score", -2.0, -3.0), 0.5, "score -2 -> -3, 50.00 % lost"),
        (MeasureResult("score", 0.0, -0.5), 0.5, "score 0 -> -0.5, 50.00 % lost"),
        (MeasureResult("wer", 0.05, 0.06, False), 0.01, "wer 0.05 -> 0.06, 1.00 points more"),
        (MeasureResult("psnr", math.inf, 40.0), 0.01, "psnr inf -> 40, 1.00 % lost"),
        (MeasureResult("psnr", math.inf, math.inf), 0.0, "psnr inf -> inf, 0.00 % lost"),
    ],
)
def test_drop_is_positive_where_it_is_worse(result, drop, text):
    assert result.drop == pytest.approx(drop)
    assert str(result) == text


def test_a_result_is_json():
    content = MeasureResult("psnr", math.inf, 40.0).to_dict()
    assert content == {
        "name": "psnr",
        "float_value": "inf",
        "value": 40.0,
        "is_higher_better": True,
        "drop": pytest.approx(0.01),
    }
