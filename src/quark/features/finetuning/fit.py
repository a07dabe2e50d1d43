"""Fit one layer, and take the result back if it is not better.

The error of rows that training does not see is looked at now and then (AdaRound: at the end, when its weights are
decided), and what was best there is kept: for each output of the layer by itself, since its weights are its own. An
output that never beats the weights as they stood, rounded to the nearest, stays as it was; a layer without any that
did is rolled back. A sum over all outputs would let the loud ones hide what becomes of the quiet ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from quark.features.finetuning.learned_weights import RoundedWeights, TrainedWeights, learned_weights, learning_rate
from quark.features.finetuning.objectives import GramObjective, Objective, RowObjective, Tensors
from quark.features.finetuning.options import Algorithm, FitOptions
from quark.features.finetuning.problem import Fitted, Problem, WeightLayout
from quark.features.finetuning.quantizers import quantizer_of, tensor_of
from quark.plan import BlockChoice, Choice
from quark.text import get_logger

_LOG = get_logger(__name__)

LITTLE_WORK = 1 << 25  # products of an iteration
LOOKS = 20  # how often held-out rows are looked at
LEAST_GAIN = 1e-4  # what counts as an improvement
PATIENCE = 5  # looks without an improvement, after which training stops early
BIAS_SHARE = 1e-3  # AdaRound's learning rate of the bias, relative to the outputs' RMS


def fit(problem: Problem, options: FitOptions) -> Fitted:
    """Find the weights that come closest to the targets; None if those that are there are better."""
    if not len(problem.training) or not len(problem.held_out):
        return Fitted(None, None, 0.0, 0.0, 0, 0.0, "has too few rows")
    with torch.no_grad(), threads_kept():
        if options.batch_rows * math.prod(problem.layout.matrices) < LITTLE_WORK:
            torch.set_num_threads(1)
        return _Fit(problem, options).run()


def arithmetic() -> str:
    """What the bytes of a result depend on beside the problem."""
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


@contextlib.contextmanager
def threads_kept() -> Iterator[None]:
    """Restore torch's number of threads afterwards. If an iteration is little work, one thread is faster: threads would
    spend their time waiting for each other, the more so if other programs use the processors too."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(
    options: FitOptions,
    iterate: Callable[[int, float], None],
    look: Callable[[], bool],
    is_decided: Callable[[], bool] | None,
) -> int:
    """Call `iterate` with the number and the share of each iteration; returns how many it took.

    `look` compares with the best so far, and returns whether it got better: now and then or, with `is_decided`, at the
    end. With early stopping, training ends when it gets no better any more, or when `is_decided` returns True.
    """
    period, idle, done = max(1, options.iterations // LOOKS), 0, 0
    while done < options.iterations:
        iterate(done, done / options.iterations)
        done += 1
        if done % period and done != options.iterations:
            continue
        if is_decided is None:
            idle = 0 if look() else idle + 1
            if options.has_early_stop and idle >= PATIENCE:
                return done
        elif options.has_early_stop and is_decided():
            break
    if is_decided is not None:
        look()
    return done


class _Best:
    """The best weights that were seen on held-out rows, output by output; at first those that stood there."""

    def __init__(self, errors: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, is_separate: bool) -> None:
        self.errors, self.weight, self.bias = errors, weight.clone(), bias.clone()
        self._is_separate = is_separate
        self.is_first = True

    def take(self, errors: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> bool:
        """Keep what is better; returns True if the whole got better."""
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
        self._problem, self._options, self._layout = problem, options, problem.layout
        device = torch.device(options.device)
        groups, outputs, length = self._layout.matrices
        self._training, self._held_out = (
            Tensors(problem, rows, device, options.has_output_rounding) for rows in (problem.training, problem.held_out)
        )
        self._weight = tensor_of(problem.weight, device)
        bias = np.zeros(groups * outputs, np.float32) if problem.bias is None else problem.bias
        self._bias = tensor_of(bias, device)
        self._quantizer = quantizer_of(problem.weight_choice, tuple(problem.weight.shape), device)
        choice = problem.bias_choice
        self._bias_quantizer = None if choice is None else quantizer_of(choice, tuple(bias.shape), device)
        self._has_bias = options.has_bias and problem.can_train_bias and problem.bias is not None
        joined = [problem.bias_choice, problem.output_choice if options.has_output_rounding else None]
        self._is_separate = are_outputs_separate(problem.layout, problem.weight_choice) and not any(
            isinstance(each, BlockChoice) for each in joined
        )
        rows = options.batch_rows * max(1, options.batches)
        is_mixed = options.drop_ratio < 1 and self._training.float is not None
        self._objective: Objective
        if self._training.is_linear and not is_mixed and (length < 2 * rows or options.batches < 0):
            self._objective = GramObjective(self._training, self._matrices(self._weight), self._grouped(self._bias))
        else:
            settings = (options.batch_rows, options.batches, options.drop_ratio, options.seed)
            self._objective = RowObjective(self._training, *settings)

    def run(self) -> Fitted:
        errors = self._errors(self._quantizer.values(self._weight), self._bias)
        best = _Best(errors, self._matrices(self._weight), self._grouped(self._bias), self._is_separate)
        power = self._held_out.power() or 1.0
        before = float(best.errors.sum()) / power
        rate = learning_rate(self._options, before, self._weight, self._quantizer)
        if not self._options.iterations or not math.isfinite(before):
            return Fitted(None, None, before, before, 0, rate, "" if math.isfinite(before) else "is not finite")
        iterations = self._train(best, rate)
        after = float(best.errors.sum()) / power
        if best.is_first:
            return Fitted(None, None, before, after, iterations, rate)
        bias = best.bias.reshape(-1).cpu().numpy() if self._has_bias else None
        return Fitted(self._layout.from_matrices(best.weight).cpu().numpy(), bias, before, after, iterations, rate)

    def _train(self, best: _Best, rate: float) -> int:
        """Returns the number of iterations."""
        options = self._options
        state, bias = self._state(), self._bias.clone()
        # seen as lines: a fused optimizer wants gradients that lie in memory as the parameters do
        parameters = [each.view(-1) for each in ([state.parameter, bias] if self._has_bias else [state.parameter])]
        spread = float(self._training.targets.square().mean().sqrt())
        bias_rate = rate if options.algorithm is Algorithm.ADAQUANT else BIAS_SHARE * (spread or 1.0)
        rates = [rate, bias_rate][: len(parameters)]
        groups = [{"params": [each], "lr": own} for each, own in zip(parameters, rates, strict=True)]
        optimizer = torch.optim.Adam(groups, lr=rate, fused=True)

        def iterate(iteration: int, progress: float) -> None:
            for group, own in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = own * state.fading(progress)
            matrices = self._layout.to_matrices(state.soft())
            found = self._objective.gradient(iteration, matrices, self._grouped(self._rounded_bias(bias)))
            of_weight = state.gradient(self._layout.from_matrices(found.weight), progress)
            for parameter, gradient in zip(parameters, (of_weight, found.bias), strict=False):
                parameter.grad = gradient.reshape(-1).contiguous()
            if (iteration + 1) % options.log_period == 0:
                _LOG.debug("%s: iteration %d, loss %.6g", self._problem.name, iteration + 1, float(found.loss))
            optimizer.step()

        def look() -> bool:
            errors = self._errors(state.rounded(), bias)
            return best.take(errors, self._layout.to_matrices(state.hard()), self._grouped(bias))

        return train(options, iterate, look, state.is_decided if state.is_decided_late else None)

    def _state(self) -> RoundedWeights | TrainedWeights:
        def loudness() -> torch.Tensor:
            """The mean squared error of each output that rounding to the nearest leaves in the training rows, spread
            over its weights: what AdaRound's regularization is weighed against."""
            matrices = self._matrices(self._quantizer.values(self._weight))
            errors = self._training.output_errors(matrices, self._grouped(self._bias)).float()
            by_weight = errors.unsqueeze(-1).expand(self._layout.matrices).contiguous()
            spread: torch.Tensor = self._layout.from_matrices(by_weight)
            return spread

        return learned_weights(self._weight, self._problem.weight_choice, self._quantizer, loudness, self._options)

    def _errors(self, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self._held_out.output_errors(self._matrices(weight), self._grouped(self._rounded_bias(bias)))

    def _matrices(self, weight: torch.Tensor) -> torch.Tensor:
        matrices: torch.Tensor = self._layout.to_matrices(weight).contiguous()
        return matrices

    def _rounded_bias(self, bias: torch.Tensor) -> torch.Tensor:
        return bias if self._bias_quantizer is None else self._bias_quantizer.values(bias)

    def _grouped(self, bias: torch.Tensor) -> torch.Tensor:
        return bias.reshape(self._layout.matrices[:2])


def are_outputs_separate(layout: WeightLayout, choice: Choice) -> bool:
    """True if no two outputs share a block, so that the weights of one can change without the others."""
    if not isinstance(choice, BlockChoice):
        return True
    groups, outputs, _ = layout.matrices
    owner = np.broadcast_to(np.arange(groups * outputs).reshape(groups, outputs, 1), layout.matrices)
    owners = layout.from_matrices(np.ascontiguousarray(owner))
    axis = choice.axis if owners.ndim > 1 else 0
    return bool((owners == np.take(owners, [0], axis)).all())
