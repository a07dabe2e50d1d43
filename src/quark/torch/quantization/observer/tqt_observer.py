"""Quantizers that learn their threshold (arXiv 1903.08066): scale = 2^ceil(log2 t) / 2^(b-1), 2^b where unsigned.

The class in a spec makes the threshold a parameter of the quantized model. By itself it gives the scale that training
would start from. `qat_spec=TQTSpec(threshold_init_meth=...)` says where that is; without it, weights start from their
largest magnitude and activations from the least divergence (KL-J), and the observer by itself from the former.
"""

from __future__ import annotations

import math

import numpy as np

from quark.torch.quantization.observer.observer import Parameters, PerTensorObserver, as_tensors
from quark.torch.specs import Algorithm

_SMALLEST_THRESHOLD = 2.0**-100  # of zeros: its scale is still a normal number


class TQTObserver(PerTensorObserver):
    """The starting threshold of a tensor, as a range that it reaches."""

    is_power_of_two = True
    algorithm = Algorithm.TQT

    @property
    def log_threshold(self) -> float:
        """log2 t for what was observed."""
        if not self._has_observed:
            raise self._nothing_observed()
        found = self._range()
        return math.log2(max(-found.lowest, found.highest, _SMALLEST_THRESHOLD))

    def calculate_qparams(self) -> Parameters:
        fmt = self._affine().format
        exponent = math.ceil(self.log_threshold) - (fmt.bits - 1 if fmt.signed else fmt.bits)
        return as_tensors(np.array([math.ldexp(1.0, exponent)]), np.zeros(1), self.device)
