"""Distances that rank networks: by all outputs, gathered sample by sample."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quark.compare import OutputsMeter
from quark.compare.measures import mean_divergence
from quark.compare.outputs import DISTANCE, KL, DistanceMeter

GENERATOR = np.random.default_rng(0)


def boxes_and_scores():
    boxes = GENERATOR.uniform(10, 200, (1, 4, 60))
    scores = np.where(GENERATOR.random((1, 5, 60)) > 0.9, GENERATOR.uniform(0.4, 0.95, (1, 5, 60)), 0.01)
    return np.concatenate([boxes, scores], axis=1).astype(np.float32)


OUTPUTS = {
    "classes": lambda: GENERATOR.normal(size=(1, 10)).astype(np.float32),
    "ids": lambda: GENERATOR.integers(0, 5, (1, 30)),
    "rows": lambda: GENERATOR.normal(size=(1, 40, 16)).astype(np.float32),
    "map": lambda: (GENERATOR.random((1, 1, 32, 32)) > 0.8).astype(np.float32) * 0.9,
    "detections": boxes_and_scores,
}


def moved(outputs, amount=0.05):
    return {
        name: value + (amount * GENERATOR.normal(size=value.shape)).astype(value.dtype)
        if value.dtype.kind == "f"
        else np.roll(value, 1)
        for name, value in outputs.items()
    }


@pytest.mark.parametrize("kind", OUTPUTS)
def test_samples_measured_one_by_one_are_those_measured_together(kind):
    samples = [{"y": OUTPUTS[kind]()} for _ in range(6)]
    others = [moved(sample) for sample in samples]
    meter = DistanceMeter(samples)
    together, merged = meter.fresh(), meter.fresh()
    for sample, other in zip(samples, others, strict=True):
        together.add(sample, other)
        alone = meter.fresh()
        alone.add(sample, other)
        merged.merge(alone)
    assert together.distance > 0
    assert merged.distance == together.distance
    if kind != "classes":
        judged = OutputsMeter()
        for sample, other in zip(samples, others, strict=True):
            judged.add(sample, other)
        assert together.distance == pytest.approx(sum(output.distance for output in judged.result()))


def test_equal_outputs_have_no_distance_and_larger_errors_have_more():
    samples = [{name: make() for name, make in OUTPUTS.items()} for _ in range(4)]
    meter = DistanceMeter(samples)
    assert meter.measure == DISTANCE
    distances = []
    for amount in (0.0, 0.01, 0.1):
        each = meter.fresh()
        for sample in samples:
            each.add(sample, moved(sample, amount) if amount else sample)
        distances.append(each.distance)
    assert distances[0] == 0
    assert distances[1] < distances[2]


def test_classes_have_the_divergence_of_predictions_also_in_batches():
    y, z = (GENERATOR.normal(size=(6, 10)).astype(np.float32) for _ in range(2))
    meter = DistanceMeter([{"y": y}], [6])
    assert meter.measure == KL
    meter.add({"y": y}, {"y": z}, 6)
    assert meter.distance == pytest.approx(mean_divergence(y, z))


def test_what_is_not_finite_is_infinitely_far():
    sample = {"y": OUTPUTS["rows"]()}
    broken = {"y": np.full_like(sample["y"], np.nan)}
    meter = DistanceMeter([sample])
    meter.add(sample, broken)
    assert meter.distance == math.inf
    meter = DistanceMeter([broken])  # the float network has no numbers: nothing to compare with
    meter.add(broken, sample)
    assert meter.distance == 0


def test_another_shape_has_nothing_in_common():
    sample = {"y": OUTPUTS["rows"]()}
    meter = DistanceMeter([sample])
    meter.add(sample, {"y": sample["y"][:, :20]})
    meter.add(sample, sample)
    assert meter.distance == pytest.approx(0.5)
