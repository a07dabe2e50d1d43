"""Fit the layers of a block together, to what the float network computes behind the last of them.

    loss = mean of (block(x, W~) - y)^2 / error0 * outputs  +  AdaRound's regularization of every layer

where error0 is what rounding to the nearest leaves, and `outputs` counts those of all layers, so that AdaRound weighs
its two terms as it does for one layer. AdaQuant has the first term alone, as it is.

An error in one layer can be made good by another, which fitting layer by layer cannot see; in return there is one error
for many weights, and more of it is chance. What was best on held-out samples is kept, all layers or none; a block that
never beats its weights as they stood, rounded to the nearest, is left as it was.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from quark.reconstruction.adaquant import TrainedWeights
from quark.reconstruction.adaround import RoundedWeights
from quark.reconstruction.block_problem import BlockLayer, BlockProblem, Weights
from quark.reconstruction.block_samples import Batches, BlockSamples
from quark.reconstruction.fit import BIAS_SHARE, LEAST_GAIN, LITTLE_WORK, LOOKS, PATIENCE
from quark.reconstruction.learning_rate import learning_rate
from quark.reconstruction.options import ROWS_OF_A_SAMPLE, Algorithm, FitOptions
from quark.reconstruction.problem import Array, Fitted
from quark.reconstruction.quantizers import Quantizer, neighbours, quantizer_of
from quark.text import get_logger

_LOG = get_logger(__name__)

LOUDNESS_SAMPLES = 64  # that the error of rounding to the nearest is measured with


def fit_block(problem: BlockProblem, options: FitOptions) -> list[Fitted]:
    """For each layer the weights that bring the block closest to its targets; none where those that are there are
    better. The errors of all of them are the block's, and the learning rate that of the layer."""
    with torch.no_grad(), _threads_kept():
        return _BlockFit(problem, options).run()


