"""AdaRound's state: where it starts, its gradient against autograd of the formula as published, where it ends."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from fitted_layers import choices_of, normal

from quark.features.finetuning.learned_weights import RoundedWeights
from quark.features.finetuning.options import FitOptions
from quark.features.finetuning.training import neighbours
from quark.plan import Choice

WEIGHT = normal(1, 5, 32)
CHOICES = dict(choices_of(WEIGHT))
OPTIONS = FitOptions()
LOUDNESS = np.repeat(np.linspace(0.01, 3, 5, dtype=np.float32)[:, None], 32, 1)


def state_of(choice: Choice, options: FitOptions = OPTIONS) -> RoundedWeights:
    lower, upper = neighbours(WEIGHT, choice)
    weight, low, high, loudness = (torch.from_numpy(value) for value in (WEIGHT, lower, upper, LOUDNESS))
    return RoundedWeights(weight, low, high, loudness, options)


def pushed(choice: Choice, seed: int, options: FitOptions = OPTIONS) -> RoundedWeights:
    """A state in the midst of training."""
    state = state_of(choice, options)
    state.parameter += torch.from_numpy(normal(seed, *WEIGHT.shape) * 2)
    return state


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_it_starts_at_the_weights(choice: Choice) -> None:
    lower, upper = neighbours(WEIGHT, choice)
    expected = np.clip(WEIGHT, lower, upper)
    np.testing.assert_allclose(state_of(choice).soft().numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_it_starts_at_the_nearest_but_for_ties(choice: Choice) -> None:
    lower, upper = neighbours(WEIGHT, choice)
    expected = np.where(WEIGHT - lower >= upper - WEIGHT, upper, lower)
    is_tie = np.abs((WEIGHT - lower) - (upper - WEIGHT)) < 1e-4 * (upper - lower)
    np.testing.assert_array_equal(state_of(choice).hard().numpy()[~is_tie], expected[~is_tie])


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_it_ends_at_neighbours(choice: Choice) -> None:
    lower, upper = neighbours(WEIGHT, choice)
    state = pushed(choice, 2)
    is_up = state.parameter.numpy() >= 0
    np.testing.assert_array_equal(state.hard().numpy(), np.where(is_up, upper, lower))
    np.testing.assert_array_equal(state.rounded().numpy(), state.hard().numpy())


@pytest.mark.parametrize("name", ["int8", "int4 per group", "mx6", "bfloat16"])
@pytest.mark.parametrize("progress", [0.1, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("regularization", [0.01, 0.5])
def test_the_gradient_is_that_of_the_loss(name: str, progress: float, regularization: float) -> None:
    """With rows X, output error0 and neighbours l, u: sum of |X W~ - Y|^2 / error0 + lambda sum(1 - |2h - 1|^beta)."""
    options = FitOptions(regularization=regularization, beta_range=(12.0, 3.0), warm_start=0.2)
    state = pushed(CHOICES[name], 3, options)
    lower, upper = (torch.from_numpy(neighbour) for neighbour in neighbours(WEIGHT, CHOICES[name]))
    rows, targets = torch.from_numpy(normal(4, 20, 32)), torch.from_numpy(normal(5, 20, 5))

    variable = state.parameter.clone().requires_grad_()
    share = torch.clip(1.2 / (1 + torch.exp(-variable)) - 0.1, 0, 1)
    soft = lower + share * (upper - lower)
    soft.retain_grad()
    errors = (rows @ soft.T - targets).square().mean(0)
    loss = (errors / torch.from_numpy(LOUDNESS[:, 0])).sum()
    if progress >= 0.2:
        beta = 3 + 0.5 * (12 - 3) * (1 + math.cos(math.pi * (progress - 0.2) / 0.8))
        loss = loss + regularization * (1 - (2 * share - 1).abs() ** beta).sum()
    (expected,) = torch.autograd.grad(loss, variable)

    weights = state.soft()
    torch.testing.assert_close(weights, soft.detach())
    of_weights = 2 * (rows @ weights.T - targets).T @ rows / 20
    before = of_weights.clone()
    found = state.gradient(of_weights, state.beta(progress))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(of_weights, before)


def test_beta_falls_along_half_a_cosine_after_the_warm_start() -> None:
    state = state_of(CHOICES["int8"], FitOptions(warm_start=0.25, beta_range=(20.0, 2.0)))
    assert state.beta(0.0) is None
    assert state.beta(0.249) is None
    betas = [state.beta(progress) for progress in np.linspace(0.25, 1, 40)]
    falling = [beta for beta in betas if beta is not None]
    assert len(falling) == len(betas)
    assert falling[0] == pytest.approx(20)
    assert falling[-1] == pytest.approx(2)
    assert all(after < before for before, after in itertools.pairwise(falling))
    assert state.beta(0.625) == pytest.approx(11)  # halfway


def test_a_warm_start_that_never_ends() -> None:
    state = state_of(CHOICES["int8"], FitOptions(warm_start=1.0))
    assert state.beta(0.99) is None


def test_the_regularization_alone_decides_every_weight() -> None:
    """Without an error to reduce, each weight goes to the neighbour that it is nearer to."""
    choice = CHOICES["int4"]
    state = state_of(choice, FitOptions(regularization=1.0, warm_start=0.0, beta_range=(4.0, 2.0)))
    nearest = state.hard().clone()
    assert not state.is_decided()
    for iteration in range(400):
        state.soft()
        state.parameter -= 0.5 * state.gradient(torch.zeros_like(state.parameter), state.beta(iteration / 400))
    soft = state.soft()
    assert state.is_decided()
    lower, upper = neighbours(WEIGHT, choice)
    is_middle = np.abs(WEIGHT - (lower + upper) / 2) < 0.02 * (upper - lower)
    np.testing.assert_array_equal(state.hard().numpy()[~is_middle], nearest.numpy()[~is_middle])
    np.testing.assert_allclose(soft.numpy()[~is_middle], nearest.numpy()[~is_middle], atol=0.02 * np.max(upper - lower))


def test_weights_without_two_neighbours_are_decided_and_stay() -> None:
    """Those beyond the range, and those that are numbers of the format."""
    weight = torch.tensor([[0.5, 3.0]])
    state = RoundedWeights(weight, weight, weight, torch.zeros(1, 2), FitOptions())
    assert state.is_decided()
    assert torch.equal(state.soft(), weight)
    gradient = state.gradient(torch.ones(1, 2), state.beta(0.1))
    assert not gradient.any()
    assert torch.equal(state.hard(), weight)
