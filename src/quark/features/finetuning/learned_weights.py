"""The learned parameters of a layer's weights.

AdaRound learns for each weight which of its two neighbours it takes (arXiv 2004.10568):

    W~ = lower + h(V) * (upper - lower),     h(V) = clip(1.2 * sigmoid(V) - 0.1, 0, 1),     h(V0) = where W lies

    loss = sum over outputs of error / error0 + lambda * sum of (1 - |2 h(V) - 1|^beta)

where error0 is what rounding to the nearest leaves, so that lambda means the same for loud and for quiet outputs. beta
falls from 20 to 2 along a half cosine, after a warm start without that second term, which drives h to 0 or 1. In the
end V >= 0 takes the upper neighbour. Neighbours are numbers of the format: codes, block elements or floats, so
that the numbers chosen are kept as they are when the model is written.

AdaQuant learns the weights themselves (arXiv 2006.10518). The output is computed with rounded weights, and its gradient
goes straight through the rounding, but not to weights beyond the range of fixed scales. Scales of blocks follow the
weights.
"""

from __future__ import annotations

import torch

from quark.features.finetuning.options import Algorithm, FitOptions
from quark.features.finetuning.quantizers import Quantizer
from quark.features.finetuning.training import SHIFT, STRETCH, UNDECIDED, beta, fading
from quark.formats.native import StepKind


class RoundedWeights:
    """The state of AdaRound for one tensor; `loudness` is error0 of the output that each weight belongs to."""

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
        self.regularization = options.regularization
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

    def gradient(self, of_weights: torch.Tensor, beta: float | torch.Tensor | None) -> torch.Tensor:
        """The gradient of the parameter, from that of the weights that `soft` returned."""
        total = of_weights * self._sharpness
        if beta is not None:
            signed = self._share.mul(2).sub_(1)
            push = signed.abs().pow_(beta - 1).mul_(signed.sign_())
            total.sub_(push.mul_(2 * self._options.regularization * beta))
        slope = (self._sigmoid * (1 - self._sigmoid)).mul_(STRETCH)
        is_free = (self._share > 0) & (self._share < 1)
        return total.mul_(slope).mul_(is_free)

    def beta(self, progress: float) -> float | None:
        """The exponent at that share of the iterations; None during the warm start."""
        return beta(self._options, progress)

    def fading(self, progress: float) -> float:
        """The factor of the learning rate."""
        return fading(Algorithm.ADAROUND, progress)

    def is_decided(self) -> bool:
        """True if nearly all weights are at one of their neighbours."""
        return self.undecided() < UNDECIDED * self.parameter.numel()

    def undecided(self) -> int:
        """The number of weights that are between their neighbours."""
        share = (torch.sigmoid(self.parameter) * STRETCH + SHIFT).clamp_(0, 1)
        return int(((share > 0.01) & (share < 0.99) & (self._width > 0)).sum())

    def fused(self) -> tuple[StepKind, tuple[torch.Tensor, ...]]:
        """The arguments of the compiled code apart from the parameter."""
        return StepKind.ADAROUND, (self._lower, self._width, self._sharpness)

    def hard(self) -> torch.Tensor:
        """The weights as they will be: one neighbour or the other."""
        return torch.where(self.parameter >= 0, self._upper, self._lower)

    def rounded(self) -> torch.Tensor:
        return self.hard()


# AdaQuant: learn the weights themselves (arXiv 2006.10518).
#
# The output is computed with rounded weights, and its gradient goes straight through the rounding, but not to weights
# that lie beyond the range of fixed scales. Scales of blocks follow the weights.


class TrainedWeights:
    """The state of AdaQuant for one tensor."""

    is_decided_late = False
    regularization = 0.0

    def __init__(self, weight: torch.Tensor, quantizer: Quantizer) -> None:
        self.parameter = weight.clone()
        self._quantizer = quantizer

    def soft(self) -> torch.Tensor:
        """The weights that the loss is computed with."""
        return self._quantizer.values(self.parameter)

    def gradient(self, of_weights: torch.Tensor, beta: float | torch.Tensor | None) -> torch.Tensor:
        mask = self._quantizer.passes(self.parameter)
        return of_weights if mask is None else of_weights * mask

    def fading(self, progress: float) -> float:
        """The factor of the learning rate."""
        return fading(Algorithm.ADAQUANT, progress)

    def is_decided(self) -> bool:
        return False

    def undecided(self) -> int:
        return self.parameter.numel()

    def beta(self, progress: float) -> float | None:
        """There is no regularization."""
        return None

    def fused(self) -> tuple[StepKind, tuple[torch.Tensor, ...]]:
        """The arguments of the compiled code apart from the parameter: none if it does not round by itself."""
        numbers = self._quantizer.affine_numbers(self.parameter)
        return (StepKind.PLAIN, ()) if numbers is None else (StepKind.AFFINE, numbers)

    def hard(self) -> torch.Tensor:
        """The weights as they will be, before they are rounded."""
        return self.parameter

    def rounded(self) -> torch.Tensor:
        return self._quantizer.values(self.parameter)


LearnedWeights = RoundedWeights | TrainedWeights
