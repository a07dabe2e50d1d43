"""The error of a layer's output and its gradient, against autograd of the loss as written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fitted_layers import affine, blocks, dense, depthwise, normal

from quark.features.finetuning.objectives import Gradient, GramObjective, RowObjective, Tensors
from quark.features.finetuning.problem import Activation, Bounds, Problem, Rows, WeightLayout
from quark.plan import Choice
from quark.rounded import rounded

CPU = torch.device("cpu")
COUNT = 50
LAYOUTS = {
    "one group": dense(6, 9),
    "two groups": WeightLayout((6, 4), (2, 3, 4), (0, 1, 2)),
    "depthwise": depthwise(6, 3),
}
ACTIVATIONS: dict[str, Activation] = {
    "none": None,
    "bounds": Bounds(0.0, 1.0),
    "bounds of each output": Bounds(np.linspace(-1, 0, 6, dtype=np.float32), np.linspace(0.1, 2, 6, dtype=np.float32)),
    "no upper bound": Bounds(0.0, float("inf")),
    "sigmoid": torch.sigmoid,
    "gelu": torch.nn.functional.gelu,
}


def problem_of(layout: WeightLayout, activation: Activation = None, output: Choice | None = None) -> Problem:
    groups, outputs, length = layout.matrices
    rows = Rows(normal(1, COUNT, groups, length), normal(2, COUNT, groups * outputs), normal(3, COUNT, groups, length))
    weight = normal(4, *layout.shape)
    return Problem("layer", rows, rows, weight, layout, None, affine(weight, "int8"), None, activation, output)


def tensors_of(problem: Problem, *, has_rounding: bool = False) -> Tensors:
    return Tensors(problem, problem.training, CPU, has_rounding)


def state_of(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    groups, outputs, _ = problem.layout.matrices
    return torch.from_numpy(problem.layout.to_matrices(problem.weight).copy()), torch.from_numpy(
        normal(5, groups, outputs)
    )


def activated(activation: Activation, outputs: torch.Tensor) -> torch.Tensor:
    """[rows, outputs], as ONNX says."""
    if isinstance(activation, Bounds):
        low, high = (torch.as_tensor(value, dtype=torch.float32) for value in (activation.lowest, activation.highest))
        return torch.minimum(torch.maximum(outputs, low), high)
    return outputs if activation is None else activation(outputs)


def expected(problem: Problem, weight: torch.Tensor, bias: torch.Tensor, inputs: Any, part: slice) -> Gradient:
    """By autograd, in the layer's own terms."""
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    rows, targets = torch.from_numpy(inputs[part]), torch.from_numpy(problem.training.targets[part])
    outputs = torch.einsum("rgk,gok->rgo", rows, weight) + bias
    behind = activated(problem.activation, outputs.reshape(len(rows), -1))
    loss = (behind - activated(problem.activation, targets)).square().sum() / len(rows)
    of_weight, of_bias = torch.autograd.grad(loss, [weight, bias])
    return Gradient(of_weight, of_bias, loss.detach())


def assert_same(found: Gradient, wanted: Gradient) -> None:
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.weight, wanted.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.bias, wanted.bias, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_the_gradient_of_all_rows(layout: WeightLayout, activation: Activation) -> None:
    problem = problem_of(layout, activation)
    weight, bias = state_of(problem)
    wanted = expected(problem, weight, bias, problem.training.quantized, slice(None))
    for batch_rows in (COUNT, 16, 1):  # in pieces of any size
        objective = RowObjective(tensors_of(problem), batch_rows, -1, 1.0, 0)
        for iteration in (0, 3):
            assert_same(objective.gradient(iteration, weight, bias, has_loss=True), wanted)
            fused = objective.gradient(iteration, weight, bias)  # compiled, where nothing but bounds is behind
            assert fused.loss is None
            assert_same(replace(fused, loss=wanted.loss), wanted)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_gram_matrix_says_the_same_as_all_rows(layout: WeightLayout) -> None:
    problem = problem_of(layout)
    tensors = tensors_of(problem)
    assert tensors.is_linear
    weight, bias = state_of(problem)
    start = torch.from_numpy(normal(6, *weight.shape)), torch.from_numpy(normal(7, *bias.shape))
    objective = GramObjective(tensors, *start)
    wanted = expected(problem, weight, bias, problem.training.quantized, slice(None))
    assert_same(objective.gradient(0, weight, bias, has_loss=True), wanted)


def test_a_gram_matrix_of_more_rows_than_are_taken_together() -> None:
    problem = problem_of(dense(2, 3))
    rows = Rows(normal(1, 5000, 1, 3), normal(2, 5000, 2))
    problem = replace(problem, training=rows)
    weight, bias = state_of(problem_of(dense(2, 3)))
    objective = GramObjective(tensors_of(problem), weight, bias)
    wanted = expected(problem, weight * 2, bias, rows.quantized, slice(None))
    assert_same(objective.gradient(0, weight * 2, bias, has_loss=True), wanted)


def test_batches_follow_each_other() -> None:
    problem = problem_of(dense(6, 9), Bounds(0.0, 1.0))
    weight, bias = state_of(problem)
    objective = RowObjective(tensors_of(problem), 8, 1, 1.0, 0)
    for iteration, start in ((0, 0), (1, 8), (4, 32)):
        wanted = expected(problem, weight, bias, problem.training.quantized, slice(start, start + 8))
        assert_same(objective.gradient(iteration, weight, bias, has_loss=True), wanted)


