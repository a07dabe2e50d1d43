"""Cosine, signal to noise, agreement and the verdict."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quark.compare import FidelityMeter, OutputFidelity, Verdict, overall_verdict
from quark.compare.measures import ErrorSums, PairSums, divergence, fast_pair_sums, mean_divergence, pair_sums


def measure(expected, actual):
    meter = FidelityMeter("y")
    meter.add(np.asarray(expected), np.asarray(actual))
    return meter.result()


def test_equal_outputs_are_perfect():
    y = np.arange(12.0).reshape(3, 4)
    assert measure(y, y) == OutputFidelity("y", 1.0, math.inf, 1.0, 0.0, predictions=3)


def test_values_follow_their_definitions():
    rng = np.random.default_rng(0)
    y, noise = rng.standard_normal((2, 40, 10))
    z = y + 0.1 * noise
    result = measure(y, z)
    assert result.sqnr_db == pytest.approx(10 * np.log10((y**2).sum() / ((z - y) ** 2).sum()))
    assert result.cosine == pytest.approx((y * z).sum() / np.linalg.norm(y) / np.linalg.norm(z))
    assert result.agreement == (y.argmax(1) == z.argmax(1)).mean()
    assert result.max_error == pytest.approx(np.abs(z - y).max())


def test_pieces_add_up_to_the_whole():
    rng = np.random.default_rng(1)
    y, z = rng.standard_normal((2, 30, 5))
    meter = FidelityMeter("y")
    for start in range(0, 30, 7):
        meter.add(y[start : start + 7], z[start : start + 7])
    whole, parts = measure(y, z), meter.result()
    assert parts.sqnr_db == pytest.approx(whole.sqnr_db)
    assert parts.agreement == whole.agreement


def test_nan_in_the_quantized_output_is_a_collapse():
    result = measure([[1.0, 2.0]], [[1.0, np.nan]])
    assert result.sqnr_db == -math.inf
    assert result.verdict is Verdict.COLLAPSED


def test_nan_that_float_has_too_is_left_out():
    assert measure([[np.nan, 2.0]], [[np.nan, 2.0]]).sqnr_db == math.inf


def test_only_rows_of_classes_have_agreement():
    assert measure(np.ones((2, 3, 4)), np.ones((2, 3, 4))).agreement is None
    assert measure(np.ones((5, 1)), np.ones((5, 1))).agreement is None


def test_a_dead_output_is_a_collapse_and_a_dead_float_output_is_not():
    assert measure([[1.0, 2.0]], [[0.0, 0.0]]).verdict is Verdict.COLLAPSED
    assert measure([[0.0, 0.0]], [[0.0, 0.0]]).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("sqnr_db", "cosine", "verdict"),
    [(30.0, 0.999, Verdict.OK), (8.0, 0.93, Verdict.DEGRADED), (1.0, 0.6, Verdict.COLLAPSED)],
)
def test_the_worst_output_decides(sqnr_db, cosine, verdict):
    outputs = [OutputFidelity("a", 1.0, 50.0), OutputFidelity("b", cosine, sqnr_db)]
    assert overall_verdict(outputs) is verdict


def test_nothing_checked_is_no_verdict():
    assert overall_verdict([]) is Verdict.UNCHECKED


def test_sums_add_up_and_the_fast_ones_are_close():
    rng = np.random.default_rng(2)
    y = rng.standard_normal((4, 50000)).astype(np.float32)
    z = y + np.float32(0.01) * rng.standard_normal(y.shape).astype(np.float32)
    whole = pair_sums(y, z)
    added = sum((pair_sums(a, b) for a, b in zip(y, z, strict=True)), PairSums())
    fast = fast_pair_sums(y, z)
    for name in ("sqnr_db", "cosine", "relative_error", "max_error"):
        assert getattr(added, name) == pytest.approx(getattr(whole, name))
        assert getattr(fast, name) == pytest.approx(getattr(whole, name), rel=1e-5)
    assert pair_sums(y, np.where(y > 3, np.inf, y)).sqnr_db == -math.inf


def test_error_sums_follow_their_definitions_and_leave_out_what_float_has_not():
    rng = np.random.default_rng(3)
    samples = [tuple(rng.standard_normal((2, 5, 7))) for _ in range(3)]
    sums = ErrorSums()
    for y, z in samples:
        hole = np.array(y)
        hole[0, 0] = np.inf
        sums.add(hole, z)
        y[0, 0] = z[0, 0] = 0.0
    error = sum(((z - y) ** 2).sum() for y, z in samples)
    power = sum((y**2).sum() for y, _ in samples)
    assert sums.relative_error == pytest.approx(error / power)
    assert sums.sqnr_db == pytest.approx(10 * np.log10(power / error))
    assert sums.mean_l2 == pytest.approx(np.mean([np.linalg.norm(z - y) for y, z in samples]))
    sums.add(np.ones(3), np.array([1.0, np.nan, 1.0]))
    assert sums.relative_error == math.inf
    assert sums.sqnr_db == -math.inf


def test_divergences_of_logits_and_of_probabilities_agree():
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((2, 6, 10))
    p, q = np.exp(logits) / np.exp(logits).sum(2, keepdims=True)
    expected = (p * np.log(p / q)).sum()
    for pair in (logits, (p, q)):
        assert divergence(*pair) == pytest.approx(expected)
        assert mean_divergence(*pair) == pytest.approx(expected / 6)
    assert mean_divergence(p, np.full_like(q, np.nan)) == math.inf
