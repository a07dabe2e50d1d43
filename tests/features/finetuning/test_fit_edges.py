"""Fitting a layer at its edges: nothing to do, numbers that are not finite, stopping, rates, the same again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fitted_layers import affine, assert_honest, blocks, dense, layer, normal

from quark.features.finetuning.fit import fit
from quark.features.finetuning.options import Algorithm, FitOptions
from quark.features.finetuning.problem import Bounds, Problem, Rows

pytestmark = pytest.mark.usefixtures("fitted_by")

ADAROUND = FitOptions(Algorithm.ADAROUND, iterations=300, learning_rate=None)
ADAQUANT = FitOptions(Algorithm.ADAQUANT, iterations=150, learning_rate=None)
BOTH = pytest.mark.parametrize("options", [ADAROUND, ADAQUANT], ids=["AdaRound", "AdaQuant"])
WEIGHT = normal(1, 6, 24)


@BOTH
@pytest.mark.parametrize("drop_ratio", [1.0, 0.5])
def test_the_same_seed_gives_the_same_bytes(options: FitOptions, drop_ratio: float) -> None:
    bias = normal(6, 6)
    problem = layer(WEIGHT, dense(6, 24), affine(WEIGHT, "int4"), bias=bias, activation=Bounds(0.0, 4.0))
    given = replace(options, drop_ratio=drop_ratio, iterations=100, batch_rows=16)
    one, same = fit(problem, given), fit(problem, given)
    assert one.weight is not None
    assert same.weight is not None
    assert one.bias is not None
    assert same.bias is not None
    assert one.weight.tobytes() == same.weight.tobytes()
    assert one.bias.tobytes() == same.bias.tobytes()
    assert (one.error_after, one.iterations) == (same.error_after, same.iterations)


@BOTH
def test_a_problem_is_not_changed(options: FitOptions) -> None:
    problem = layer(WEIGHT, dense(6, 24), affine(WEIGHT, "int4"), bias=normal(6, 6))
    assert problem.bias is not None
    parts = [problem.weight, problem.bias, problem.training.quantized, problem.training.targets]
    before = [part.copy() for part in parts]
    fit(problem, replace(options, iterations=20))
    for part, was in zip(parts, before, strict=True):
        np.testing.assert_array_equal(part, was)


@BOTH
def test_without_iterations_nothing_changes(options: FitOptions) -> None:
    fitted = fit(layer(WEIGHT, dense(6, 24), affine(WEIGHT, "int4")), replace(options, iterations=0))
    assert (fitted.weight, fitted.bias, fitted.iterations) == (None, None, 0)
    assert fitted.error_after == fitted.error_before > 0


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_targets_that_are_not_finite(options: FitOptions, bad: float) -> None:
    problem = layer(WEIGHT, dense(6, 24), affine(WEIGHT, "int4"))
    targets = problem.held_out.targets.copy()
    targets[3, 2] = bad
    fitted = fit(replace(problem, held_out=replace(problem.held_out, targets=targets)), options)
    assert fitted.weight is None
    assert "not finite" in fitted.remark


@BOTH
def test_training_rows_that_are_not_finite_do_no_harm(options: FitOptions) -> None:
    problem = layer(WEIGHT, dense(6, 24), affine(WEIGHT, "int4"))
    targets = problem.training.targets.copy()
    targets[3, 2] = float("nan")
    broken = replace(problem, training=replace(problem.training, targets=targets))
    fitted = fit(broken, replace(options, iterations=50))
    if fitted.weight is not None:
        assert np.isfinite(fitted.weight).all()
    assert fitted.error_after <= fitted.error_before


@BOTH
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_inputs_and_targets_that_are_constant(options: FitOptions, value: float) -> None:
    rows = Rows(np.full((32, 1, 24), value, np.float32), np.full((32, 6), value, np.float32))
    problem = Problem("layer", rows, rows, WEIGHT, dense(6, 24), np.zeros(6, np.float32), affine(WEIGHT, "int4"))
    fitted = fit(problem, options)
    assert fitted.error_after <= fitted.error_before
    if fitted.weight is not None:
        assert np.isfinite(fitted.weight).all()


@BOTH
def test_weights_that_are_all_zero(options: FitOptions) -> None:
    problem = replace(layer(WEIGHT, dense(6, 24), blocks("mx6", 1)), weight=np.zeros_like(WEIGHT))
    fitted = fit(problem, options)
    assert fitted.error_after <= fitted.error_before
    if fitted.weight is not None:
        assert np.isfinite(fitted.weight).all()


@BOTH
def test_early_stopping_takes_fewer_iterations(options: FitOptions) -> None:
    """AdaRound stops when its weights are decided, which a strong regularization makes happen soon."""
    problem = layer(WEIGHT, dense(6, 24), affine(WEIGHT, "int4"))
    long = replace(options, iterations=1000, regularization=10.0, beta_range=(2.0, 2.0))
    assert fit(problem, long).iterations == 1000
    fitted = fit(problem, replace(long, has_early_stop=True))
    assert 0 < fitted.iterations < 1000
    assert_honest(problem, fitted)


def test_learning_rates() -> None:
    problem = layer(WEIGHT, dense(6, 24), affine(WEIGHT, "int4"))
    few = replace(ADAQUANT, iterations=10)
    assert fit(problem, replace(few, learning_rate=0.5)).learning_rate == 0.5
    step = affine(WEIGHT, "int4").scale[0]
    assert 0 < fit(problem, few).learning_rate < step
    assert fit(problem, replace(few, learning_rate=0.5, lr_adjust=(1e-9, 0.25))).learning_rate == 0.25
    assert fit(problem, replace(few, learning_rate=0.5, lr_adjust=(1e9, 0.25))).learning_rate == 0.5
