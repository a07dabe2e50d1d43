"""Cosine, SQNR, agreement and largest error of two tensors as a whole.

    cosine     of the angle between the two outputs, over all samples; 1 is the same direction
    sqnr       signal to noise: 10 log10(sum y^2 / sum (y - y_hat)^2), in decibels; 6 dB are one bit
    agreement  for outputs of shape [n, classes]: the share of samples with the same largest class

Outputs that hold NaN or Inf where the float network has none have cosine 0 and sqnr -inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.fidelity.verdict import OutputFidelity

Array = NDArray[Any]


@dataclass
class FidelityMeter:
    """Gathers pairs of outputs, sample by sample, in constant memory.

    >>> meter = FidelityMeter("y")
    >>> meter.add(np.array([[1.0, 2.0]]), np.array([[1.0, 2.1]]))
    >>> round(meter.result().sqnr_db, 1), meter.result().agreement
    (27.0, 1.0)
    """

    name: str
    _dot: float = 0.0
    _float_square: float = 0.0
    _quantized_square: float = 0.0
    _error_square: float = 0.0
    _max_error: float = 0.0
    _is_broken: bool = False
    _agreeing: int = 0
    _rows: int = 0
    _has_classes: bool = field(default=True)

    def add(self, expected: Array, actual: Array) -> None:
        """Add one sample or batch: the outputs of the float network and of the quantized one."""
        y, z = expected.astype(np.float64), actual.astype(np.float64)
        self._count_classes(y, z)
        if not (np.isfinite(y).all() and np.isfinite(z).all()):
            usable = np.isfinite(y)
            y, z = np.where(usable, y, 0.0), np.where(usable, z, 0.0)
            if not np.isfinite(z).all():
                self._is_broken = True
                return
        y, z = y.reshape(-1), z.reshape(-1)
        self._dot += float(y @ z)
        self._float_square += float(y @ y)
        self._quantized_square += float(z @ z)
        error = z - y
        self._error_square += float(error @ error)
        self._max_error = max(self._max_error, float(np.abs(error).max(initial=0.0)))

    def result(self) -> OutputFidelity:
        if self._is_broken:
            return OutputFidelity(self.name, 0.0, -math.inf, 0.0 if self._has_classes else None, math.inf)
        norm = math.sqrt(self._float_square) * math.sqrt(self._quantized_square)
        is_equal = self._error_square == 0.0
        cosine = self._dot / norm if norm > 0 else float(is_equal)
        agreement = self._agreeing / self._rows if self._has_classes and self._rows else None
        return OutputFidelity(self.name, min(cosine, 1.0), self._sqnr(), agreement, self._max_error)

    def _sqnr(self) -> float:
        if self._error_square == 0.0:
            return math.inf
        if self._float_square == 0.0:
            return -math.inf
        return 10.0 * math.log10(self._float_square / self._error_square)

    def _count_classes(self, y: Array, z: Array) -> None:
        if y.ndim != 2 or y.shape[1] < 2:
            self._has_classes = False
            return
        self._agreeing += int((y.argmax(1) == z.argmax(1)).sum())
        self._rows += len(y)


def outputs_without_numbers(samples: Iterable[Mapping[str, Array]]) -> list[str]:
    """The outputs of a float network that are NaN or Inf throughout, by name: there is nothing to compare them with.

    >>> outputs_without_numbers([{"y": np.array([np.nan, 1.0]), "z": np.array([np.inf])}])
    ['z']
    """
    has_numbers: dict[str, bool] = {}
    for sample in samples:
        for name, value in sample.items():
            if value.dtype.kind == "f" and value.size:
                has_numbers[name] = has_numbers.get(name, False) or bool(np.isfinite(value).any())
    return [name for name, is_usable in has_numbers.items() if not is_usable]


def numberless_remark(output: str) -> str:
    """The remark about an output that is not compared because the float network gives no numbers there."""
    return (
        f"output '{output}' of the float model is NaN or Inf for every sample that was looked at, so that there is "
        "nothing to compare with: run the float model on your data first"
    )
