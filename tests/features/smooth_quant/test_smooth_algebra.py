"""The scales of SmoothQuant against their formula, and the estimated error against rounding that is carried out."""

from __future__ import annotations

import numpy as np
import pytest

from quark.errors import InvalidValueError
from quark.features.smooth_quant.smoothing import (
    ALPHAS,
    SPREAD,
    ChannelStatistics,
    LayerWeight,
    Steps,
    estimated_error,
    find_smoothing,
    smoothing_scales,
)

CHANNELS, OUTPUTS = 48, 64


def activations(seed=0, rows=2000, outlier=40.0):
    """Normal channels, some of them far louder, one of them silent."""
    x = np.random.default_rng(seed).standard_normal((rows, CHANNELS))
    x[:, :3] *= outlier
    x[:, 7] = 0.0
    return x


def weights(seed=1):
    random = np.random.default_rng(seed)
    return random.standard_normal((CHANNELS, OUTPUTS)) * random.uniform(0.2, 2.0, (CHANNELS, 1))


def statistics(x, excess=0.0):
    return ChannelStatistics(x.min(0), x.max(0), np.square(x).mean(0), len(x), excess)


def layer(weight):
    return LayerWeight.of(weight[None, :, :, None])


def rounded(values, step):
    return np.rint(values / step) * step


def measured_error(x, weight, scales, steps):
    """Of the product of both operands in 8 bits, done."""
    a, w = x / scales, weight * scales[:, None]
    width = 2 * np.abs(a).max() if steps.is_symmetric else max(a.max(), 0) - min(a.min(), 0)
    widths = 2 * np.abs(w).max(axis=0 if steps.is_per_channel else None, keepdims=True)
    y = x @ weight
    return np.square(rounded(a, width / 255) @ rounded(w, widths / 255) - y).sum() / np.square(y).sum()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_scales_are_those_of_the_formula_up_to_a_common_factor(alpha):
    x, w = np.random.default_rng(0).uniform(0.1, 50, (2, CHANNELS))
    scales = smoothing_scales(x, w, alpha)
    ratio = scales / (x**alpha / w ** (1 - alpha))
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-12)
    assert np.log(scales).mean() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dead_channels_stay_and_hardly_live_ones_do_not_run_away(alpha):
    x = np.array([0.0, 1.0, 1e-30, 4.0, 2.0])
    w = np.array([1.0, 0.0, 1.0, 1e-25, 3.0])
    scales = smoothing_scales(x, w, alpha)
    assert scales[0] == scales[1] == 1
    assert scales[2:].max() / scales[2:].min() <= SPREAD * 1.0001
    assert np.isfinite(smoothing_scales(np.zeros(3), np.ones(3), alpha)).all()


@pytest.mark.parametrize("is_per_channel", [True, False])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("alpha", [None, 0.0, 0.5, 0.8, 1.0])
def test_the_estimate_is_the_error_of_rounding(alpha, is_symmetric, is_per_channel):
    x, weight, steps = activations(), weights(), Steps(is_per_channel, is_symmetric)
    scales = np.ones(CHANNELS)
    if alpha is not None:
        scales = smoothing_scales(np.abs(x).max(0), np.abs(weight).max(1), alpha)
    estimate = estimated_error([layer(weight)], statistics(x), scales, steps)
    assert 10 * np.log10(estimate / measured_error(x, weight, scales, steps)) == pytest.approx(0, abs=1.0)


def test_the_search_finds_the_alpha_that_rounds_best():
    x, weight, steps = activations(), weights(), Steps(is_symmetric=True)
    smoothing = find_smoothing([layer(weight)], statistics(x), None, steps)
    reaches = np.abs(x).max(0), np.abs(weight).max(1)
    errors = [measured_error(x, weight, smoothing_scales(*reaches, alpha), steps) for alpha in ALPHAS]
    assert 10 * np.log10(measured_error(x, weight, smoothing.scales, steps) / min(errors)) < 0.5
    assert smoothing.gain_db > 6
    for alpha in ALPHAS:
        assert smoothing.error <= find_smoothing([layer(weight)], statistics(x), alpha, steps).error


def test_what_samples_did_not_show_calls_for_a_lower_alpha():
    x, weight = activations(), weights()
    sure, unsure = (find_smoothing([layer(weight)], statistics(x, e), None, Steps()) for e in (0.0, 0.5))
    assert unsure.alpha < sure.alpha


def test_what_samples_did_not_show_costs_what_it_costs():
    """Calibrated on some rows and met by others: the estimate sees the values that are cut."""
    random = np.random.default_rng(3)
    x, weight = random.laplace(size=(40_000, CHANNELS)), weights()
    seen = x[:400]
    reach = np.abs(seen).max(0)
    scales = smoothing_scales(reach, np.abs(weight).max(1), 1.0)
    cut = np.clip(x, -reach, reach)
    actual = np.square((cut - x) @ weight).sum() / np.square(x @ weight).sum()
    beyond, without = (estimated_error([layer(weight)], statistics(seen, e), scales, Steps()) for e in (1 / 6, 0.0))
    assert 10 * np.log10((beyond - without) / actual) == pytest.approx(0, abs=2.0)


def test_few_values_do_not_argue_for_smoothing():
    x = activations(rows=20, outlier=1.0)
    assert find_smoothing([layer(weights())], statistics(x, 0.5), 0.5, Steps()).gain_db < 0


def test_groups_are_blocks_of_a_matrix():
    """A grouped layer is a matrix with blocks along its diagonal."""
    random = np.random.default_rng(0)
    blocks = random.standard_normal((4, 12, 16))
    whole = np.zeros((48, 64))
    for i, block in enumerate(blocks):
        whole[12 * i : 12 * (i + 1), 16 * i : 16 * (i + 1)] = block
    scales = random.uniform(0.5, 2, CHANNELS)
    for is_per_channel in (True, False):
        grouped, dense = (
            estimated_error([value], statistics(activations()), scales, Steps(is_per_channel))
            for value in (LayerWeight.of(blocks[..., None]), layer(whole))
        )
        assert grouped == pytest.approx(dense, rel=1e-5)


def test_a_wide_layer_is_estimated_from_some_of_its_outputs():
    weight = np.tile(weights(), (1, 40))
    wide, narrow = (
        find_smoothing([layer(value)], statistics(activations()), 0.5, Steps()) for value in (weight, weights())
    )
    np.testing.assert_allclose(wide.scales, narrow.scales)
    assert wide.gain_db == pytest.approx(narrow.gain_db, abs=0.5)


def test_layers_without_anything_in_them_have_no_error():
    empty = layer(np.zeros((CHANNELS, OUTPUTS)))
    smoothing = find_smoothing([empty], statistics(activations()), None, Steps())
    assert (smoothing.scales == 1).all()
    assert smoothing.gain_db == 0


def test_a_weight_has_four_axes():
    with pytest.raises(InvalidValueError, match="2 dimensions.*groups, inputs, outputs, taps"):
        LayerWeight.of(np.ones((3, 4)))


def test_statistics_of_two_tensors_are_those_of_both():
    x, y = activations(0), activations(1, rows=500)
    both, expected = statistics(x, 0.1).with_other(statistics(y, 0.2)), statistics(np.concatenate([x, y]), 0.2)
    for name in ("lowest", "highest", "mean_square", "count", "excess"):
        np.testing.assert_allclose(getattr(both, name), getattr(expected, name))
