"""All outputs of two networks, gathered sample by sample.

    FidelityMeter   one output as a whole: cosine, SQNR, agreement, largest error
    OutputsMeter    every output and its parts, for a verdict
    DistanceMeter   all outputs as one number, to rank many networks that differ by little

The arrays come from anywhere: ONNX Runtime, torch, files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.compare.kinds import ClassesMeter, IdsMeter, PartMeter
from quark.compare.measures import PairSums, decibels, mean_divergence, near_ties, pair_sums, same_largest
from quark.compare.parts import find_parts
from quark.compare.verdict import OutputFidelity, PartFidelity

Array = NDArray[Any]
Sample = Mapping[str, Array]

FIRST_SAMPLES = 16  # the most samples that decide what the outputs are
FIRST_BYTES = 256 << 20
BROKEN = "not finite"  # the kind of a part that reports NaN or Inf
VALUES = ("values", "values where scores fire", BROKEN)
KL, DISTANCE = "kl", "distance"


def batch_size_of(inputs: Mapping[str, Any]) -> int:
    """The number of samples that the inputs hold: the first axis if it is the same for all of them, else 1."""
    sizes = {np.shape(value)[0] for value in inputs.values() if np.ndim(value) > 1}
    return int(sizes.pop()) if len(sizes) == 1 else 1


def samples_of_batch(outputs: Sample, count: int) -> list[Sample]:
    """Split the outputs of a batch of `count` into single samples; outputs without the batch in front stay whole.

    >>> [sample["y"].shape for sample in samples_of_batch({"y": np.zeros((2, 5))}, 2)]
    [(1, 5), (1, 5)]
    """
    if count < 2 or not all(output.ndim and len(output) == count for output in outputs.values()):
        return [outputs]
    return [{name: output[i : i + 1] for name, output in outputs.items()} for i in range(count)]


def have_same_form(expected: Array, actual: Array) -> bool:
    """True if two outputs can be compared: equal shapes, or tables of as many columns with any number of rows."""
    if expected.shape == actual.shape:
        return True
    return expected.ndim == actual.ndim and (expected.ndim == 1 or expected.shape[-1] == actual.shape[-1])


def outputs_without_numbers(samples: Iterable[Sample]) -> list[str]:
    """The names of outputs of a float network that are NaN or Inf throughout, so that nothing can be compared with
    them.

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
    """The remark about an output that is not compared because the float network has no numbers there."""
    return (
        f"output '{output}' of the float model is NaN or Inf for every sample that was looked at, so that there is "
        "nothing to compare with: run the float model on your data first"
    )


