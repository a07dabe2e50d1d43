"""How far outputs are from the float network's, as one number: to rank many networks that differ by little.

What the outputs are is decided once, from the float network's values. Each network to rank then has a meter of its own,
which keeps a few sums for each sample. The distance is the sum over the parts of all outputs. A part of one row of
classes has the divergence of its predictions, sum p log(p / q), and any other the distance of its kind: the squared
error as a share of the power for most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.fidelity.kinds import ClassesMeter, IdsMeter, PartMeter
from quark.fidelity.parts import find_parts

Array = NDArray[Any]
Sample = Mapping[str, Array]

FIRST_BYTES = 256 << 20  # of samples that decide what the outputs are
KL, DISTANCE = "kl", "distance"


class DistanceMeter:
    """Gathers the outputs of a float network and of one that is ranked, sample by sample.

    `expected` are outputs of the float network that say what the outputs are; they are not counted as samples. Each is
    one sample, or a batch of as many as `counts` says.

    >>> exact = {"y": np.array([[0.5, 2.0, -1.0]])}
    >>> meter = DistanceMeter([exact])
    >>> meter.add(exact, exact)
    >>> meter.distance
    0.0
    """

    _template: list[PartMeter]
    _parts: list[PartMeter]
    _seen: list[int]  # samples that each part has measured
    _values: list[list[float]]  # distances of samples that are measured here
    _is_broken: bool

    def __init__(self, expected: Sequence[Sample], counts: Sequence[int] | None = None) -> None:
        rows: list[Sample] = []
        taken = 0
        for sample, count in zip(expected, counts or [1] * len(expected), strict=True):
            if taken and taken + sum(array.nbytes for array in sample.values()) > FIRST_BYTES:
                break
            taken += sum(array.nbytes for array in sample.values())
            rows += [{name: _finite(array) for name, array in row.items()} for row in _rows(sample, count)]
        self._template = find_parts(rows, rows) if rows else []
        self._clear()

    @property
    def measure(self) -> str:
        """`kl` if all that is measured are predictions of classes, else `distance`."""
        is_kl = bool(self._template) and all(isinstance(part, ClassesMeter) for part in self._template)
        return KL if is_kl else DISTANCE

    @property
    def distance(self) -> float:
        """0 if the outputs are equal, infinite if the network gave numbers that are not finite."""
        if self._is_broken:
            return math.inf
        total = 0.0
        for part, seen, gathered in zip(self._parts, self._seen, self._values, strict=True):
            if isinstance(part, ClassesMeter) or not seen:
                values = gathered
            else:
                values = [*gathered, *[part.result().distance] * seen]
            total += sum(values) / len(values) if values else 0.0
        return total

    def fresh(self) -> DistanceMeter:
        """An empty meter for the same outputs."""
        meter = object.__new__(DistanceMeter)
        meter._template = self._template
        meter._clear()
        return meter

    def add(self, expected: Sample, actual: Sample, count: int = 1) -> None:
        """Add one sample, or a batch of `count` samples that lie along the first axis of every output."""
        for y, z in zip(_rows(expected, count), _rows(actual, count), strict=True):
            self._add_sample(y, z)

    def merge(self, later: DistanceMeter) -> None:
        """Add the samples of another meter behind those of this one."""
        self._is_broken |= later._is_broken
        for part, other in zip(self._parts, later._parts, strict=True):
            for name, gathered in vars(other).items():
                if isinstance(gathered, list):  # an entry for each sample
                    getattr(part, name).extend(gathered)
        self._seen = [mine + other for mine, other in zip(self._seen, later._seen, strict=True)]
        for mine, theirs in zip(self._values, later._values, strict=True):
            mine.extend(theirs)

    def _clear(self) -> None:
        self._parts = [deepcopy(part) for part in self._template]
        self._seen = [0] * len(self._parts)
        self._values = [[] for _ in self._parts]
        self._is_broken = False

    def _add_sample(self, expected: Sample, actual: Sample) -> None:
        y, z = {}, {}
        for name, array in expected.items():
            other = actual[name]
            if array is not other and array.dtype.kind == "f":
                usable = np.isfinite(array)
                if not usable.all():
                    array = np.where(usable, array, 0)
                    other = np.where(usable, other, 0) if other.shape == array.shape else other
                if not np.isfinite(other).all():
                    self._is_broken = True
                    return
            y[name], z[name] = array, other
        for index, part in enumerate(self._parts):
            has_form = part.are_sets or isinstance(part, IdsMeter)
            if not has_form and any(y[name].shape != z[name].shape for name in part.outputs):
                self._values[index].append(1.0)  # nothing in common
            elif isinstance(part, ClassesMeter):
                self._values[index].append(divergence(*(part.place.of(x).reshape(1, -1) for x in (y, z))))
            else:
                self._seen[index] += 1
                part.add(y, z)


def divergence(exact: Array, moved: Array) -> float:
    """The mean over rows of sum p log(p / q); infinite if `moved` is not finite.

    >>> divergence(np.array([[0.0, 0.0]]), np.array([[0.0, 0.0]]))
    0.0
    """
    if not np.isfinite(moved).all():
        return math.inf
    p, q = log_probabilities(exact), log_probabilities(moved)
    return float(np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0.0).mean())


def log_probabilities(rows: Array) -> Array:
    """Logarithms of rows of probabilities; rows that are not probabilities go through softmax."""
    wide = rows.astype(np.float64)
    if (wide >= 0).all() and np.allclose(wide.sum(axis=1), 1.0, atol=1e-3):
        return np.asarray(np.log(np.maximum(wide, 1e-12)))
    wide = wide - wide.max(axis=1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=1, keepdims=True)))


def _finite(array: Array) -> Array:
    return np.nan_to_num(array, posinf=0.0, neginf=0.0) if array.dtype.kind == "f" else array


def _rows(sample: Sample, count: int) -> list[Sample]:
    """The samples of a batch; the batch as one sample if not all outputs have one row for each."""
    whole = {name: np.atleast_1d(array) for name, array in sample.items()}
    if count <= 1 or any(array.shape[0] != count for array in whole.values()):
        return [whole]
    return [{name: array[index : index + 1] for name, array in whole.items()} for index in range(count)]
