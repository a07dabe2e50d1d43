"""Collectors count what they are given, and power-of-two ranges from histograms and from samples agree."""

from __future__ import annotations

import numpy as np
import pytest

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.onnx import QuantType
from quark.onnx.calibration.collectors import (
    OverridedHistogramCollector,
    PowOfTwoCollector,
    compute_minmse_from_histogram,
    compute_minmse_worker,
)
from quark.onnx.calibration.methods import PowerOfTwoMethod

RANDOM = np.random.default_rng(3)


def histogram_collector(**options):
    return OverridedHistogramCollector("percentile", options.pop("symmetric", False), 4, 128, 99.9, **options)


def test_samples_of_different_shapes_are_counted_together():
    collector = histogram_collector()
    collector.collect_value({"x": [np.array([[-1.0, 2.0]], np.float32), np.array([4.0], np.float32)]})
    counts, edges, lowest, highest, reach = collector.histogram_dict["x"]
    assert counts.tolist() == [0, 1, 0, 2]
    assert edges.tolist() == [-4, -2, 0, 2, 4]
    assert (lowest, highest, reach) == (-1, 4, 4)


def test_only_the_last_sample_counts_layer_by_layer():
    collector = histogram_collector(symmetric=True, layer_wise=True)
    collector.collect({"x": [np.array([-100.0], np.float32), np.array([-1.0, 2.0], np.float32)]})
    counts, _, lowest, highest = collector.histogram_dict["x"]
    assert (counts.sum(), lowest, highest) == (2, -1, 2)


@pytest.mark.parametrize("values", [[-1.0, 0.5, 2.0], []])
def test_float16_keeps_its_type(values):
    collector = histogram_collector()
    collector.collect_value({"x": [np.array(values, np.float16)]})
    counts, *_, lowest, highest, reach = collector.histogram_dict["x"]
    assert {value.dtype for value in (lowest, highest, reach)} == {np.dtype(np.float16)}
    assert counts.sum() == len(values)


def test_bins_are_added_for_numbers_beyond_them():
    collector = PowOfTwoCollector(num_bins=64)
    collector.collect({"x": [np.linspace(-1, 1, 100, dtype=np.float32)]})
    collector.collect({"x": [np.linspace(-2, 3, 100, dtype=np.float32)]})
    counts, edges, lowest, highest = collector.histogram_dict["x"]
    assert counts.sum() == 200
    assert len(counts) == len(edges) - 1 > 64
    assert edges[0] <= -2 < 3 <= edges[-1]
    assert (float(lowest), float(highest)) == (-2, 3)


@pytest.mark.parametrize("scale", [0.3, 1.0, 7.0])
def test_histogram_and_samples_give_the_same_range(scale):
    data = (RANDOM.uniform(-1, 1, 5000) * scale).astype(np.float32)
    collector = PowOfTwoCollector()
    collector.collect({"x": [data]})
    lowest, highest = collector.compute_collection_result()["x"]
    sampled = compute_minmse_worker("x", [data], {}, "All", QuantType.QInt8, True, PowerOfTwoMethod.MinMSE, 99.999)
    assert (lowest, highest) == sampled[1]
    assert highest == -lowest
    assert np.log2(highest / 127) % 1 == 0
    wide = {"x": QuantType.QInt16}
    _, (_, reach) = compute_minmse_from_histogram("x", collector.histogram_dict["x"], wide, QuantType.QInt8, True)
    assert np.log2(reach / 32767) % 1 == 0


def test_other_modes_keep_samples():
    samples = [np.full(8, 0.9, np.float32), np.full(8, 0.9, np.float32), np.full(8, 90, np.float32)]
    results = {}
    for mode in ("All", "MostCommon"):
        collector = PowOfTwoCollector(minmse_mode=mode, num_bins=0)
        collector.collect({"x": samples})
        results[mode] = float(collector.compute_collection_result()["x"][1])
    assert results["All"] > 60
    assert results["MostCommon"] < 2


def test_what_cannot_be_collected():
    with pytest.raises(InvalidValueError, match="call collect first"):
        PowOfTwoCollector().compute_collection_result()
    with pytest.raises(UnsupportedTypeError, match="'x': expected float16 or float32, got float64"):
        PowOfTwoCollector().collect({"x": [np.zeros(3)]})
    with pytest.raises(InvalidValueError, match="symmetric"):
        compute_minmse_from_histogram("x", (np.ones(1), np.ones(2), np.ones(1), np.ones(1)), {}, QuantType.QInt8, False)
    with pytest.raises(InvalidValueError, match=r"expected PowerOfTwoMethod\.MinMSE"):
        PowOfTwoCollector(method=PowerOfTwoMethod.NonOverflow)
    with pytest.raises(UnsupportedTypeError, match="expected a member of QuantType"):
        compute_minmse_worker("x", [np.ones(2)], {}, "All", "int8", True, PowerOfTwoMethod.MinMSE, 99.0)
