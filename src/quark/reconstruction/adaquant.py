"""AdaQuant: learn the weights themselves (arXiv 2006.10518).

The output is computed with rounded weights, and its gradient goes straight through the rounding, but not to weights
that lie beyond the range of fixed scales. Scales of blocks follow the weights.
"""

from __future__ import annotations

import math

import torch

from quark.reconstruction.quantizers import Quantizer


class TrainedWeights:
    """The state of AdaQuant for one tensor."""

    is_decided_late = False

    def __init__(self, weight: torch.Tensor, quantizer: Quantizer) -> None:
        self.parameter = weight.clone()
        self._quantizer = quantizer

    def soft(self) -> torch.Tensor:
        """The weights that the loss is computed with."""
        return self._quantizer.values(self.parameter)

    def gradient(self, of_weights: torch.Tensor, progress: float) -> torch.Tensor:
        mask = self._quantizer.passes(self.parameter)
        return of_weights if mask is None else of_weights * mask

    def fading(self, progress: float) -> float:
        """What the learning rate is multiplied with: half a cosine."""
        return 0.5 * (1 + math.cos(math.pi * progress))

    def is_decided(self) -> bool:
        return False

    def hard(self) -> torch.Tensor:
        """The weights as they will be, before they are rounded."""
        return self.parameter

    def rounded(self) -> torch.Tensor:
        return self._quantizer.values(self.parameter)
