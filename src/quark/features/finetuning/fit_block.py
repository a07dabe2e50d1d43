"""Fit the layers of a block together, to what the float network computes behind the last of them.

    loss = mean of (block(x, W~) - y)^2 / error0 * outputs  +  AdaRound's regularization of every layer

where error0 is what rounding to the nearest leaves, and `outputs` counts those of all layers, so that AdaRound weighs
its two terms as it does for one layer. AdaQuant has the first term alone, as it is.

One layer can make up for the error of another, which fitting layer by layer cannot see; in return there is one error
for many weights, and more of it is chance. What was best on held-out samples is kept, all layers or none; a block that
never beats its weights as they stood, rounded to the nearest, is left as it was.

A sample is a whole activation, read by its number, so that samples may lie in a file. Several of them make a batch if
the block computes each by itself, as nearly all do. A block with the shape of one sample written into it does not; then
a batch is computed one sample after the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quark.features.finetuning.descent import descent
from quark.features.finetuning.learned_weights import LearnedWeights, RoundedWeights, TrainedWeights
from quark.features.finetuning.options import ROWS_OF_A_SAMPLE, Algorithm, FitOptions
from quark.features.finetuning.problem import Array, Fitted, WeightLayout
from quark.features.finetuning.quantizers import Quantizer, quantizer_of, rounding_change, straight_through, tensor_of
from quark.features.finetuning.torch_fit import LITTLE_WORK, threads_kept
from quark.features.finetuning.training import BIAS_SHARE, LEAST_GAIN, learning_rate, neighbours, train
from quark.plan import Choice
from quark.text import get_logger

_LOG = get_logger(__name__)

TOGETHER = 8  # samples that are looked at together
LOUDNESS_SAMPLES = 64  # samples for measuring the error of rounding to nearest
_SAME = 0.01  # relative: a batch that differs so little only rounds differently here and there

Pair = tuple[torch.Tensor, torch.Tensor | None]  # the weight of a layer, and its bias if that is trained
Weights = Sequence[Pair]
Network = Callable[[torch.Tensor, Weights], tuple[torch.Tensor, list[torch.Tensor]]]


@dataclass(frozen=True, eq=False)
class BlockLayer:
    """A layer as it stands, and how its weight and its bias are rounded (None: not). `start` is as in `Problem`."""

    name: str
    weight: Array
    layout: WeightLayout
    bias: Array | None
    weight_choice: Choice
    bias_choice: Choice | None = None
    can_train_bias: bool = True
    start: Array | None = None


@dataclass(frozen=True, eq=False)
class BlockProblem:
    """`network` computes the block's output, and the output of each layer, from an input and the layers' weights.
    `inputs` are the quantized network's, `outputs` the float network's, `float_inputs` its inputs if they are wanted;
    samples whose number is in `held_out` are not trained on. `output_choice` is how the block's output is rounded."""

    name: str
    layers: tuple[BlockLayer, ...]
    network: Network
    inputs: Sequence[Array]
    outputs: Sequence[Array]
    held_out: frozenset[int]
    float_inputs: Sequence[Array] | None = None
    output_choice: Choice | None = None

    @property
    def training(self) -> list[int]:
        return [number for number in range(len(self.inputs)) if number not in self.held_out]


def fit_block(problem: BlockProblem, options: FitOptions) -> list[Fitted]:
    """Find for each layer the weights that bring the block closest to its targets; None if those that are there are
    better. The errors of all of them are the block's, and the learning rate is that of the layer."""
    with torch.no_grad(), threads_kept():
        return _BlockFit(problem, options).run()


@dataclass(frozen=True, eq=False)
class _Batch:
    """`count` samples; `floats` are their inputs in the float network, if they are wanted."""

    inputs: torch.Tensor
    targets: torch.Tensor
    floats: torch.Tensor | None
    count: int


