"""Every kind of output, well and badly quantized: what it is taken for, and the verdict on it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from quark.compare import OutputsMeter, Verdict, overall_verdict, worst_output, worst_text
from quark.compare.parts import _channel_axis

RNG = np.random.default_rng
SAMPLES = 8


def judge(expected, actual, count=1):
    """Outputs are given as {name: list of samples}."""
    meter = OutputsMeter()
    for index in range(len(next(iter(expected.values())))):
        y, z = ({name: arrays[index] for name, arrays in side.items()} for side in (expected, actual))
        meter.add(y, z, count)
    return meter.result()


def one(expected, actual):
    (output,) = judge({"y": expected}, {"y": actual})
    return output


def noisy(arrays, size, seed=1):
    rng = RNG(seed)
    return [(x + size * x.std() * rng.standard_normal(x.shape)).astype(np.float32) for x in arrays]


def sigmoid(x):
    return (1 / (1 + np.exp(-x))).astype(np.float32)


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return (e / e.sum(axis, keepdims=True)).astype(np.float32)


# ---------------------------------------------------------------- detectors
def yolo(classes=6, anchors=400, objects=4, seed=0, is_last=False):
    """Samples of [1, 4 + classes, anchors]: centres and sizes of 0 to 640, scores of which most are near 0."""
    rng, samples = RNG(seed), []
    for _ in range(SAMPLES):
        boxes = np.concatenate([rng.uniform(50, 590, (2, anchors)), rng.uniform(30, 120, (2, anchors))])
        scores = rng.uniform(0, 0.02, (classes, anchors))
        fired = rng.choice(anchors, objects, replace=False)
        scores[rng.integers(0, classes - 2, objects), fired] = rng.uniform(0.5, 0.95, objects)
        sample = np.concatenate([boxes, scores])[None].astype(np.float32)
        samples.append(sample.swapaxes(1, 2) if is_last else sample)
    return samples


@pytest.mark.parametrize("is_last", [False, True], ids=["channels first", "channels last"])
def test_a_detector_without_its_scores_has_collapsed_however_good_its_boxes(is_last):
    float_outputs = yolo(is_last=is_last)
    axis = 2 if is_last else 1
    broken = [x.copy() for x in float_outputs]
    for x in broken:
        np.moveaxis(x, axis, 0)[4:] = 0
    output = one(float_outputs, broken)
    assert output.sqnr_db > 30  # what one figure over the whole output says
    assert output.kind == "detections"
    assert output.verdict is Verdict.COLLAPSED
    assert output.worst_part.name == f"channels 0..9 of axis {axis}"


def test_a_detector_that_moved_little_is_ok_and_never_firing_classes_do_not_matter():
    float_outputs, rng = yolo(), RNG(3)
    close = [x.copy() for x in float_outputs]
    for x in close:
        x[:, :4] += rng.normal(0, 1.0, x[:, :4].shape)
        x[:, 4:8] *= rng.uniform(0.97, 1.03, x[:, 4:8].shape)
        x[:, 8:] = 0  # the classes that never fire
    output = one(float_outputs, close)
    assert output.verdict is Verdict.OK
    assert 0 < output.distance < 0.1


def test_boxes_that_moved_away_are_not_ok():
    float_outputs = yolo()
    moved = [x.copy() for x in float_outputs]
    for x in moved:
        x[:, :2] += 60
    assert one(float_outputs, moved).verdict is Verdict.COLLAPSED


def test_a_neighbouring_anchor_that_finds_the_same_object_is_as_good():
    float_outputs = yolo()
    for x in float_outputs:
        x[0, :4, 1::2] = x[0, :4, ::2]  # pairs of anchors with the same box
    swapped = [x.copy() for x in float_outputs]
    for x in swapped:
        x[0, 4:] = x[0, 4:].reshape(6, -1, 2)[:, :, ::-1].reshape(6, -1)
    output = one(float_outputs, swapped)
    assert output.sqnr_db < 80
    assert output.worst_part.figure == pytest.approx(1.0)


def test_one_bad_sample_of_eight_decides_and_is_named():
    float_outputs = yolo()
    broken = [x.copy() for x in float_outputs]
    broken[5][:, 4:] = 0
    output = one(float_outputs, broken)
    assert output.verdict is not Verdict.OK
    assert output.worst_sample == 5
    text = worst_text([output], "held-out sample")
    assert "output 'y' channels 0..9 of axis 1 (detections): agreement of boxes" in text
    assert "0.00 on held-out sample 5" in text


def test_objectness_counts_in_detectors_that_have_it():
    samples = yolo(classes=7, is_last=True)
    for x in samples:  # channel 4 says that there is an object, where some class fires; classes fire elsewhere too
        x[..., 4] = x[..., 5:].max(-1)
        quiet = x[..., 4] < 0.1
        x[..., 5:][quiet] = RNG(0).uniform(0, 1, x[..., 5:][quiet].shape)
    other = [x.copy() for x in samples]
    for x in other:
        quiet = x[..., 4] < 0.1
        x[..., 5:][quiet] = 0
    assert one(samples, other).verdict is Verdict.OK


def rows(seed=0, count=20, firing=5, is_whole=False):
    """Rows (class, score, left, top, right, bottom), best first."""
    rng, samples = RNG(seed), []
    for _ in range(SAMPLES):
        scores = np.sort(np.append(rng.uniform(0.6, 0.95, firing), rng.uniform(0.01, 0.05, count - firing)))[::-1]
        corner, size = rng.uniform(0, 500, (count, 2)), rng.uniform(20, 100, (count, 2))
        boxes = np.concatenate([corner, corner + size], 1)
        boxes = boxes.round() if is_whole else boxes
        classes = rng.integers(0, 5, count)
        samples.append(np.column_stack([classes, scores, boxes]).astype(np.float32))
    return samples


@pytest.mark.parametrize("is_whole", [False, True], ids=["boxes", "boxes in whole pixels"])
def test_permuted_rows_of_a_sorted_list_are_equal(is_whole):
    float_outputs = rows(is_whole=is_whole)
    permuted = []
    for x in float_outputs:
        swapped = x.copy()
        swapped[[0, 1]] = x[[1, 0]]
        permuted.append(np.concatenate([swapped[:5], x[5:][RNG(0).permutation(15)]]))
    output = one(float_outputs, permuted)
    assert output.kind == "detections"
    assert output.verdict is Verdict.OK
    assert output.cosine == 1.0
    assert output.distance == 0


def test_lists_of_different_lengths_are_compared_as_sets():
    float_outputs = [x[: 5 + index] for index, x in enumerate(rows())]
    assert one(float_outputs, [x[:5] for x in float_outputs]).verdict is Verdict.OK  # what is missing does not fire
    assert one(float_outputs, [x[:2] for x in float_outputs]).verdict is not Verdict.OK
    assert one(float_outputs, [x[:0] for x in float_outputs]).verdict is Verdict.COLLAPSED


def test_boxes_scores_and_classes_as_outputs_of_their_own():
    tables = rows()
    names = {"labels": lambda x: x[:, 0].astype(np.int64), "scores": lambda x: x[:, 1], "boxes": lambda x: x[:, 2:]}
    float_outputs = {name: [take(x) for x in tables] for name, take in names.items()}
    shuffled = [x[RNG(0).permutation(len(x))] for x in tables]
    outputs = judge(float_outputs, {name: [take(x) for x in shuffled] for name, take in names.items()})
    assert {output.kind for output in outputs} == {"detections"}
    assert overall_verdict(outputs) is Verdict.OK
    relabelled = {**float_outputs, "labels": [x + 1 for x in float_outputs["labels"]]}
    assert overall_verdict(judge(float_outputs, relabelled)) is Verdict.COLLAPSED


def test_queries_in_another_order_are_equal():
    rng = RNG(0)
    boxes = [
        np.concatenate([rng.uniform(0.1, 0.9, (1, 30, 2)), rng.uniform(0.05, 0.2, (1, 30, 2))], 2).astype(np.float32)
        for _ in range(SAMPLES)
    ]
    logits = [rng.normal(-7, 0.5, (1, 30, 10)).astype(np.float32) for _ in range(SAMPLES)]
    for x in logits:
        x[0, :3, rng.integers(0, 10)] = 2.0
    orders = [rng.permutation(30) for _ in range(SAMPLES)]
    shuffled = {
        "boxes": [x[:, order] for x, order in zip(boxes, orders, strict=True)],
        "logits": [x[:, order] for x, order in zip(logits, orders, strict=True)],
    }
    outputs = judge({"boxes": boxes, "logits": logits}, shuffled)
    assert overall_verdict(outputs) is Verdict.OK
    assert outputs[0].kind == "detections"
    silent = {**shuffled, "logits": [np.full_like(x, -7) for x in logits]}
    assert overall_verdict(judge({"boxes": boxes, "logits": logits}, silent)) is Verdict.COLLAPSED


def test_values_are_judged_where_the_scores_of_the_same_positions_fire():
    rng = RNG(0)
    scores = [np.zeros((1, 100, 3), np.float32) for _ in range(SAMPLES)]
    offsets = [rng.standard_normal((1, 100, 8)).astype(np.float32) for _ in range(SAMPLES)]
    for x in scores:
        x[0, :10, 1] = 0.9
    elsewhere, there = ([x.copy() for x in offsets] for _ in range(2))
    for x, y in zip(elsewhere, there, strict=True):
        x[0, 10:] = 0
        y[0, :10] = 0
    float_outputs = {"offsets": offsets, "scores": scores}
    assert overall_verdict(judge(float_outputs, {"offsets": elsewhere, "scores": scores})) is Verdict.OK
    assert overall_verdict(judge(float_outputs, {"offsets": there, "scores": scores})) is Verdict.COLLAPSED


# ---------------------------------------------------------------- scores and maps
def masks(size=64, seed=0):
    rng, samples = RNG(seed), []
    for _ in range(SAMPLES):
        top, left = rng.integers(5, 20, 2)
        logits = np.full((1, 1, size, size), -8.0)
        logits[..., top : top + 30, left : left + 25] = 8.0
        samples.append(sigmoid(logits))
    return samples


def test_masks_are_judged_by_their_overlap():
    float_outputs = masks()
    assert one(float_outputs, noisy(float_outputs, 0.02)).verdict is Verdict.OK
    assert one(float_outputs, float_outputs).kind == "map"
    shifted = [np.roll(x, 8, axis=3) for x in float_outputs]
    assert one(float_outputs, shifted).verdict is Verdict.DEGRADED
    assert one(float_outputs, [np.zeros_like(x) for x in float_outputs]).verdict is Verdict.COLLAPSED


def test_thin_lines_may_move_by_a_pixel_and_no_further():
    float_outputs = [np.zeros((1, 1, 64, 64), np.float32) for _ in range(SAMPLES)]
    for x in float_outputs:
        x[..., 10:60:10, :] = x[..., 11:60:10, :] = x[..., 12:60:10, :] = 1
    moved = one(float_outputs, [np.roll(x, 1, axis=2) for x in float_outputs]).worst_part.figure
    moved_more = one(float_outputs, [np.roll(x, 3, axis=2) for x in float_outputs]).worst_part.figure
    assert moved > 0.8
    assert moved_more < 0.3


def test_one_bad_mask_decides():
    float_outputs = masks()
    broken = [x.copy() for x in float_outputs]
    broken[2][..., 12:, :] = 0
    output = one(float_outputs, broken)
    assert output.verdict is not Verdict.OK
    assert output.worst_sample == 2


def test_scores_that_are_all_low_are_compared_as_they_are():
    quiet = [RNG(index).uniform(0, 0.01, (1, 50, 88)).astype(np.float32) for index in range(SAMPLES)]
    near = one(quiet, [np.float32(0.9) * x for x in quiet])
    assert near.verdict is Verdict.OK
    assert near.severity == 0.5  # too little to be sure of
    assert one(quiet, quiet).severity == 0.0
    assert one(quiet, [np.zeros_like(x) for x in quiet]).verdict is Verdict.DEGRADED


def test_scores_that_appear_or_vanish_are_a_collapse():
    quiet = [RNG(index).uniform(0, 0.01, (1, 50, 88)).astype(np.float32) for index in range(SAMPLES)]
    loud = [x.copy() for x in quiet]
    for x in loud:
        x[0, 10:20, 5] = 0.9
    assert one(loud, loud).kind == "scores"
    assert one(quiet, loud).verdict is Verdict.COLLAPSED
    assert one(loud, quiet).verdict is Verdict.COLLAPSED


def test_pictures_in_the_unit_range_are_values_and_not_scores():
    pictures = [RNG(index).uniform(0.2, 0.8, (1, 3, 32, 32)).astype(np.float32) for index in range(SAMPLES)]
    assert one(pictures, pictures).kind == "values"
    assert one(pictures, noisy(pictures, 0.05)).verdict is Verdict.OK
    # Grey all over: 12 dB over the whole output, and nothing of the picture left.
    grey = [np.full_like(x, 0.5) for x in pictures]
    assert one(pictures, grey).verdict is Verdict.COLLAPSED


def test_a_regressor_that_gives_the_mean_has_collapsed():
    """Ages around 40: the mean alone has an SQNR of 14 dB."""
    ages = 40 + 8 * np.sin(np.arange(16))
    exact, mean = ([x.reshape(1, 1).astype(np.float32) for x in each] for each in (ages, np.full(16, 40.0)))
    assert one(exact, mean).verdict is Verdict.COLLAPSED
    rounded = [x + np.float32(RNG(index).normal(0, 1)) for index, x in enumerate(exact)]
    assert one(exact, rounded).verdict is Verdict.OK
    # of similar samples, a few percent of the number are no reason to doubt it
    similar = [np.full((1, 1), 40 + 0.1 * i, np.float32) for i in range(16)]
    assert (
        one(similar, [x + np.float32(RNG(index).normal(0, 1)) for index, x in enumerate(similar)]).verdict is Verdict.OK
    )


def test_waveforms_of_different_lengths_are_compared_place_by_place():
    """Speech synthesis: how long the sound is depends on the text, and may change by a frame."""
    exact = [np.float32(np.sin(np.arange(400 + 40 * index) / 9))[None] for index in range(4)]
    longer = [np.pad(x + np.float32(0.02), ((0, 0), (0, 8))) for x in exact]
    assert one(exact, longer).verdict is Verdict.OK
    assert one(exact, [np.flip(x) for x in longer]).verdict is Verdict.COLLAPSED


def test_grades_that_hardly_vary_are_no_classes():
    """Three grades of speech, of which the second is always the best: the mean has the same largest class."""
    means = np.array([3.0, 4.0, 2.8])
    exact = [np.float32(means + RNG(index).normal(0, 0.4, 3).clip(-0.4, 0.4))[None] for index in range(16)]
    assert one(exact, exact).kind == "values"
    assert one(exact, [np.float32(means)[None]] * 16).verdict is not Verdict.OK
    assert one(exact, noisy(exact, 0.05)).verdict is Verdict.OK


def test_one_doubtful_number_of_many_is_no_collapse():
    """A speech probability: the network is certain most of the time, so that errors are large beside the variance."""
    exact = np.array([1.0] * 26 + [0.8, 0.81, 0.82, 0.72, 0.32, 0.29])
    rounded = exact + np.array([0.0] * 26 + [0.18, 0.06, 0.03, 0.09, 0.09, 0.08])
    wrong = exact - np.array([0.0] * 26 + [0.78, 0.7, 0.44, 0.3, 0.0, 0.0])
    numbers = [[x.reshape(1, 1).astype(np.float32) for x in values] for values in (exact, rounded, wrong)]
    assert one(numbers[0], numbers[1]).verdict is Verdict.DEGRADED
    assert one(numbers[0], numbers[2]).verdict is Verdict.COLLAPSED


# ---------------------------------------------------------------- classes, distributions, ids
def ctc(steps=40, classes=60, seed=0):
    """Blanks with a symbol at every fourth step."""
    rng, samples = RNG(seed), []
    for _ in range(SAMPLES):
        logits = rng.normal(0, 0.5, (1, steps, classes))
        logits[0, :, 0] = 8
        logits[0, ::4, 0] = 0
        logits[0, np.arange(0, steps, 4), rng.integers(1, classes, steps // 4)] = 8
        samples.append(logits)
    return samples


@pytest.mark.parametrize("is_log", [False, True], ids=["softmax", "log softmax"])
def test_a_recognizer_that_only_finds_blanks_has_collapsed(is_log):
    def finish(logits):
        return np.log(softmax(logits)) if is_log else softmax(logits)

    logits = ctc()
    float_outputs = [finish(x) for x in logits]
    blank = [x.copy() for x in logits]
    for x in blank:
        x[..., 1:] = 0
        x[..., 0] = 8
    output = one(float_outputs, [finish(x) for x in blank])
    same_steps = np.mean([(a.argmax(2) == b.argmax(2)).mean() for a, b in zip(logits, blank, strict=True)])
    assert same_steps == 0.75
    assert output.kind == "sequence"
    assert output.verdict is Verdict.COLLAPSED
    assert one(float_outputs, [finish(x + RNG(1).normal(0, 0.3, x.shape)) for x in logits]).verdict is Verdict.OK


def test_symbols_may_move_by_a_step():
    logits = ctc()
    output = one([softmax(x) for x in logits], [softmax(np.roll(x, 1, axis=1)) for x in logits])
    assert output.verdict is Verdict.OK


def test_a_tie_with_the_blank_does_not_decide_about_a_sequence():
    """A picture without text, in which one symbol is as likely as the blank."""
    logits = ctc()
    for x in logits:
        x[0, :, 1:] = 0
        x[0, :, 0] = 8
        x[0, 4, [0, 7]] = 1.95, 2.0
    changed = [x.copy() for x in logits]
    for x in changed:
        x[0, 4, [0, 7]] = 2.0, 1.95
    assert one([softmax(x) for x in logits], [softmax(x) for x in changed]).verdict is Verdict.OK
    for x in logits:
        x[0, 4, 7] = 8
    assert one([softmax(x) for x in logits], [softmax(x) for x in changed]).verdict is Verdict.COLLAPSED


def test_background_does_not_hide_the_other_classes_of_a_map():
    logits = [np.zeros((1, 4, 32, 32)) for _ in range(SAMPLES)]
    for index, x in enumerate(logits):
        x[:, 0] = 6
        x[:, 0, 5:9, 5:9] = 0
        x[:, 1 + index % 3, 5:9, 5:9] = 6
    float_outputs = [softmax(x, 1) for x in logits]
    background = [x.copy() for x in logits]
    for x in background:
        x[:, 1:] = 0
        x[:, 0] = 6
    output = one(float_outputs, [softmax(x, 1) for x in background])
    assert output.kind == "distribution"
    assert output.verdict is Verdict.COLLAPSED
    assert one(float_outputs, noisy(float_outputs, 0.05)).verdict is Verdict.OK


def classifier(classes=10, seed=0, count=16, margin=6.0):
    rng, samples = RNG(seed), []
    for _ in range(count):
        logits = rng.normal(0, 1, (1, classes))
        logits[0, rng.integers(classes)] += margin
        samples.append(logits.astype(np.float32))
    return samples


@pytest.mark.parametrize("finish", [lambda x: x, softmax], ids=["logits", "softmax"])
@pytest.mark.parametrize("certainty", [1.0, 8.0], ids=["not certain", "certain"])
def test_a_few_changed_classes_are_ok_unless_the_float_network_was_certain(finish, certainty):
    logits = classifier()
    for x in logits[:8]:
        x[0, x.argmax()] = np.sort(x[0])[-2] + certainty
    for changed, verdicts in (
        (1, {Verdict.OK} if certainty < 2 else {Verdict.DEGRADED}),
        (8, {Verdict.DEGRADED, Verdict.COLLAPSED}),
    ):
        other = noisy(logits, 0.05)
        for x in other[:changed]:
            first, second = np.argsort(-x[0])[:2]
            x[0, [first, second]] = x[0, [second, first]]
        output = one([finish(x) for x in logits], [finish(x) for x in other])
        assert output.kind == "classes"
        assert output.agreement == 1 - changed / 16
        assert output.verdict in verdicts


def test_near_ties_between_classes_count_little():
    logits = classifier(margin=0.0)
    for x in logits:
        x[0, :2] = 5.0, 5.02
    other = [x.copy() for x in logits]
    for x in other:
        x[0, :2] = 5.02, 5.0
    output = one(logits, other)
    assert output.agreement == 0
    assert output.verdict is Verdict.OK


def test_a_batch_is_as_many_samples():
    logits = np.concatenate(classifier())
    meter = OutputsMeter()
    broken = logits.copy()
    broken[11] = 0
    meter.add({"y": logits}, {"y": broken}, count=16)
    (output,) = meter.result()
    assert output.kind == "classes"
    assert output.worst_sample == 11


def test_ids_are_judged_by_agreement():
    ids = [RNG(index).integers(0, 50, (1, 20)) for index in range(SAMPLES)]
    assert one(ids, ids).kind == "ids"
    assert one(ids, ids).verdict is Verdict.OK
    assert one(ids, [x + 1 for x in ids]).verdict is Verdict.COLLAPSED
    assert one(ids, [x[:, :18] for x in ids]).verdict is Verdict.OK  # shorter, with nearly all of them


def test_the_number_of_rows_is_judged_by_the_rows():
    tables = rows()
    outputs = judge(
        {"rows": tables, "count": [np.array([20], np.int32)] * SAMPLES},
        {"rows": [x[:18] for x in tables], "count": [np.array([18], np.int32)] * SAMPLES},
    )
    assert overall_verdict(outputs) is Verdict.OK


# ---------------------------------------------------------------- values
def test_hidden_states_by_whole_rows_and_channels():
    states = [RNG(index).standard_normal((1, 30, 64)).astype(np.float32) for index in range(SAMPLES)]
    assert one(states, noisy(states, 0.1)).verdict is Verdict.OK
    assert one(states, noisy(states, 0.45)).verdict is Verdict.DEGRADED
    assert one(states, noisy(states, 1.0)).verdict is Verdict.COLLAPSED


def test_a_few_large_rows_or_channels_do_not_hide_the_others():
    for axis in (1, 2):
        states = [RNG(index).standard_normal((1, 64, 64)).astype(np.float32) for index in range(SAMPLES)]
        for x in states:
            np.moveaxis(x, axis, 0)[[5, 40]] *= 200
        broken = [x.copy() for x in states]
        for x in broken:
            np.moveaxis(x, axis, 0)[np.delete(np.arange(64), [5, 40])] = 0
        output = one(states, broken)
        assert output.sqnr_db > 20
        assert output.verdict is Verdict.COLLAPSED
        assert "median" in output.worst_part.measure


def test_concatenated_ranges_are_judged_by_themselves():
    rng = RNG(0)
    float_outputs = [
        np.concatenate([500 * rng.standard_normal((1, 40, 6)), rng.standard_normal((1, 40, 10))], 2)
        for _ in range(SAMPLES)
    ]
    broken = [x.copy() for x in float_outputs]
    for x in broken:
        x[..., 6:] = 0
    output = one(float_outputs, broken)
    assert [part.name for part in output.parts] == ["channels 0..5 of axis 2", "channels 6..15 of axis 2"]
    assert [part.verdict for part in output.parts] == [Verdict.OK, Verdict.COLLAPSED]
    assert output.sqnr_db > 40


def test_what_is_always_the_same_is_no_signal():
    depth = [10 + 0.5 * RNG(index).standard_normal((1, 1, 40, 40)).astype(np.float32) for index in range(SAMPLES)]
    flat = [np.full_like(x, 10) for x in depth]
    output = one(depth, flat)
    assert output.sqnr_db > 25
    assert output.verdict is Verdict.COLLAPSED


# ---------------------------------------------------------------- edges
def test_nan_is_a_collapse_and_the_sample_is_named():
    states = [RNG(index).standard_normal((1, 30, 64)).astype(np.float32) for index in range(SAMPLES)]
    broken = [x.copy() for x in states]
    broken[3][0, 0, 0] = np.nan
    output = one(states, broken)
    assert output.verdict is Verdict.COLLAPSED
    assert output.worst_sample == 3
    assert output.sqnr_db == -math.inf
    assert output.distance == math.inf
    json.dumps(output.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (np.zeros((0, 6), np.float32), np.ones((3, 6), np.float32)),
        (np.ones((3, 6), np.float32), np.zeros((0, 6), np.float32)),
        (np.zeros((0,), np.int64), np.ones((2,), np.int64)),
        (np.ones((1, 7, 9), np.float32), np.ones((1, 5, 9), np.float32)),
        (np.ones((1, 7, 9), np.float32), np.ones((1, 7, 4), np.float32)),
        (np.ones((1, 7), np.float32), np.ones((7,), np.float32)),
    ],
    ids=["none in float", "none in the other", "no ids", "rows", "columns", "dimensions"],
)
def test_other_shapes_never_raise_and_are_never_ok(expected, actual):
    output = one([expected] * 3, [actual] * 3)
    assert output.verdict in (Verdict.DEGRADED, Verdict.COLLAPSED) or expected.shape[-1] == 9
    json.dumps(output.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "value",
    [np.float32(1.5), np.zeros((0, 4), np.float32), np.ones((1, 1), np.float32), np.ones((2, 3), bool), np.int64(3)],
    ids=["scalar", "empty", "one number", "booleans", "an integer"],
)
def test_equal_outputs_of_any_form_are_ok(value):
    output = one([value] * 3, [value] * 3)
    assert output.verdict is Verdict.OK
    assert output.distance == 0


def test_half_precision_does_not_overflow():
    states = [(300 * RNG(index).standard_normal((1, 30, 64))).astype(np.float16) for index in range(SAMPLES)]
    output = one(states, [(x * np.float16(1.01)).astype(np.float16) for x in states])
    assert 35 < output.worst_part.figure < 45


def test_text_is_left_out():
    words = [np.array(["a", "b"], object)] * 2
    assert [
        output.name
        for output in judge({"words": words, "y": [np.ones(3)] * 2}, {"words": words, "y": [np.ones(3)] * 2})
    ] == ["y"]


def test_no_samples_give_no_outputs():
    assert OutputsMeter().result() == ()
    assert worst_output(()) is None
    assert worst_text(()) == ""


def test_more_samples_than_are_kept_are_counted_all():
    logits = classifier(count=40)
    broken = [x.copy() for x in logits]
    broken[35] = np.roll(broken[35], 1)
    output = one(logits, broken)
    assert output.worst_sample == 35
    assert output.agreement == 39 / 40


def test_distance_falls_as_the_network_gets_better():
    cases = {
        "detections": (yolo(), lambda x, size: x * (1 - 0.5 * size)),
        "map": (masks(), lambda x, size: x * (1 - size)),
        "sequence": ([softmax(x) for x in ctc()], lambda x, size: (1 - size) * x + size / x.shape[-1]),
        "classes": (classifier(), lambda x, size: x + size),
        "values": ([RNG(0).standard_normal((1, 30, 64)).astype(np.float32)], lambda x, size: x * (1 - size)),
    }
    for kind, (float_outputs, worsen) in cases.items():
        distances = [one(float_outputs, [worsen(x, size) for x in float_outputs]).distance for size in (0, 0.1, 0.3)]
        assert one(float_outputs, float_outputs).kind == kind
        assert distances[0] == 0
        assert distances[0] < distances[1] < distances[2], kind


def lengths(*shape):
    """Samples with lengths (None) of their own."""
    rng = RNG(3)
    return [
        rng.normal(size=[size or 12 + index for size in shape]).astype(np.float32) * (1 + np.arange(2 * SAMPLES)[index])
        for index in range(SAMPLES)
    ]


@pytest.mark.parametrize("shape", [(1, 16, None), (1, None, 16), (1, None, None), (1, None, None, 4), (None, 1, None)])
def test_samples_of_several_lengths_are_compared(shape):
    expected = lengths(*shape)
    found = one(expected, noisy(expected, 0.01))
    assert found.verdict is Verdict.OK
    assert found.sqnr_db == pytest.approx(40, abs=1)
    assert one(expected, noisy(expected, 3)).verdict is Verdict.COLLAPSED


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((1, 16, None), 1),
        ((1, None, 16), 2),
        ((1, 3, None, None), 1),
        ((1, None, None, 3), 3),
        ((1, 3, 5), 2),
        ((1, 3, 8, 8), 1),
        ((1, 8, 8, 3), 3),
    ],
)
def test_channels_are_the_axis_whose_size_is_always_the_same(shape, axis):
    assert _channel_axis(lengths(*shape)) == axis
