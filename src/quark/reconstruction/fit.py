"""Fit one layer, and take the result back where it is not better.

The error of rows that training does not see is looked at now and then (AdaRound: at the end, when its weights are
decided), and what was best there is kept: for each output of the layer by itself, since its weights are its own. An
output that never beats the weights as they stood, rounded to the nearest, stays as it was; a layer without any that
did is rolled back. A sum over all outputs would let the loud ones hide what becomes of the quiet ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from quark.plan import BlockChoice, Choice
from quark.reconstruction.adaquant import TrainedWeights
from quark.reconstruction.adaround import RoundedWeights
from quark.reconstruction.learning_rate import learning_rate
from quark.reconstruction.objectives import GramObjective, Objective, RowObjective
from quark.reconstruction.options import Algorithm, FitOptions
from quark.reconstruction.problem import Fitted, Problem, WeightLayout
from quark.reconstruction.quantizers import neighbours, quantizer_of
from quark.reconstruction.tensors import Tensors
from quark.text import get_logger

_LOG = get_logger(__name__)

LITTLE_WORK = 1 << 25  # products of an iteration
LOOKS = 20  # how often held-out rows are looked at
LEAST_GAIN = 1e-4  # what counts as an improvement
PATIENCE = 5  # looks without an improvement, after which training stops early
BIAS_SHARE = 1e-3  # AdaRound's learning rate of the bias, in units of the outputs' spread


def fit(problem: Problem, options: FitOptions) -> Fitted:
    """The weights that come closest to the targets; none where those that are there are better."""
    if not len(problem.training) or not len(problem.held_out):
        return Fitted(None, None, 0.0, 0.0, 0, 0.0, "has too few rows")
    with torch.no_grad(), _threads(problem, options):
        return _Fit(problem, options).run()


def arithmetic() -> str:
    """What the bytes of a result hang on beside the problem."""
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


@contextlib.contextmanager
def _threads(problem: Problem, options: FitOptions) -> Iterator[None]:
    """One thread where an iteration is little work: to wait for each other would take longer, and much longer where
    other programs want the processors too."""
    before = torch.get_num_threads()
    is_little = options.batch_rows * math.prod(problem.layout.matrices) < LITTLE_WORK
    torch.set_num_threads(1 if is_little else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Best:
    """The best weights that were seen, output by output, on held-out rows; at first those that stood there."""

    def __init__(self, errors: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, is_separate: bool) -> None:
        self.errors, self.weight, self.bias = errors, weight.clone(), bias.clone()
        self._is_separate = is_separate
        self.is_first = True

    def take(self, errors: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> bool:
        """Keep what is better; whether the whole got better."""
        is_less = errors < self.errors if self._is_separate else (errors.sum() < self.errors.sum()).expand_as(errors)
        if not bool(is_less.any()):
            return False
        total = float(self.errors.sum())
        self.errors = torch.where(is_less, errors, self.errors)
        self.weight = torch.where(is_less.unsqueeze(-1), weight, self.weight)
        self.bias = torch.where(is_less, bias, self.bias)
        self.is_first = False
        return float(self.errors.sum()) < total * (1 - LEAST_GAIN)


class _Fit:
    def __init__(self, problem: Problem, options: FitOptions) -> None:
        self._problem, self._options = problem, options
        self._device = torch.device(options.device)
        self._layout = problem.layout
        groups, outputs, _ = self._layout.matrices
        self._training = Tensors(problem, problem.training, self._device, options.has_output_rounding)
        self._held_out = Tensors(problem, problem.held_out, self._device, options.has_output_rounding)
        self._weight = self._tensor(problem.weight)
        bias = np.zeros(groups * outputs, np.float32) if problem.bias is None else problem.bias
        self._bias = self._tensor(bias)
        self._quantizer = quantizer_of(problem.weight_choice, tuple(problem.weight.shape), self._device)
        choice = problem.bias_choice
        self._bias_quantizer = None if choice is None else quantizer_of(choice, tuple(bias.shape), self._device)
        self._has_bias = options.has_bias and problem.can_train_bias and problem.bias is not None
        joined = [problem.bias_choice, problem.output_choice if options.has_output_rounding else None]
        self._is_separate = are_outputs_separate(problem.layout, problem.weight_choice) and not any(
            isinstance(each, BlockChoice) for each in joined
        )
        self._objective = self._make_objective()

    def run(self) -> Fitted:
        best = self._standing()
        power = self._held_out.power() or 1.0
        before = float(best.errors.sum()) / power
        rate = learning_rate(self._options, before, self._weight, self._quantizer)
        if not self._options.iterations or not math.isfinite(before):
            return Fitted(None, None, before, before, 0, rate, "" if math.isfinite(before) else "is not finite")
        iterations = self._train(best, rate, self._options.iterations)
        after = float(best.errors.sum()) / power
        if best.is_first:
            return Fitted(None, None, before, after, iterations, rate)
        bias = best.bias.reshape(-1).cpu().numpy() if self._has_bias else None
        return Fitted(self._layout.from_matrices(best.weight).cpu().numpy(), bias, before, after, iterations, rate)

    def _standing(self) -> _Best:
        errors = self._errors(self._quantizer.values(self._weight), self._bias)
        matrices = self._layout.to_matrices(self._weight).contiguous()
        return _Best(errors, matrices, self._grouped(self._bias), self._is_separate)

    def _make_objective(self) -> Objective:
        options, length = self._options, self._layout.matrices[2]
        rows = options.batch_rows * max(1, options.batches)
        is_mixed = options.drop_ratio < 1 and self._training.float is not None
        if self._training.is_linear and not is_mixed and (length < 2 * rows or options.batches < 0):
            matrices = self._layout.to_matrices(self._weight).contiguous()
            return GramObjective(self._training, matrices, self._grouped(self._bias))
        return RowObjective(self._training, options.batch_rows, options.batches, options.drop_ratio, options.seed)

    def _train(self, best: _Best, rate: float, iterations: int) -> int:
        """How many iterations it took."""
        state, bias = self._state(), self._bias.clone()
        # seen as lines: a fused optimizer wants gradients that lie in memory as the parameters do
        parameters = [each.view(-1) for each in ([state.parameter, bias] if self._has_bias else [state.parameter])]
        rates = [rate, self._bias_rate(rate)][: len(parameters)]
        groups = [{"params": [each], "lr": own} for each, own in zip(parameters, rates, strict=True)]
        optimizer = torch.optim.Adam(groups, lr=rate, fused=True)
        period, idle = max(1, iterations // LOOKS), 0
        for iteration in range(iterations):
            progress = iteration / iterations
            for group, own in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = own * state.fading(progress)
            self._iterate(state, bias, parameters, iteration, progress)
            optimizer.step()
            if (iteration + 1) % period and iteration + 1 != iterations:
                continue
            if state.is_decided_late:
                if self._options.has_early_stop and state.is_decided():
                    iterations = iteration + 1
                    break
                continue
            idle = 0 if self._look(best, state, bias) else idle + 1
            if self._options.has_early_stop and idle >= PATIENCE:
                return iteration + 1
        if state.is_decided_late:
            self._look(best, state, bias)
        return iterations

    def _look(self, best: _Best, state: Any, bias: torch.Tensor) -> bool:
        errors = self._errors(state.rounded(), bias)
        return best.take(errors, self._layout.to_matrices(state.hard()), self._grouped(bias))

    def _iterate(self, state: Any, bias: torch.Tensor, parameters: list[Any], iteration: int, progress: float) -> None:
        matrices = self._layout.to_matrices(state.soft())
        found = self._objective.gradient(iteration, matrices, self._grouped(self._rounded_bias(bias)))
        of_weight = state.gradient(self._layout.from_matrices(found.weight), progress)
        for parameter, gradient in zip(parameters, (of_weight, found.bias), strict=False):
            parameter.grad = gradient.reshape(-1).contiguous()
        if (iteration + 1) % self._options.log_period == 0:
            _LOG.debug("%s: iteration %d, loss %.6g", self._problem.name, iteration + 1, float(found.loss))

    def _state(self) -> Any:
        if self._options.algorithm is Algorithm.ADAQUANT:
            return TrainedWeights(self._weight, self._quantizer)
        lower, upper = neighbours(self._problem.weight, self._problem.weight_choice)
        return RoundedWeights(self._weight, self._tensor(lower), self._tensor(upper), self._loudness(), self._options)

    def _loudness(self) -> torch.Tensor:
        """The mean squared error of each output that rounding to the nearest leaves in the training rows, spread over
        its weights: what AdaRound's regularization is weighed against."""
        matrices = self._layout.to_matrices(self._quantizer.values(self._weight)).contiguous()
        errors = self._training.output_errors(matrices, self._grouped(self._bias)).float()
        by_weight = errors.unsqueeze(-1).expand(self._layout.matrices).contiguous()
        spread: torch.Tensor = self._layout.from_matrices(by_weight)
        return spread

    def _bias_rate(self, rate: float) -> float:
        if self._options.algorithm is Algorithm.ADAQUANT:
            return rate
        spread = float(self._training.targets.square().mean().sqrt())
        return BIAS_SHARE * (spread or 1.0)

    def _errors(self, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        matrices = self._layout.to_matrices(weight).contiguous()
        return self._held_out.output_errors(matrices, self._grouped(self._rounded_bias(bias)))

    def _rounded_bias(self, bias: torch.Tensor) -> torch.Tensor:
        return bias if self._bias_quantizer is None else self._bias_quantizer.values(bias)

    def _grouped(self, bias: torch.Tensor) -> torch.Tensor:
        return bias.reshape(self._layout.matrices[:2])

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(array, np.float32)).to(self._device)


def are_outputs_separate(layout: WeightLayout, choice: Choice) -> bool:
    """That no two outputs share a block, so that the weights of one can change without the others."""
    if not isinstance(choice, BlockChoice):
        return True
    groups, outputs, _ = layout.matrices
    owner = np.broadcast_to(np.arange(groups * outputs).reshape(groups, outputs, 1), layout.matrices)
    owners = layout.from_matrices(np.ascontiguousarray(owner))
    axis = choice.axis if owners.ndim > 1 else 0
    return bool((owners == np.take(owners, [0], axis)).all())
