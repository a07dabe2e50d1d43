"""Starting thresholds, each against its definition in plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quark.errors import InvalidValueError
from quark.formats import get_format
from quark.formats.spec import IntFormat
from quark.ranges import KLJ, MinMax, ThreeSigma, kl_j_threshold, range_of, three_sigma
from quark.ranges.thresholds import jeffreys_divergences

Array = np.ndarray[Any, Any]


def reach(x: Array, method: Any, name: str = "int8", is_symmetric: bool = True) -> float:
    fmt = get_format(name)
    assert isinstance(fmt, IntFormat)
    found = range_of(x, method, fmt, is_symmetric)
    return max(-found.lowest, found.highest)


def samples(kind: str) -> Array:
    rng = np.random.default_rng(7)
    data = {
        "normal": rng.normal(0.3, 1.5, 50_000),
        "relu": np.maximum(rng.normal(0, 1, 50_000), 0),
        "long tail": rng.standard_t(3, 50_000),
        "uniform": rng.uniform(-1, 1, 50_000),
    }
    return data[kind].astype(np.float32)


def plain_jeffreys(counts: Array, cut: int, codes: int) -> float:
    """The sum of the module's text, bin by bin."""
    total, mass = counts.sum(), np.cumsum(counts)
    places = [k * (cut - 1) / (codes - 1) for k in range(codes)]
    heights = [float(np.interp(place, range(len(counts)), mass / total)) for place in places]
    heights[-1] = 1.0
    result = 0.0
    for k in range(len(counts)):
        f = mass[k] / total
        if f == 0:
            continue
        g = 1.0 if k >= cut else float(np.interp(k, places, heights))
        result += (f - g) * np.log(f / g)
    return result


@pytest.mark.parametrize("kind", ["normal", "relu", "long tail", "uniform"])
def test_three_sigma_is_the_formula_and_no_more_than_the_data_reach(kind: str) -> None:
    x = samples(kind)
    expected = abs(np.mean(x.astype(np.float64) + 1e-6)) + 3 * np.std(x.astype(np.float64))
    assert three_sigma(x) == pytest.approx(expected, rel=1e-12)
    assert reach(x, ThreeSigma()) == pytest.approx(min(expected, float(np.abs(x).max())), rel=1e-2)


def test_divergences_are_the_sum_over_all_bins() -> None:
    counts = np.random.default_rng(1).integers(0, 9, 60)
    counts[:2] = 0
    cuts = np.array([8, 13, 30, 60])
    errors_of_all = jeffreys_divergences(counts, cuts, 8)
    np.testing.assert_allclose(errors_of_all, [plain_jeffreys(counts, int(cut), 8) for cut in cuts], rtol=1e-9)


@pytest.mark.parametrize("kind", ["normal", "relu", "long tail"])
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_the_found_threshold_has_the_least_divergence(kind: str, name: str) -> None:
    magnitudes = np.abs(samples(kind))
    counts, edges = np.histogram(magnitudes, 400)
    levels = 8 if name == "int4" else 128
    found = kl_j_threshold(counts, edges, levels)
    every = jeffreys_divergences(counts, np.arange(levels, 401), levels)
    mine = jeffreys_divergences(counts, np.array([int(np.searchsorted(edges, found))]), levels)[0]
    assert mine <= 1.05 * every.min() + 1e-12


def test_fewer_bits_clip_more_and_outliers_do_not_decide() -> None:
    x = samples("normal")
    assert reach(x, KLJ(), "int4") < reach(x, KLJ(), "int8") <= np.abs(x).max()
    with_outlier = np.append(x, np.float32(40))
    assert reach(with_outlier, KLJ()) < 12
    assert reach(with_outlier, MinMax()) == 40


def test_zeros_are_no_loss_and_a_flat_distribution_is_not_clipped() -> None:
    # half of the values are zero; the rest is the positive half of a normal distribution
    assert reach(samples("relu"), KLJ()) > 3
    assert reach(samples("uniform"), KLJ()) > 0.97


def test_sixteen_bits_have_nothing_to_gain_from_clipping() -> None:
    x = samples("long tail")
    assert reach(x, KLJ(), "int16") == np.abs(x).max()


def test_unsigned_codes_have_one_bit_more_for_the_same_data() -> None:
    x = samples("relu")
    assert reach(x, KLJ(), "uint4", is_symmetric=False) > reach(x, KLJ(), "int4")
    assert reach(x, KLJ(), "uint4", is_symmetric=False) == pytest.approx(reach(x, KLJ(), "int5"))


def test_edges() -> None:
    assert three_sigma(np.zeros(0, np.float32)) == 0
    assert reach(np.zeros(10, np.float32), KLJ()) == 0
    with pytest.raises(InvalidValueError, match="NaN"):
        reach(np.array([1.0, np.nan], np.float32), KLJ())
