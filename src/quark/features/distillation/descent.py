"""One step of training: gradients, Adam and the running average, on a GPU recorded once and replayed.

A step of a convolutional network is thousands of small kernels, and launching them from Python takes longer than
running them. After a few ordinary steps, one is captured as a CUDA graph. Whatever changes from step to step is in
tensors: the batch, the pace of the learning rate, and the share of the new weights in their average. If a network
cannot be captured, such as one that reads numbers from the GPU to compute shapes, its steps stay ordinary ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from quark.errors import ModelError
from quark.text import get_logger

_LOG = get_logger(__name__)

MEAN_DECAY, SQUARE_DECAY, EPSILON = 0.9, 0.999, 1e-8  # Adam's
LARGEST_GRADIENT = 1.0  # norm of the gradients of all parameters together
ORDINARY_STEPS = 3  # before the capture; in these, kernels are compiled and chosen

Tensors = dict[str, torch.Tensor]
Loss = Callable[[Tensors], torch.Tensor]


class Descent:
    """Trains `parameters` with a learning rate each. `loss` of a batch must not depend on anything else, except for
    random numbers of `chance`."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        rates: Mapping[str, float],
        loss: Loss,
        chance: torch.Generator | None = None,
    ) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._rates = [rates[name] for name in self._names]
        self._loss, self._chance = loss, chance
        self.reset()
        device = self._parameters[0].device
        self._pace, self._share = (torch.zeros((), device=device) for _ in range(2))
        self._total = torch.zeros((), device=device)  # sum of the losses since they were last read
        self._count = 0
        self._batch: Tensors = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._ordinary_left = ORDINARY_STEPS if device.type == "cuda" else -1

    def reset(self) -> None:
        """Start again from the present parameters, without moments or an average of earlier steps."""
        self._mean = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._square = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._average = [parameter.detach().clone() for parameter in self._parameters]

    @property
    def average(self) -> Tensors:
        """The running average of the parameters."""
        return dict(zip(self._names, self._average, strict=True))

    def read_loss(self) -> float:
        """The mean loss since this was last called."""
        loss = float(self._total) / max(1, self._count)
        self._total.zero_()
        self._count = 0
        return loss

    def step(self, batches: Sequence[tuple[Tensors, float]], number: int, pace: float, share: float) -> None:
        """Train on batches, each with its share in the loss. `number` counts steps from 1. `pace` multiplies all
        learning rates, and `share` is that of the new weights in the average."""
        # the correction of Adam's means for their start at 0
        pace *= math.sqrt(1 - SQUARE_DECAY**number) / (1 - MEAN_DECAY**number)
        self._pace.fill_(pace)
        self._share.fill_(share)
        self._count += 1
        if len(batches) == 1 and self._ordinary_left == 0:
            self._capture(batches[0][0])
        if self._graph is not None and len(batches) == 1 and self._is_like_captured(batches[0][0]):
            for name, x in batches[0][0].items():
                self._batch[name].copy_(x)
            self._graph.replay()
            return
        with fastest_convolutions(is_on=self._ordinary_left > 0):
            self._train(batches)
        self._ordinary_left -= 1

    def _train(self, batches: Sequence[tuple[Tensors, float]]) -> None:
        gradients: list[torch.Tensor] = []
        for batch, part in batches:
            loss = self._loss(batch) * part
            parameter_gradients: Sequence[torch.Tensor] = torch.autograd.grad(
                loss, self._parameters, allow_unused=True, materialize_grads=True
            )
            parameter_gradients = [
                gradient.contiguous() for gradient in parameter_gradients
            ]  # in the memory order of the parameters
            if gradients:
                torch._foreach_add_(gradients, parameter_gradients)
            else:
                gradients = parameter_gradients
            self._total.add_(loss.detach())
        self._move(gradients)

    @torch.no_grad()
    def _move(self, gradients: list[torch.Tensor]) -> None:
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        torch._foreach_mul_(gradients, (LARGEST_GRADIENT / (norm + 1e-6)).clamp(max=1.0))
        torch._foreach_lerp_(self._mean, gradients, 1 - MEAN_DECAY)
        torch._foreach_mul_(self._square, SQUARE_DECAY)
        torch._foreach_addcmul_(self._square, gradients, gradients, 1 - SQUARE_DECAY)
        size = torch._foreach_sqrt(self._square)
        torch._foreach_add_(size, EPSILON)
        change = torch._foreach_div(self._mean, size)
        torch._foreach_mul_(change, self._rates)
        torch._foreach_mul_(change, self._pace)
        torch._foreach_sub_(self._parameters, change)
        distance = torch._foreach_sub(self._parameters, self._average)
        torch._foreach_mul_(distance, self._share)
        torch._foreach_add_(self._average, distance)

    def _capture(self, batch: Tensors) -> None:
        """Record a step on a batch of this form; capturing computes nothing."""
        self._ordinary_left = -1
        self._batch = {name: x.clone() for name, x in batch.items()}
        graph = torch.cuda.CUDAGraph()
        if self._chance is not None:
            graph.register_generator_state(self._chance)  # every replay draws other numbers
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # a graph has memory of its own
            with fastest_convolutions(is_on=True), torch.cuda.graph(graph):
                self._train([(self._batch, 1.0)])
        except (RuntimeError, ModelError) as error:
            _LOG.info("steps are not replayed as a CUDA graph, which is slower: %s", error)
            return
        self._graph = graph

    def _is_like_captured(self, batch: Tensors) -> bool:
        """True if the captured step is for batches of these shapes."""
        return all(x.shape == self._batch[name].shape for name, x in batch.items())

    def state(self) -> dict[str, list[torch.Tensor]]:
        """The state that a run needs to resume, apart from the parameters."""
        return {"mean": self._mean, "square": self._square, "average": self._average}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Go on from there."""
        for name, own in self.state().items():
            for mine, theirs in zip(own, state[name], strict=True):
                mine.copy_(theirs)


@contextmanager
def fastest_convolutions(*, is_on: bool) -> Iterator[None]:
    """Measure which of cuDNN's convolutions are fastest, which takes seconds for each shape."""
    convolutions = torch.backends.cudnn
    before, convolutions.benchmark = convolutions.benchmark, is_on
    try:
        yield
    finally:
        convolutions.benchmark = before