def test_several_batches_are_one_gradient() -> None:
    problem = problem_of(dense(6, 9), Bounds(0.0, 1.0))
    weight, bias = state_of(problem)
    objective = RowObjective(tensors_of(problem), 8, 3, 1.0, 0)
    wanted = expected(problem, weight, bias, problem.training.quantized, slice(0, 24))
    assert_same(objective.gradient(0, weight, bias, has_loss=True), wanted)


@pytest.mark.parametrize(("count", "batch_rows"), [(127, 64), (191, 64), (64, 64), (5, 2), (128, 64), (7, 1), (3, 9)])
def test_every_row_is_seen_sooner_or_later(count: int, batch_rows: int) -> None:
    problem = replace(problem_of(dense(1, 1)), training=Rows(np.ones((count, 1, 1)), normal(1, count, 1)))
    objective = RowObjective(tensors_of(problem), batch_rows, 1, 1.0, 0)
    weight, bias = torch.zeros(1, 1, 1), torch.zeros(1, 1)
    # the loss of a batch is the mean of its squared targets: each start gives another
    losses = {round(float(objective.gradient(i, weight, bias, has_loss=True).loss), 6) for i in range(count)}
    assert len(losses) == max(1, count - batch_rows + 1)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_inputs_are_mixed_by_the_drop_ratio(ratio: float) -> None:
    """Rows of zeros in the float network, of ones in the quantized one: a weight's gradient counts its ones."""
    count = 4000
    rows = Rows(np.ones((count, 1, 1)), np.full((count, 1), -1.0), np.zeros((count, 1, 1)))
    problem = replace(problem_of(dense(1, 1)), training=rows)
    objective = RowObjective(tensors_of(problem), count, 1, ratio, 0)
    found = objective.gradient(0, torch.zeros(1, 1, 1), torch.zeros(1, 1))
    assert float(found.weight) / 2 == pytest.approx(ratio, abs=0.03)


def test_the_same_seed_mixes_the_same() -> None:
    problem = problem_of(dense(6, 9))
    weight, bias = state_of(problem)
    one, same, other = (RowObjective(tensors_of(problem), 8, 1, 0.5, seed) for seed in (1, 1, 2))
    for iteration in range(3):
        first, second, third = (value.gradient(iteration, weight, bias).weight for value in (one, same, other))
        assert torch.equal(first, second)
        assert not torch.equal(first, third)


@pytest.mark.parametrize("kind", ["int8", "int8 per output", "bfp16"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_outputs_are_rounded_behind_the_activation(kind: str, layout: WeightLayout) -> None:
    activation = Bounds(0.0, 2.0)
    outputs = np.array([[1.5] * 6], np.float32)  # so that some of what is within the bounds is beyond the range
    by_kind = {"int8": affine(outputs, "int8"), "int8 per output": affine(outputs, "int8", 1)}
    output: dict[str, Choice] = {**by_kind, "bfp16": blocks("bfp16", 1)}
    problem = problem_of(layout, activation, output[kind])
    tensors = tensors_of(problem, has_rounding=True)
    assert not tensors.is_linear
    weight, bias = state_of(problem)
    product = np.einsum("rgk,gok->rgo", problem.training.quantized, weight.numpy()) + bias.numpy()
    flat = product.reshape(COUNT, 6)
    behind = rounded(np.clip(flat, 0, 2), output[kind])
    errors = behind - np.clip(problem.training.targets, 0, 2)
    found = RowObjective(tensors, COUNT, 1, 1.0, 0).gradient(0, weight, bias, has_loss=True)
    assert float(found.loss) == pytest.approx(float(np.square(errors).sum() / COUNT), rel=1e-4)
    passes = (flat > 0) & (flat < 2)
    if kind != "bfp16":
        passes &= np.clip(flat, 0, 2) < 127.5 * np.asarray(by_kind[kind].scale, np.float32)
    slope = (2 / COUNT * errors * passes).reshape(product.shape)
    expected_weight = np.einsum("rgo,rgk->gok", slope, problem.training.quantized)
    np.testing.assert_allclose(found.weight.numpy(), expected_weight, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.bias.numpy(), slope.sum(0), rtol=1e-3, atol=1e-4)


def test_rounding_of_outputs_is_left_out_unless_asked_for() -> None:
    assert tensors_of(problem_of(dense(6, 9), None, blocks("bfp16", 1))).is_linear


def test_errors_and_power() -> None:
    problem = problem_of(LAYOUTS["two groups"], Bounds(0.0, 1.0))
    weight, bias = state_of(problem)
    tensors = tensors_of(problem)
    product = np.einsum("rgk,gok->rgo", problem.training.quantized, weight.numpy()) + bias.numpy()
    targets = np.clip(problem.training.targets, 0, 1)
    errors = np.square(np.clip(product.reshape(COUNT, 6), 0, 1) - targets).mean(0)
    np.testing.assert_allclose(tensors.output_errors(weight, bias).reshape(-1).numpy(), errors, rtol=1e-4)
    assert tensors.power() == pytest.approx(float(np.square(targets).sum() / COUNT), rel=1e-5)