class FidelityMeter:
    """Gathers pairs of tensors in constant memory.

    Agreement is the share of rows with the same largest class, for tensors of shape [n, classes]; near ties are among
    the others. NaN or Inf where the float network has none means cosine 0 and SQNR -inf.

    >>> meter = FidelityMeter("y")
    >>> meter.add(np.array([[1.0, 2.0]]), np.array([[1.0, 2.1]]))
    >>> round(meter.result().sqnr_db, 1), meter.result().agreement
    (27.0, 1.0)
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._sums = PairSums()
        self._agreeing = self._ties = self._rows = 0
        self._has_classes = True

    def add(self, expected: Array, actual: Array) -> None:
        """Add one sample or batch: the outputs of the float network and of the quantized one."""
        if expected.ndim == 2 and expected.shape[1] > 1:
            self._agreeing += int(same_largest(expected, actual).sum())
            self._ties += near_ties(expected, actual)
            self._rows += len(expected)
        else:
            self._has_classes = False
        self._sums += pair_sums(expected, actual)

    def result(self) -> OutputFidelity:
        """All that was added, as one output without parts."""
        agreement = None
        if self._has_classes and (self._rows or self._sums.is_broken):
            agreement = 0.0 if self._sums.is_broken else self._agreeing / self._rows
        fidelity = OutputFidelity.of(self.name, self._sums, agreement)
        if agreement is None:
            return fidelity
        return replace(fidelity, predictions=self._rows, near_ties=0 if self._sums.is_broken else self._ties)


class OutputsMeter:
    """Gathers the outputs of a float and a quantized network, and measures how close each output is.

    The first samples are kept until there are enough of them to tell what each output is; from then on memory use is
    constant. Arrays must not be changed by the caller before `result`.

    >>> meter = OutputsMeter()
    >>> meter.add({"y": np.array([[0.5, 2.0, -1.0]])}, {"y": np.array([[0.6, 2.0, -1.0]])})
    >>> [(output.name, output.kind, output.verdict.value) for output in meter.result()]
    [('y', 'classes', 'ok')]
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Sample, Sample]] = []
        self._kept_bytes = 0
        self._meters: list[PartMeter] | None = None
        self._whole: dict[str, FidelityMeter] = {}
        self._broken: dict[str, list[int]] = {}
        self._misshapen: set[str] = set()
        self._count = 0

    def add(self, expected: Sample, actual: Sample, count: int = 1) -> None:
        """Add one sample, or a batch of `count` samples that lie along the first axis of every output.

        Outputs that the other network lacks and outputs that are not numbers are left out.
        """
        names = [name for name in expected if name in actual and np.asarray(expected[name]).dtype.kind in "fiub"]
        sides = ({name: side[name] for name in names} for side in (expected, actual))
        for y, z in _samples(count, *sides):
            self._add_sample(y, z)

    def result(self) -> tuple[OutputFidelity, ...]:
        """Every output in the order of the float network; empty if there was no sample.

        Values are degraded at worst beside outputs that answer a question (scores, classes, boxes): they are often
        states or features without a reader.
        """
        if self._meters is None:
            self._decide()
        outputs = [self._output(name) for name in self._whole]
        answers = {output.name for output in outputs if any(part.kind not in VALUES for part in output.parts)}
        for index, output in enumerate(outputs):
            if answers - {output.name}:
                parts = (
                    replace(part, severity=min(part.severity, 2.0)) if part.kind == "values" else part
                    for part in output.parts
                )
                outputs[index] = replace(output, parts=tuple(parts))
        return tuple(outputs)

    def _add_sample(self, expected: Sample, actual: Sample) -> None:
        index = self._count
        self._count += 1
        y, z = dict(expected), dict(actual)
        for name in expected:
            whole = self._whole.setdefault(name, FidelityMeter(name))
            if y[name].dtype.kind == "f":
                if y[name].dtype.itemsize < 4:  # the squares of narrower types would overflow
                    y[name], z[name] = y[name].astype(np.float32), z[name].astype(np.float32)
                usable = np.isfinite(y[name])
                if not usable.all():
                    if y[name].shape == z[name].shape:
                        z[name] = np.where(usable, z[name], 0)
                    y[name] = np.where(usable, y[name], 0)
                if not np.isfinite(z[name]).all():
                    self._broken.setdefault(name, []).append(index)
                    z[name] = np.nan_to_num(z[name], posinf=0.0, neginf=0.0)
            if y[name].shape == z[name].shape:
                whole.add(y[name], z[name])
            else:
                self._misshapen.add(name)
        if self._meters is None:
            self._kept.append((y, z))
            self._kept_bytes += sum(array.nbytes for side in (y, z) for array in side.values())
            if len(self._kept) >= FIRST_SAMPLES or self._kept_bytes >= FIRST_BYTES:
                self._decide()
        else:
            for meter in self._meters:
                meter.add(y, z)

    def _decide(self) -> None:
        """Find the parts of the outputs from the samples that were kept, and measure those."""
        self._meters = find_parts([y for y, _ in self._kept], [z for _, z in self._kept]) if self._kept else []
        for y, z in self._kept:
            for meter in self._meters:
                meter.add(y, z)
        self._kept.clear()

    def _output(self, name: str) -> OutputFidelity:
        result = self._whole[name].result()
        meters = [meter for meter in self._meters or () if name in meter.outputs]
        parts = [meter.result() for meter in meters]
        distance = sum(part.distance / len(meter.outputs) for part, meter in zip(parts, meters, strict=True))
        if any(meter.are_sets for meter in meters) or name in self._misshapen:
            # Positions mean nothing here, so the share of what both have replaces the cosine.
            figure = min((part.figure for part in parts), default=0.0)
            result = OutputFidelity(name, figure, -decibels(distance), max_error=result.max_error)
        broken = self._broken.get(name, [])
        if broken:
            share = 1 - len(broken) / self._count
            part = PartFidelity("", BROKEN, "share of samples without NaN or Inf", share, broken[0], 0.0, 3.0)
            parts.insert(0, part)
            result = replace(result, cosine=0.0, sqnr_db=-math.inf, max_error=math.inf)
        worst = max(parts, key=lambda part: part.severity, default=None)
        return replace(
            result,
            kind=", ".join(dict.fromkeys(part.kind for part in parts)),
            parts=tuple(parts),
            worst_sample=None if worst is None else worst.worst_sample,
            distance=math.inf if broken else distance,
        )


class DistanceMeter:
    """Gathers the outputs of a float network and of one that is ranked, and measures how far apart they are.

    What the outputs are is decided once, from the float network's values in `expected`, which are not counted as
    samples: each is one sample, or a batch of as many as `counts` says. `fresh` then makes a meter for each network.
    The distance is the sum over the parts of all outputs: for one row of classes the divergence of its predictions, sum
    p log(p / q), and for any other part the distance of its kind, which for most is the squared error as a share of the
    power.

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
            size = sum(array.nbytes for array in sample.values())
            if taken and taken + size > FIRST_BYTES:
                break
            taken += size
            finite = {
                name: np.nan_to_num(array, posinf=0.0, neginf=0.0) if array.dtype.kind == "f" else array
                for name, array in sample.items()
            }
            rows += [row for (row,) in _samples(count, finite)]
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
        for y, z in _samples(count, expected, actual):
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
                self._values[index].append(mean_divergence(*(part.place.of(x).reshape(1, -1) for x in (y, z))))
            else:
                self._seen[index] += 1
                part.add(y, z)


def _samples(count: int, *sides: Sample) -> Iterable[tuple[Sample, ...]]:
    """Split a batch on all sides; it stays whole if it cannot be split on every side."""
    wholes = [{name: np.atleast_1d(array) for name, array in side.items()} for side in sides]
    split = [samples_of_batch(whole, count) for whole in wholes]
    return zip(*split, strict=True) if len(set(map(len, split))) == 1 else [tuple(wholes)]
