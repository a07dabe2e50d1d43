"""An iteration in compiled code beside the same iteration in torch, for what AdaRound and AdaQuant learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fitted_layers import choices_of, normal

from quark.features.finetuning.descent import NativeDescent, TorchDescent, descent
from quark.features.finetuning.learned_weights import LearnedWeights, RoundedWeights, TrainedWeights
from quark.features.finetuning.options import FitOptions
from quark.features.finetuning.quantizers import quantizer_of
from quark.features.finetuning.training import neighbours
from quark.formats.native import NativeFinetuning, instruction_set, native_finetuning
from quark.plan import Choice

WEIGHT = normal(1, 5, 33)  # not a multiple of any vector
CHOICES = dict(choices_of(WEIGHT))
ITERATIONS = 40


@pytest.fixture
def native() -> NativeFinetuning:
    finetuning = native_finetuning()
    if finetuning is None:
        pytest.skip("there is no compiled code")
    return finetuning


def adaround(choice: Choice) -> RoundedWeights:
    lower, upper = (torch.from_numpy(neighbour) for neighbour in neighbours(WEIGHT, choice))
    loudness = torch.linspace(0.01, 3, 5).unsqueeze(-1)
    return RoundedWeights(torch.from_numpy(WEIGHT), lower, upper, loudness, FitOptions(iterations=ITERATIONS))


def adaquant(choice: Choice) -> TrainedWeights:
    quantizer = quantizer_of(choice, WEIGHT.shape, torch.device("cpu"))
    return TrainedWeights(torch.from_numpy(WEIGHT), quantizer)


def run(
    native: NativeFinetuning | None, state: LearnedWeights, rates: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parameter, the weights and the bias after some iterations; gradients differ from one to the next."""
    bias = torch.from_numpy(normal(4, 5))
    moved = TorchDescent(state, bias, rates) if native is None else NativeDescent(native, state, bias, rates)
    for iteration in range(ITERATIONS):
        moved.soft()
        of_weights, of_bias = (torch.from_numpy(normal(10 + iteration, *value.shape)) + 0.3 for value in (WEIGHT, bias))
        moved.step(of_weights, of_bias, iteration / ITERATIONS)
    return state.parameter, moved.soft(), bias


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_adaquant_is_torch_to_the_last_bit(choice: Choice, native: NativeFinetuning) -> None:
    """But for the last numbers of a tensor, fewer than make a vector, where torch rounds differently."""
    compiled, composed = (run(value, adaquant(choice), (0.02, 0.01)) for value in (native, None))
    is_exact = instruction_set() == "avx512"  # others round a product and a sum twice
    whole = WEIGHT.size // 16 * 16
    if is_exact:
        assert torch.equal(compiled[0].view(-1)[:whole], composed[0].view(-1)[:whole])
    for mine, other in zip(compiled[::2], composed[::2], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    quantizer = quantizer_of(choice, WEIGHT.shape, torch.device("cpu"))
    assert torch.equal(compiled[1], quantizer.values(compiled[0]))


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_adaround_is_torch_but_for_rounding(choice: Choice, native: NativeFinetuning) -> None:
    (parameter, weights, bias), expected = (run(value, adaround(choice), (0.05, 0.01)) for value in (native, None))
    torch.testing.assert_close(parameter, expected[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(weights, expected[1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(bias, expected[2], rtol=1e-5, atol=1e-6)


def test_one_step_of_adaround_in_detail(native: NativeFinetuning) -> None:
    """From parameters all over the range, with and without the regularization."""
    choice = CHOICES["int8"]
    gradient = torch.from_numpy(normal(7, *WEIGHT.shape))
    for progress in (0.0, 0.3, 0.99):
        states = [adaround(choice), adaround(choice)]
        for state in states:
            state.parameter.copy_(torch.linspace(-12, 12, WEIGHT.size).reshape(WEIGHT.shape))
        for moved in (NativeDescent(native, states[0], None, (0.1,)), TorchDescent(states[1], None, (0.1,))):
            moved.soft()
            for _ in range(2):  # a first step of Adam has the same size whatever the gradient
                moved.step(gradient, None, progress)
                last = moved.soft()
        torch.testing.assert_close(states[0].parameter, states[1].parameter, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(NativeDescent(native, states[0], None, (0.1,)).soft(), last, rtol=1e-5, atol=1e-6)


def test_the_sigmoid_and_the_power_are_accurate(native: NativeFinetuning) -> None:
    """A step of no size leaves the parameter as it was and computes the weights from it: compared in float64."""
    parameter = np.linspace(-30, 30, 4001, dtype=np.float32)[None]
    flat = torch.zeros(parameter.shape)
    state = RoundedWeights(flat, flat, flat + 1, flat[:, :1] + 1, FitOptions())
    state.parameter.copy_(torch.from_numpy(parameter))
    moved = NativeDescent(native, state, None, (0.0,))
    moved.step(torch.zeros(parameter.shape), None, 0.0)
    np.testing.assert_array_equal(state.parameter.numpy(), parameter)
    exact = np.clip(1.2 / (1 + np.exp(-parameter.astype(np.float64))) - 0.1, 0, 1)
    np.testing.assert_allclose(moved.soft().numpy(), exact, rtol=0, atol=2e-7)


def test_the_cpu_has_compiled_code(native: NativeFinetuning) -> None:
    assert isinstance(descent(adaround(CHOICES["int8"]), None, (0.1,)), NativeDescent)


def test_the_library_refuses_what_it_cannot_do(native: NativeFinetuning) -> None:
    moved = NativeDescent(native, adaround(CHOICES["int8"]), None, (0.1,))
    moved._steps[0].kind = 7
    with pytest.raises(RuntimeError, match="refused a step of kind 7 with 165 weights"):
        moved.step(torch.zeros(WEIGHT.shape), None, 0.0)
