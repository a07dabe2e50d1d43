"""The learning rate of a layer.

AdaQuant moves a weight by about the learning rate at every iteration. What fits is a share of what rounding changes
weights by, which differs a hundredfold between formats and between layers. AdaRound's parameter has no unit: one rate
fits all.
"""

from __future__ import annotations

import torch

from quark.reconstruction.options import Algorithm, FitOptions
from quark.reconstruction.quantizers import Quantizer

AUTO_SHARE = 0.06  # of the root mean square of what rounding to the nearest changes weights by
AUTO_ADAROUND = 0.03


def learning_rate(options: FitOptions, error: float, weight: torch.Tensor, quantizer: Quantizer) -> float:
    """`error` is relative, before training."""
    if options.lr_adjust is not None and error > options.lr_adjust[0]:
        return options.lr_adjust[1]
    if options.learning_rate is not None:
        return options.learning_rate
    if options.algorithm is Algorithm.ADAROUND:
        return AUTO_ADAROUND
    change = quantizer.values(weight) - weight
    return AUTO_SHARE * (float(change.square().mean().sqrt()) or 1e-5)