class _Samples:
    """The samples on the device that trains, and the error of the block's outputs."""

    def __init__(self, problem: BlockProblem, device: torch.device, *, has_output_rounding: bool) -> None:
        self._problem, self._device = problem, device
        self._choice = problem.output_choice if has_output_rounding else None
        self._roundings: dict[torch.Size, Quantizer] = {}
        self._can_stack = False

    def find_batching(self, weights: Weights) -> None:
        """Try whether two samples can be computed as one batch."""
        numbers = self._problem.training[:2]
        if len(numbers) < 2:
            return
        first, second = (tensor_of(self._problem.inputs[number], self._device) for number in numbers)
        if first.shape != second.shape or first.dim() < 2:
            return
        expected = torch.cat([self._problem.network(sample, weights)[0] for sample in (first, second)])
        try:
            both = self._problem.network(torch.cat([first, second]), weights)[0]
        except RuntimeError:  # the shape of one sample does not fit two
            return
        if both.shape == expected.shape and both.dim() >= 2:
            self._can_stack = float((both - expected).norm()) <= _SAME * float(expected.norm())

    def batches(self, numbers: Sequence[int], size: int, *, has_float: bool = False) -> Iterator[_Batch]:
        """Up to `size` samples at once."""
        problem = self._problem
        floats = problem.float_inputs if has_float else None
        step = size if self._can_stack else 1
        for start in range(0, len(numbers), step):
            chosen = numbers[start : start + step]
            inputs = {number: problem.inputs[number] for number in chosen}
            is_uniform = len({array.shape for array in inputs.values()}) == 1
            for together in [chosen] if is_uniform else [[number] for number in chosen]:
                yield _Batch(
                    self._stacked([inputs[number] for number in together]),
                    self._stacked([problem.outputs[number] for number in together]),
                    None if floats is None else self._stacked([floats[number] for number in together]),
                    len(together),
                )

    def error(self, inputs: torch.Tensor, targets: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The difference of the output from its target."""
        outputs = self._problem.network(inputs, weights)[0]
        if self._choice is not None:
            shape = outputs.shape
            if shape not in self._roundings:
                self._roundings[shape] = quantizer_of(self._choice, tuple(shape), self._device)
            outputs = straight_through(outputs, self._roundings[shape])
        return outputs - targets

    def squared(self, numbers: Sequence[int], weights: Weights) -> tuple[float, float, int]:
        """Sums over these samples: of the squared error and of the squared targets, and the count of numbers."""
        total, power, count = 0.0, 0.0, 0
        for batch in self.batches(numbers, TOGETHER):
            total += float(self.error(batch.inputs, batch.targets, weights).square().sum(dtype=torch.float64))
            power += float(batch.targets.square().sum(dtype=torch.float64))
            count += batch.targets.numel()
        return total, power, count

    def layer_outputs(self, weights: Weights) -> list[torch.Tensor]:
        """The output of each layer for one sample."""
        inputs = tensor_of(self._problem.inputs[self._problem.training[0]], self._device)
        return self._problem.network(inputs, weights)[1]

    def _stacked(self, arrays: Sequence[Array]) -> torch.Tensor:
        return tensor_of(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), self._device)


class _Batches:
    """The samples of each iteration: all of them in an order that the seed decides, then again in another."""

    def __init__(self, problem: BlockProblem, samples: _Samples, options: FitOptions, device: torch.device) -> None:
        self._numbers, self._samples = problem.training, samples
        self._size = max(1, min(options.batch_rows // ROWS_OF_A_SAMPLE, len(self._numbers)))
        wanted = len(self._numbers) if options.batches <= 0 else self._size * options.batches
        self._wanted = min(wanted, len(self._numbers))
        self._order: list[int] = []
        self._shuffle = np.random.default_rng(options.seed)
        self._drop_ratio = options.drop_ratio if problem.float_inputs is not None else 1.0
        self._chance = torch.Generator(device=device).manual_seed(options.seed)

    def descend(self, leaves: Weights) -> torch.Tensor:
        """Give the leaves the gradient of the mean squared error of the next samples, which is returned."""
        while len(self._order) < self._wanted:
            self._order += [self._numbers[i] for i in self._shuffle.permutation(len(self._numbers))]
        numbers, self._order = self._order[: self._wanted], self._order[self._wanted :]
        total = torch.zeros((), device=leaves[0][0].device)
        for batch in self._samples.batches(numbers, self._size, has_float=self._drop_ratio < 1):
            inputs = batch.inputs
            if batch.floats is not None:
                chance = torch.rand(inputs.shape, generator=self._chance, device=inputs.device)
                inputs = torch.where(chance < self._drop_ratio, inputs, batch.floats)
            with torch.enable_grad():
                error = self._samples.error(inputs, batch.targets, leaves)
                loss = error.square().mean() * (batch.count / len(numbers))
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total


class _Layer:
    """A layer of the block on its device."""

    def __init__(self, layer: BlockLayer, options: FitOptions) -> None:
        device = torch.device(options.device)
        self.layer, self.options = layer, options
        self.weight = tensor_of(layer.weight, device)
        self.start = self.weight if layer.start is None else tensor_of(layer.start, device)
        self.quantizer = quantizer_of(layer.weight_choice, tuple(layer.weight.shape), device)
        self.bias: torch.Tensor | None = None
        self._bias_quantizer: Quantizer | None = None
        if options.has_bias and layer.can_train_bias and layer.bias is not None:
            self.bias = tensor_of(layer.bias, device).reshape(-1)
            if layer.bias_choice is not None:
                self._bias_quantizer = quantizer_of(layer.bias_choice, tuple(self.bias.shape), device)

    def rounded_bias(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return bias if bias is None or self._bias_quantizer is None else self._bias_quantizer.values(bias)


class _Training:
    """A state and a bias for each layer, and what moves them. `rates` and `spreads` are the learning rate and the RMS
    output of each layer."""

    def __init__(self, layers: list[_Layer], loudness: float, rates: tuple[float, ...], spreads: list[float]) -> None:
        self._layers = layers
        self.states = [_state(layer, loudness) for layer in layers]
        self.biases = [None if layer.bias is None else layer.bias.clone() for layer in layers]
        self._descents = []
        for layer, state, bias, rate, spread in zip(layers, self.states, self.biases, rates, spreads, strict=True):
            is_adaquant = layer.options.algorithm is Algorithm.ADAQUANT
            self._descents.append(descent(state, bias, (rate, rate if is_adaquant else BIAS_SHARE * (spread or 1.0))))

    def is_decided(self) -> bool:
        return all(state.is_decided() for state in self.states)

    def leaves(self) -> list[Pair]:
        """Weights and biases that the loss is computed with, and whose gradients are wanted."""
        pairs: list[Pair] = []
        for layer, own, bias in zip(self._layers, self._descents, self.biases, strict=True):
            seen = None if bias is None else layer.rounded_bias(bias.clone())
            pairs.append((own.soft().detach().requires_grad_(), None if seen is None else seen.requires_grad_()))
        return pairs

    def rounded(self) -> Weights:
        pairs = zip(self._layers, self.states, self.biases, strict=True)
        return [(state.rounded(), layer.rounded_bias(bias)) for layer, state, bias in pairs]

    def hard(self) -> list[Pair]:
        pairs = zip(self.states, self.biases, strict=True)
        return [(state.hard().clone(), None if bias is None else bias.clone()) for state, bias in pairs]

    def step(self, leaves: Weights, progress: float) -> None:
        """Move by the gradients of the leaves."""
        for own, (weight, bias) in zip(self._descents, leaves, strict=True):
            own.step(_gradient(weight), None if bias is None else _gradient(bias), progress)


def _state(layer: _Layer, loudness: float) -> LearnedWeights:
    if layer.options.algorithm is Algorithm.ADAQUANT:
        return TrainedWeights(layer.start, layer.quantizer)
    pair = neighbours(layer.start.cpu().numpy(), layer.layer.weight_choice)
    lower, upper = (tensor_of(array, layer.start.device) for array in pair)
    return RoundedWeights(layer.start, lower, upper, torch.full_like(lower, loudness), layer.options)


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


class _BlockFit:
    def __init__(self, problem: BlockProblem, options: FitOptions) -> None:
        self._problem, self._options = problem, options
        self._device = torch.device(options.device)
        self._layers = [_Layer(layer, options) for layer in problem.layers]
        self._samples = _Samples(problem, self._device, has_output_rounding=options.has_output_rounding)
        self._best: list[Pair] | None = None  # None: the weights as they stand
        self._error = math.inf

    def run(self) -> list[Fitted]:
        numbers, options = self._problem.training, self._options
        if not numbers:
            return self._results(0.0, 0.0, 0, (0.0,) * len(self._layers), "is computed for one sample only")
        standing: Weights = [
            (layer.quantizer.values(layer.weight), layer.rounded_bias(layer.bias)) for layer in self._layers
        ]
        self._samples.find_batching(standing)
        before, power, _ = self._samples.squared(sorted(self._problem.held_out), standing)
        power = power or 1.0
        rates = tuple(
            learning_rate(options, before / power, functools.partial(rounding_change, layer.start, layer.quantizer))
            for layer in self._layers
        )
        if not options.iterations or not math.isfinite(before):
            remark = "" if math.isfinite(before) else "is not finite"
            return self._results(before / power, before / power, 0, rates, remark)
        outputs = self._samples.layer_outputs(standing)
        sizes = [layer.layer.layout.matrices for layer in self._layers]
        work = sum(output.numel() * length for output, (_, _, length) in zip(outputs, sizes, strict=True))
        if work * max(1, options.batch_rows // ROWS_OF_A_SAMPLE) < LITTLE_WORK:
            torch.set_num_threads(1)
        total, _, count = self._samples.squared(numbers[:: max(1, len(numbers) // LOUDNESS_SAMPLES)], standing)
        loudness = total / max(1, count) / sum(groups * per_group for groups, per_group, _ in sizes)
        spreads = [float(output.square().mean().sqrt()) for output in outputs]
        self._error = before
        iterations = self._train(_Training(self._layers, loudness, rates, spreads))
        return self._results(before / power, self._error / power, iterations, rates)

    def _train(self, training: _Training) -> int:
        """Returns the number of iterations."""
        batches = _Batches(self._problem, self._samples, self._options, self._device)
        held_out = sorted(self._problem.held_out)

        def advance(start: int, end: int) -> None:
            for iteration in range(start, end):
                leaves = training.leaves()
                loss = batches.descend(leaves)
                training.step(leaves, iteration / self._options.iterations)
                if (iteration + 1) % self._options.log_period == 0:
                    _LOG.debug("%s: iteration %d, loss %.6g", self._problem.name, iteration + 1, float(loss))

        def look() -> bool:
            """Keep what is better; returns True if it is better by enough to go on."""
            error = self._samples.squared(held_out, training.rounded())[0]
            if not error < self._error:
                return False
            has_gained = error < self._error * (1 - LEAST_GAIN)
            self._best, self._error = training.hard(), error
            return has_gained

        is_decided_late = training.states[0].is_decided_late
        return train(self._options, advance, look, training.is_decided if is_decided_late else None)

    def _results(
        self, before: float, after: float, iterations: int, rates: tuple[float, ...], remark: str = ""
    ) -> list[Fitted]:
        arrays: list[list[Array | None]] = [[None, None] for _ in self._layers]
        if self._best is not None:
            arrays = [[None if tensor is None else tensor.cpu().numpy() for tensor in pair] for pair in self._best]
        return [
            Fitted(weight, bias, before, after, iterations, rate, remark)
            for (weight, bias), rate in zip(arrays, rates, strict=True)
        ]
