"""Quantizers that learn their step (arXiv 1902.08153), from s = 2 * mean|v| / sqrt(Qp), Qp being the highest code.

The class in a spec makes the step a parameter of the quantized model. By itself it gives the step of that formula.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from quark.ranges.statistics import as_float32, extremes
from quark.torch.quantization.config.type import QSchemeType
from quark.torch.quantization.observer.observer import ObserverBase, Parameters, as_tensors
from quark.torch.specs import Algorithm


class LSQObserver(ObserverBase):
    """The mean magnitude of a tensor, or of each channel of `ch_axis`."""

    schemes = (QSchemeType.per_tensor, QSchemeType.per_channel)
    algorithm = Algorithm.LSQ

    def reset_state(self) -> None:
        self._sum = np.zeros(1)
        self._count = 0

    def observe(self, x: torch.Tensor) -> None:
        axis = self._affine().axis
        extremes(as_float32(x))  # which refuses NaN and Inf
        magnitudes = as_float32(x).reshape(x.shape).astype(np.float64)
        np.abs(magnitudes, out=magnitudes)
        whole = magnitudes[None] if axis is None else np.moveaxis(magnitudes, axis, 0)
        rows = whole.reshape(len(whole), -1)
        self._sum = self._sum + rows.sum(axis=1)
        self._count += rows.shape[1]

    def calculate_qparams(self) -> Parameters:
        if not self._count:
            raise self._nothing_observed()
        scale = 2 * self._sum / self._count / math.sqrt(self._affine().format.qmax)
        scale = np.maximum(scale, np.finfo(np.float32).tiny)
        return as_tensors(scale, np.zeros(scale.shape), self.device)
