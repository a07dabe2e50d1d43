"""AdaRound: learn for each weight which of its two neighbours it takes (arXiv 2004.10568).

    W~ = lower + h(V) * (upper - lower),     h(V) = clip(1.2 * sigmoid(V) - 0.1, 0, 1),     h(V0) = where W lies

    loss = sum over outputs of error / error0 + lambda * sum of (1 - |2 h(V) - 1|^beta)

where error0 is what rounding to the nearest leaves, so that lambda means the same for loud and for quiet outputs.

beta falls from 20 to 2 along a half cosine, after a warm start without that second term, which drives h to 0 or 1. In
the end V >= 0 takes the upper neighbour. Neighbours are those of the format, be they codes, block elements or floats,
so that the numbers chosen are kept as they are when the model is written.
"""

from __future__ import annotations

import math

import torch

from quark.reconstruction.options import FitOptions

STRETCH, SHIFT = 1.2, -0.1
UNDECIDED = 0.02  # share of weights that may be


class RoundedWeights:
    """The state of AdaRound for one tensor; `loudness` is error0 of the output that a weight belongs to."""

    is_decided_late = True

    def __init__(
        self,
        weight: torch.Tensor,
        lower: torch.Tensor,
        upper: torch.Tensor,
        loudness: torch.Tensor,
        options: FitOptions,
    ) -> None:
        self._lower, self._upper, self._width = lower, upper, upper - lower
        self._sharpness = self._width / loudness.clamp(min=1e-30)
        self._options = options
        share = torch.where(self._width > 0, (weight - lower) / self._width.clamp(min=1e-38), 0.5).clamp_(0, 1)
        sigmoid = ((share - SHIFT) / STRETCH).clamp_(1e-6, 1 - 1e-6)
        self.parameter = torch.log(sigmoid / (1 - sigmoid))
        self._sigmoid = sigmoid
        self._share = share

    def soft(self) -> torch.Tensor:
        """The weights that the loss is computed with."""
        self._sigmoid = torch.sigmoid(self.parameter)
        self._share = (self._sigmoid * STRETCH + SHIFT).clamp_(0, 1)
        return torch.addcmul(self._lower, self._share, self._width)

    def gradient(self, of_weights: torch.Tensor, progress: float) -> torch.Tensor:
        """From the gradient of the weights that `soft` gave to that of the parameter."""
        total = of_weights * self._sharpness
        beta = self.beta(progress)
        if beta is not None:
            signed = self._share.mul(2).sub_(1)
            total.sub_(signed.abs().pow_(beta - 1).mul_(signed.sign_()), alpha=2 * self._options.regularization * beta)
        slope = (self._sigmoid * (1 - self._sigmoid)).mul_(STRETCH)
        is_free = (self._share > 0) & (self._share < 1)
        return total.mul_(slope).mul_(is_free)

    def beta(self, progress: float) -> float | None:
        """The exponent at that share of the iterations; None during the warm start."""
        start, end = self._options.beta_range
        if progress < self._options.warm_start:
            return None
        along = (progress - self._options.warm_start) / max(1e-9, 1 - self._options.warm_start)
        return end + 0.5 * (start - end) * (1 + math.cos(math.pi * min(along, 1.0)))

    def fading(self, progress: float) -> float:
        """What the learning rate is multiplied with."""
        return 1.0

    def is_decided(self) -> bool:
        """That nearly all weights are at one of their neighbours."""
        is_between = (self._share > 0.01) & (self._share < 0.99) & (self._width > 0)
        return float(is_between.float().mean()) < UNDECIDED

    def hard(self) -> torch.Tensor:
        """The weights as they will be: one neighbour or the other."""
        return torch.where(self.parameter >= 0, self._upper, self._lower)

    def rounded(self) -> torch.Tensor:
        return self.hard()
