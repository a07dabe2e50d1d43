"""Fitting a layer: better on held-out rows or left as it was, and as good as the best rounding where that is known."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fitted_layers import (
    Array,
    affine,
    assert_honest,
    blocks,
    choices_of,
    dense,
    depthwise,
    held_out_errors,
    layer,
    normal,
)

import quark.features.finetuning.compiled_fit as compiled_fit
import quark.features.finetuning.torch_fit as torch_fit
import quark.features.finetuning.training as fit_training
from quark.features.finetuning.fit import fit
from quark.features.finetuning.options import Algorithm, FitOptions
from quark.features.finetuning.problem import Activation, Bounds, Part, Problem, Rows, WeightLayout
from quark.features.finetuning.training import are_outputs_separate, neighbours, parts_of
from quark.formats.native import native_finetuning
from quark.plan import AffineChoice, Choice, FloatChoice
from quark.rounded import rounded

pytestmark = pytest.mark.usefixtures("fitted_by")

ADAROUND = FitOptions(Algorithm.ADAROUND, iterations=300, learning_rate=None)
ADAQUANT = FitOptions(Algorithm.ADAQUANT, iterations=150, learning_rate=None)
BOTH = pytest.mark.parametrize("options", [ADAROUND, ADAQUANT], ids=["AdaRound", "AdaQuant"])
WEIGHT = normal(1, 6, 24)
CHOICES = dict(choices_of(WEIGHT))


@BOTH
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_every_format_gets_better_or_stays(choice: Choice, options: FitOptions) -> None:
    problem = layer(WEIGHT, dense(6, 24), choice)
    fitted = fit(problem, options)
    assert_honest(problem, fitted)
    if fitted.error_before > 1e-3:  # coarse enough that there is something to gain
        assert fitted.error_after < 0.95 * fitted.error_before


@BOTH
@pytest.mark.parametrize("name", ["int4 per group", "mxfp4_e2m1"])
def test_weights_that_were_rounded_already_are_trained_from_what_they_were(name: str, options: FitOptions) -> None:
    plain = layer(WEIGHT, dense(6, 24), CHOICES[name])
    rounded_before = replace(plain, weight=rounded(WEIGHT, CHOICES[name]))
    whole, stuck = fit(plain, options), fit(rounded_before, options)
    found = fit(replace(rounded_before, start=WEIGHT), options)
    assert found.learning_rate == whole.learning_rate
    assert found.error_before == pytest.approx(whole.error_before)
    assert found.error_after == pytest.approx(whole.error_after)
    assert found.error_after < 0.5 * stuck.error_after


@BOTH
def test_a_start_that_leads_nowhere_leaves_the_weights_that_stand(options: FitOptions) -> None:
    problem = replace(layer(WEIGHT, dense(6, 24), CHOICES["int8"]), start=100 * normal(5, 6, 24))
    assert fit(problem, replace(options, iterations=1)).weight is None


@BOTH
@pytest.mark.parametrize("name", ["int4", "int4 per group", "mx4", "mxfp4_e2m1", "mx6 along outputs"])
def test_weights_of_adaround_are_neighbours_of_what_they_were(name: str, options: FitOptions) -> None:
    choice = CHOICES[name]
    problem = layer(WEIGHT, dense(6, 24), choice)
    fitted = fit(problem, options)
    assert fitted.weight is not None
    if options is ADAROUND:
        lower, upper = neighbours(WEIGHT, choice)
        is_neighbour = (fitted.weight == lower) | (fitted.weight == upper)
        is_kept = (fitted.weight == WEIGHT).all(axis=1)
        assert (is_neighbour.all(axis=1) | is_kept).all()
        again = rounded(fitted.weight, choice)
        np.testing.assert_array_equal(again[~is_kept], fitted.weight[~is_kept])


def least_errors(problem: Problem) -> tuple[Array, Array]:
    """Of each output, the mean squared error that the best of all 2^n roundings leaves, and that of the nearest."""
    lower, upper = neighbours(problem.weight, problem.weight_choice)
    x, targets = problem.training.quantized[:, 0].astype(np.float64), problem.training.targets
    ups = np.array(list(itertools.product([False, True], repeat=lower.shape[1])))
    least = []
    for low, high, target in zip(lower, upper, targets.T, strict=True):
        candidates = np.where(ups, high, low)
        least.append(np.square(x @ candidates.T - target[:, None]).mean(axis=0).min())
    nearest = rounded(problem.weight, problem.weight_choice)
    return np.array(least), np.square(x @ nearest.T - targets).mean(axis=0)


@pytest.mark.parametrize(("choice", "gap"), [("int4", 0.15), ("mx4", 0.25), ("mxfp4_e2m1", 0.45)])
def test_adaround_comes_close_to_the_best_of_all_roundings(choice: str, gap: float) -> None:
    """How close is a matter of luck: descent from the float weights ends in what is best nearby."""
    weight = normal(3, 8, 8)
    problem = layer(weight, dense(8, 8), dict(choices_of(weight))[choice])
    problem = replace(problem, held_out=problem.training)
    fitted = fit(problem, replace(ADAROUND, iterations=1000, regularization=0.02))
    assert fitted.weight is not None
    found = held_out_errors(problem, fitted.weight, None)
    least, nearest = least_errors(problem)
    assert (found >= least * 0.999).all()  # there is nothing better
    assert (found.sum() - least.sum()) < gap * (nearest.sum() - least.sum())


def test_adaquant_beats_the_nearest_by_far() -> None:
    weight = normal(3, 8, 8)
    problem = layer(weight, dense(8, 8), affine(weight, "int4"))
    fitted = fit(problem, ADAQUANT)
    assert_honest(problem, fitted)
    assert fitted.error_after < 0.3 * fitted.error_before


@BOTH
@pytest.mark.parametrize("batches", [2, -1])
@pytest.mark.parametrize(
    "activation",
    [None, Bounds(0.0, float("inf")), Bounds(0.0, np.linspace(0.5, 3, 6, dtype=np.float32))],
    ids=["linear", "Relu", "bounds"],
)
def test_behind_activations(options: FitOptions, batches: int, activation: Activation) -> None:
    problem = layer(WEIGHT, dense(6, 24), affine(WEIGHT, "int4"), activation=activation)
    fitted = fit(problem, replace(options, batches=batches, batch_rows=32, iterations=150, learning_rate=None))
    assert_honest(problem, fitted)
    assert fitted.error_after < 0.7 * fitted.error_before


@BOTH
@pytest.mark.parametrize(
    "layout",
    [
        depthwise(6, 9),
        WeightLayout((6, 4, 3), (2, 3, 4, 3), (0, 1, 2, 3)),
        WeightLayout((8, 6), (1, 8, 6), (0, 2, 1)),  # of a MatMul
        WeightLayout((6, 2, 3), (2, 3, 2, 3), (0, 2, 1, 3)),  # of a ConvTranspose
    ],
    ids=["depthwise", "groups", "transposed", "groups transposed"],
)
def test_layouts(options: FitOptions, layout: WeightLayout) -> None:
    weight = normal(5, *layout.shape)
    groups, outputs, _ = layout.matrices
    bias = normal(6, groups * outputs)
    problem = layer(weight, layout, affine(weight, "int4"), bias=bias, bias_choice=affine(bias, "int8"))
    fitted = fit(problem, options)
    assert_honest(problem, fitted)
    assert fitted.bias is not None


@BOTH
def test_a_bias_that_may_not_change_does_not(options: FitOptions) -> None:
    bias = normal(6, 6)
    problem = layer(WEIGHT, dense(6, 24), affine(WEIGHT, "int4"), bias=bias)
    for allowed, wanted in (
        (problem, replace(options, has_bias=False)),
        (replace(problem, can_train_bias=False), options),
    ):
        fitted = fit(allowed, wanted)
        assert fitted.bias is None
        assert_honest(allowed, fitted)


@BOTH
def test_a_wrong_bias_is_found(options: FitOptions) -> None:
    """All that is wrong is the bias."""
    problem = layer(WEIGHT, dense(6, 24), FloatChoice("float16"), bias=np.zeros(6, np.float32))
    off = replace(problem, bias=np.linspace(-0.4, 0.4, 6, dtype=np.float32))
    fitted = fit(off, replace(options, learning_rate=None if options is ADAROUND else 5e-3))
    assert fitted.bias is not None
    assert_honest(off, fitted)
    assert fitted.error_after < 0.5 * fitted.error_before


@BOTH
def test_an_output_that_does_not_get_better_stays_as_it_was(options: FitOptions) -> None:
    """Held-out rows of half of the outputs ask for what those weights are already."""
    problem = layer(WEIGHT, dense(6, 24), affine(WEIGHT, "int4"))
    nearest = rounded(WEIGHT, problem.weight_choice)
    own = problem.held_out.quantized[:, 0] @ nearest.T
    targets = np.where(np.arange(6) < 3, own, problem.held_out.targets).astype(np.float32)
    problem = replace(problem, held_out=replace(problem.held_out, targets=targets))
    fitted = fit(problem, options)
    assert fitted.weight is not None
    np.testing.assert_array_equal(fitted.weight[:3], WEIGHT[:3])
    assert (rounded(fitted.weight, problem.weight_choice)[3:] != nearest[3:]).any(axis=1).any()
    assert_honest(problem, fitted)


@BOTH
def test_a_layer_that_does_not_get_better_is_left(options: FitOptions) -> None:
    problem = layer(WEIGHT, dense(6, 24), affine(WEIGHT, "int4"))
    own = (problem.held_out.quantized[:, 0] @ rounded(WEIGHT, problem.weight_choice).T).astype(np.float32)
    fitted = fit(replace(problem, held_out=replace(problem.held_out, targets=own)), options)
    assert not fitted.is_kept
    assert fitted.bias is None
    assert fitted.iterations > 0
    assert fitted.error_after == fitted.error_before


@BOTH
def test_blocks_across_outputs_change_together_or_not_at_all(options: FitOptions) -> None:
    problem = layer(WEIGHT, dense(6, 24), blocks("mx4", 0))
    fitted = fit(problem, options)
    assert_honest(problem, fitted)
    assert fitted.weight is not None


@pytest.mark.parametrize(
    ("layout", "choice", "is_separate"),
    [
        (dense(6, 24), blocks("mx6", 1), True),
        (dense(6, 24), blocks("mx6", -1), True),
        (dense(6, 24), blocks("mx6", 0), False),
        (WeightLayout((24, 6), (1, 24, 6), (0, 2, 1)), blocks("mx6", 0), True),  # of a MatMul
        (WeightLayout((24, 6), (1, 24, 6), (0, 2, 1)), blocks("mx6", 1), False),
        (depthwise(6, 9), blocks("mx6", 1), True),
        (depthwise(6, 9), blocks("mx6", 0), False),
        (WeightLayout((8,), (8, 1, 1), (0, 1, 2)), blocks("mx6", 1), False),  # of a normalization
        (dense(6, 24), AffineChoice("int8", (0.1,), (0,)), True),
        (dense(6, 24), FloatChoice("bfloat16"), True),
    ],
)
def test_which_outputs_share_no_block(layout: WeightLayout, choice: Choice, is_separate: bool) -> None:
    assert are_outputs_separate(layout, choice) is is_separate


@pytest.mark.parametrize("matrices", [(1, 96, 4096), (96, 1, 40000), (1, 95, 1 << 20), (1, 2000, 1000), (1, 5, 3)])
def test_parts_have_every_output_once(matrices: tuple[int, int, int]) -> None:
    groups, outputs, _ = matrices
    parts = parts_of(matrices, 256 * math.prod(matrices) >> 22, 48, 8)
    assert len(parts) in (1, 2, 4, 8)
    numbers = torch.arange(groups * outputs).reshape(groups, outputs)
    found = torch.cat([part.of(numbers).reshape(-1) for part in parts])
    assert torch.equal(found, numbers.reshape(-1))
    assert parts_of((1, 5, 3), 0, 48, 8) == [Part()]


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=str)
@pytest.mark.parametrize("name", ["int8 per channel", "int4 per group", "mxfp4_e2m1", "bfp16 of bfloat16", "bfloat16"])
@pytest.mark.parametrize("layout", [dense(16, 24), depthwise(16, 3)], ids=["dense", "depthwise"])
def test_parts_are_fitted_as_the_whole_is(
    algorithm: Algorithm, name: str, layout: WeightLayout, fitted_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch, up to rounding; and the same to the last bit on any number of processors."""
    groups, outputs, length = layout.matrices
    weight = normal(1, *layout.shape)
    training, held_out = (
        Rows(normal(seed, 300, groups, length), normal(seed + 1, 300, groups * outputs)) for seed in (2, 4)
    )
    bias, choice = normal(6, groups * outputs), dict(choices_of(weight))[name]
    problem = Problem("layer", training, held_out, weight, layout, bias, choice, None, Bounds(0.0, 2.0))
    options = FitOptions(algorithm=algorithm, iterations=30, learning_rate=0.02, batch_rows=64)
    whole = fit(problem, options)
    is_by_torch = fitted_by == "torch" or native_finetuning() is None
    module: Any = torch_fit if is_by_torch else compiled_fit
    for name in ("PART_WORK", "OWN_PART_WORK"):
        monkeypatch.setattr(module, name, 1, raising=False)
    monkeypatch.setattr(module, "SMALLEST_PART", 4)
    made: list[int] = []

    def seen(*arguments: Any) -> list[Part]:
        made.append(len(parts_of(*arguments)))
        return parts_of(*arguments)

    monkeypatch.setattr(module, "parts_of", seen)
    found = {}
    for processors in (1, 3, 4):
        for value in (fit_training, compiled_fit):
            monkeypatch.setattr(value, "processor_count", lambda count=processors: count)
        found[processors] = fit(problem, options)
    for parts in found.values():
        assert parts.weight is not None
        np.testing.assert_array_equal(parts.weight, found[1].weight)
        np.testing.assert_array_equal(parts.bias, found[1].bias)
        assert (parts.error_before, parts.error_after) == (found[1].error_before, found[1].error_after)
    assert made == ([4, 4, 4] if is_by_torch else [1, 2, 4])
    if not is_by_torch:
        np.testing.assert_array_equal(whole.weight, found[1].weight)
    assert found[1].error_before == pytest.approx(whole.error_before, rel=1e-5)
    assert found[1].error_after == pytest.approx(whole.error_after, rel=1e-2)


@BOTH
def test_the_loss_is_logged_now_and_then(options: FitOptions, caplog: pytest.LogCaptureFixture) -> None:
    """Without an effect on the result."""
    problem = layer(WEIGHT, dense(6, 24), CHOICES["int4 per group"], activation=Bounds(0.0, 6.0))
    options = replace(options, iterations=25, log_period=10)
    quiet = fit(problem, options)
    with caplog.at_level("DEBUG", logger="quark"):
        loud = fit(problem, options)
    told = [record.getMessage() for record in caplog.records if "loss" in record.getMessage()]
    assert [each.partition(", loss")[0] for each in told] == [f"layer: iteration {number}" for number in (10, 20)]
    assert all(float(each.rpartition(" ")[2]) > 0 for each in told)
    np.testing.assert_array_equal(loud.weight, quiet.weight)
