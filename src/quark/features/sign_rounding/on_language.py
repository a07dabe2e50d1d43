"""Learned rounding of a decoder layer, by signed gradient descent on the difference of its outputs from float."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quark.account import AlgorithmFacts
from quark.features.sign_rounding.learned import LearnedWeight, learned_weight
from quark.features.sign_rounding.options import SignRoundingOptions
from quark.plan import SkippedNode
from quark.torch.language.architecture import check_inside, is_inside
from quark.torch.language.linear import QuantizedLinear
from quark.torch.language.pipeline import Head, LayerWork, ModelWork
from quark.torch.language.streams import Call, rows

NAME = "learned rounding"


def before_layers(work: ModelWork, options: SignRoundingOptions) -> list[AlgorithmFacts]:
    """Check the names of modules."""
    check_inside(work.model, work.architecture, options.modules)
    return []


def round_weights(work: LayerWork, options: SignRoundingOptions) -> list[AlgorithmFacts]:
    """Learn how to round the weights of a decoder layer; it is kept if it is better than rounding to nearest."""
    wanted = [path for path in work.targets if is_inside(path, options.modules) and path not in work.is_rounded]
    wanted = [path for path in wanted if work.targets[path].weight is not None]
    if not wanted or isinstance(work.layer, Head):
        return []
    if work.streams is None:
        reason = "there is no calibration data"
        return [AlgorithmFacts(NAME, (), tuple(SkippedNode(work.full_name(p), "Linear", reason) for p in wanted))]
    tuning = _Tuning(work, wanted, options)
    if not tuning.weights:
        reason = "its type has no rounding that could be learned"
        return [AlgorithmFacts(NAME, (), tuple(SkippedNode(work.full_name(p), "Linear", reason) for p in wanted))]
    before, after = tuning.run()
    for path, learned in tuning.weights.items():
        work.set_rounded(path, learned.result())
    if after >= before:
        return [AlgorithmFacts(NAME, (), (SkippedNode(work.path, "", "rounding to nearest was not improved"),))]
    return [AlgorithmFacts(NAME, (f"{work.path}: squared error {after / before:.3g} of what it was",))]


class _Learning(nn.Module):
    """A linear layer in place of the one whose rounding is learned."""

    def __init__(self, linear: nn.Linear | QuantizedLinear, weight: LearnedWeight, quantizer: nn.Module | None) -> None:
        super().__init__()
        self.learned, self.bias = weight, linear.bias
        self.rotation = getattr(linear, "rotation", None)
        self.quantizer = quantizer
        self.dtype = linear.weight.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.rotation is None else self.rotation(x)
        x = x if self.quantizer is None else self.quantizer(x)
        return nn.functional.linear(x, self.learned().to(self.dtype), self.bias)


class _Tuning:
    def __init__(self, work: LayerWork, paths: list[str], options: SignRoundingOptions) -> None:
        self.work, self.options = work, options
        self.weights: dict[str, LearnedWeight] = {}
        for path in paths:
            spec = work.targets[path].weight
            assert spec is not None
            weight = learned_weight(work.linear(path).weight, spec, has_clipping=options.has_clipping)
            if weight is not None:
                self.weights[path] = weight
        streams = work.streams
        assert streams is not None
        assert streams.exact is not None
        assert work.exact_layer is not None
        self.inputs, self.kept = streams.seen, streams.kept
        pairs = zip(work.calls, streams.exact, strict=True)
        self.targets = [call.run(work.exact_layer, hidden) for call, hidden in pairs]

    def run(self) -> tuple[float, float]:
        """Learn, and return the error before and after. The layer is as before then; `weights` have been learned."""
        standing = {path: self.work.layer.get_submodule(path) for path in self.weights}
        try:
            for path, learned in self.weights.items():
                quantizer = self.work.input_quantizers.get(path)
                self.work.layer.set_submodule(path, _Learning(self.work.linear(path), learned, quantizer))
            before = self._error()
            start = self._state()
            self._descend()
            after = self._error()
            if after >= before:
                self._restore(start)
        finally:
            for path, module in standing.items():
                self.work.layer.set_submodule(path, module)
        return before, after

    def _descend(self) -> None:
        offsets = [weight.offsets for weight in self.weights.values()]
        clips = [clip for learned in self.weights.values() for clip in learned.clips]
        best, least = self._state(), float("inf")
        for step, numbers in enumerate(self._batches()):
            loss = sum(self._loss(number) for number in numbers)
            assert isinstance(loss, torch.Tensor)
            current_loss = float(loss.detach())
            if current_loss < least:
                best, least = self._state(), current_loss
            gradients = torch.autograd.grad(loss, [*offsets, *clips], allow_unused=True)
            share = 1 - step / self.options.steps
            rates = [self.options.rate] * len(offsets) + [self.options.clip_rate] * len(clips)
            with torch.no_grad():
                for parameter, gradient, rate in zip([*offsets, *clips], gradients, rates, strict=True):
                    if gradient is not None:
                        parameter.sub_(gradient.sign(), alpha=rate * share)
            for learned in self.weights.values():
                learned.limit()
        self._restore(best)

    def _batches(self) -> Iterator[list[int]]:
        """For every step, the batches that it uses; all have had their turn before one has it again."""
        generator = torch.Generator().manual_seed(self.work.settings.seed)
        count = len(self.inputs)
        size = min(self.options.batch_size, count)
        left: list[int] = []
        for _ in range(self.options.steps):
            if len(left) < size:
                left = torch.randperm(count, generator=generator).tolist()
            yield left[:size]
            left = left[size:]

    def _loss(self, number: int) -> torch.Tensor:
        call: Call = self.work.calls[number]
        with torch.enable_grad():
            output = self.work.layer(self.inputs[number], *call.args, **call.kwargs)
            output = output[0] if isinstance(output, tuple) else output
            kept = self.kept[number]
            difference = rows(output, kept).float() - rows(self.targets[number], kept).float()
            return difference.square().mean()

    def _error(self) -> float:
        with torch.no_grad():
            return sum(float(self._loss(number).detach()) for number in range(len(self.inputs)))

    def _state(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for learned in self.weights.values() for parameter in learned.parameters()]

    def _restore(self, state: list[torch.Tensor]) -> None:
        parameters = [parameter for learned in self.weights.values() for parameter in learned.parameters()]
        with torch.no_grad():
            for parameter, value in zip(parameters, state, strict=True):
                parameter.copy_(value)