@contextlib.contextmanager
def _threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Layer:
    """A layer of the block on its device."""

    def __init__(self, layer: BlockLayer, options: FitOptions) -> None:
        device = torch.device(options.device)
        self.layer, self.options = layer, options
        self.weight = torch.from_numpy(np.array(layer.weight, np.float32)).to(device)
        self.quantizer = quantizer_of(layer.weight_choice, tuple(layer.weight.shape), device)
        self.bias: torch.Tensor | None = None
        self._bias_quantizer: Quantizer | None = None
        if options.has_bias and layer.can_train_bias and layer.bias is not None:
            self.bias = torch.from_numpy(np.array(layer.bias, np.float32).reshape(-1)).to(device)
            if layer.bias_choice is not None:
                self._bias_quantizer = quantizer_of(layer.bias_choice, tuple(self.bias.shape), device)

    @property
    def outputs(self) -> int:
        groups, outputs, _ = self.layer.layout.matrices
        return groups * outputs

    def rounded_bias(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return bias if bias is None or self._bias_quantizer is None else self._bias_quantizer.values(bias)

    def state(self, loudness: float) -> Any:
        if self.options.algorithm is Algorithm.ADAQUANT:
            return TrainedWeights(self.weight, self.quantizer)
        ends = neighbours(self.layer.weight, self.layer.weight_choice)
        lower, upper = (torch.from_numpy(np.array(each, np.float32)).to(self.weight.device) for each in ends)
        return RoundedWeights(self.weight, lower, upper, torch.full_like(self.weight, loudness), self.options)


class _Best:
    """The best that was seen on held-out samples; at first what stood there, which is None."""

    def __init__(self, error: float) -> None:
        self.error = error
        self.found: list[tuple[torch.Tensor, torch.Tensor | None]] | None = None

    def take(self, error: float, training: _Training) -> bool:
        """Keep what is better; whether it is by enough to go on for."""
        if not error < self.error:
            return False
        has_gained = error < self.error * (1 - LEAST_GAIN)
        pairs = zip(training.states, training.biases, strict=True)
        self.found = [(state.hard().clone(), None if bias is None else bias.clone()) for state, bias in pairs]
        self.error = error
        return has_gained


class _Training:
    """One run from the weights as they stand: a state and a bias for each layer, and what moves them."""

    def __init__(self, layers: list[_Layer], loudness: float, rates: tuple[float, ...], spreads: list[float]) -> None:
        self._layers = layers
        self.states = [layer.state(loudness) for layer in layers]
        self.biases = [None if layer.bias is None else layer.bias.clone() for layer in layers]
        groups = []
        for layer, state, bias, rate, spread in zip(layers, self.states, self.biases, rates, spreads, strict=True):
            groups.append({"params": [state.parameter.view(-1)], "lr": rate})
            if bias is not None:
                is_adaquant = layer.options.algorithm is Algorithm.ADAQUANT
                groups.append({"params": [bias.view(-1)], "lr": rate if is_adaquant else BIAS_SHARE * (spread or 1.0)})
        self._optimizer = torch.optim.Adam(groups, fused=True)
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]

    @property
    def is_decided(self) -> bool:
        return all(state.is_decided() for state in self.states)

    def leaves(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Weights and biases that the loss is computed with, and whose gradients are wanted."""
        found = []
        for layer, state, bias in zip(self._layers, self.states, self.biases, strict=True):
            seen = None if bias is None else layer.rounded_bias(bias.clone())
            found.append((state.soft().requires_grad_(), None if seen is None else seen.requires_grad_()))
        return found

    def rounded(self) -> Weights:
        pairs = zip(self._layers, self.states, self.biases, strict=True)
        return [(state.rounded(), layer.rounded_bias(bias)) for layer, state, bias in pairs]

    def step(self, leaves: Weights, progress: float) -> None:
        """Move by the gradients that the leaves have got."""
        gradients = []
        for state, (weight, bias) in zip(self.states, leaves, strict=True):
            gradients.append(state.gradient(_gradient(weight), progress))
            if bias is not None:
                gradients.append(_gradient(bias))
        fading = self.states[0].fading(progress)
        for group, rate, gradient in zip(self._optimizer.param_groups, self._rates, gradients, strict=True):
            group["lr"] = rate * fading
            group["params"][0].grad = gradient.reshape(-1).contiguous()
        self._optimizer.step()


class _BlockFit:
    def __init__(self, problem: BlockProblem, options: FitOptions) -> None:
        self._problem, self._options = problem, options
        self._device = torch.device(options.device)
        self._layers = [_Layer(layer, options) for layer in problem.layers]
        self._held_out = sorted(problem.held_out)
        self._samples = BlockSamples(problem, self._device, has_output_rounding=options.has_output_rounding)
        self._standing: Weights = [
            (layer.quantizer.values(layer.weight), layer.rounded_bias(layer.bias)) for layer in self._layers
        ]

    def run(self) -> list[Fitted]:
        training = self._problem.training
        if not training:
            return self._results(None, 0.0, 0.0, 0, (0.0,) * len(self._layers), "is computed for one sample only")
        self._samples.find_batching(self._standing)
        before, power, _ = self._samples.squared(self._held_out, self._standing)
        power = power or 1.0
        rates = self._rates(before / power)
        if not self._options.iterations or not math.isfinite(before):
            remark = "" if math.isfinite(before) else "is not finite"
            return self._results(None, before / power, before / power, 0, rates, remark)
        self._look_at_one()
        self._loudness = self._find_loudness(training)
        best = _Best(before)
        iterations = self._train(best, rates, self._options.iterations)
        return self._results(best, before / power, best.error / power, iterations, rates)

    def _rates(self, error: float) -> tuple[float, ...]:
        """Of each layer."""
        return tuple(learning_rate(self._options, error, each.weight, each.quantizer) for each in self._layers)

    def _look_at_one(self) -> None:
        """How much each layer gives, and how much work that is: where it is little, one thread is enough, since to wait
        for each other would take longer."""
        given = self._samples.given(self._standing)
        self._spreads = [float(each.square().mean().sqrt()) for each in given]
        pairs = zip(given, self._layers, strict=True)
        work = sum(each.numel() * layer.layer.layout.matrices[2] for each, layer in pairs)
        if work * max(1, self._options.batch_rows // ROWS_OF_A_SAMPLE) < LITTLE_WORK:
            torch.set_num_threads(1)

    def _find_loudness(self, training: list[int]) -> float:
        step = max(1, len(training) // LOUDNESS_SAMPLES)
        total, _, count = self._samples.squared(training[::step], self._standing)
        return total / max(1, count) / sum(layer.outputs for layer in self._layers)

    def _train(self, best: _Best, rates: tuple[float, ...], iterations: int) -> int:
        """How many iterations it took."""
        training = _Training(self._layers, self._loudness, rates, self._spreads)
        batches = Batches(self._problem, self._samples, self._options, self._device)
        is_decided_late = training.states[0].is_decided_late
        period, idle, done = max(1, iterations // LOOKS), 0, 0
        while done < iterations:
            self._iterate(training, batches, done, done / iterations)
            done += 1
            if done % period and done != iterations:
                continue
            if is_decided_late:
                if self._options.has_early_stop and training.is_decided:
                    break
                continue
            idle = 0 if self._look(best, training) else idle + 1
            if self._options.has_early_stop and idle >= PATIENCE:
                return done
        if is_decided_late:
            self._look(best, training)
        return done

    def _iterate(self, training: _Training, batches: Batches, iteration: int, progress: float) -> None:
        leaves = training.leaves()
        loss = batches.descend(leaves)
        training.step(leaves, progress)
        if (iteration + 1) % self._options.log_period == 0:
            _LOG.debug("%s: iteration %d, loss %.6g", self._problem.name, iteration + 1, float(loss))

    def _look(self, best: _Best, training: _Training) -> bool:
        return best.take(self._samples.squared(self._held_out, training.rounded())[0], training)

    def _results(
        self,
        best: _Best | None,
        before: float,
        after: float,
        iterations: int,
        rates: tuple[float, ...],
        remark: str = "",
    ) -> list[Fitted]:
        found = best.found if best is not None else None
        pairs = [(None, None)] * len(self._layers) if found is None else found
        return [
            Fitted(_array(weight), _array(bias), before, after, iterations, rate, remark)
            for (weight, bias), rate in zip(pairs, rates, strict=True)
        ]


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _array(tensor: torch.Tensor | None) -> Array | None:
    return None if tensor is None else tensor.cpu().numpy()
