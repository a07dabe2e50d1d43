"""Compare all outputs of two networks, sample by sample, and judge every part of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.fidelity.kinds import PartMeter
from quark.fidelity.pair import FidelityMeter
from quark.fidelity.parts import find_parts
from quark.fidelity.verdict import OutputFidelity, PartFidelity

Array = NDArray[Any]

FIRST_SAMPLES = 16
FIRST_BYTES = 256 << 20
BROKEN = "not finite"  # the kind of a part that says that there is NaN or Inf


def batch_size_of(inputs: Mapping[str, Any]) -> int:
    """The number of samples that the inputs hold: the first axis if it is the same for all of them, else 1."""
    sizes = {np.shape(value)[0] for value in inputs.values() if np.ndim(value) > 1}
    return int(sizes.pop()) if len(sizes) == 1 else 1


def have_same_form(expected: Array, actual: Array) -> bool:
    """True if two outputs can be compared: equal shapes, or tables of as many columns with any number of rows."""
    if expected.shape == actual.shape:
        return True
    return expected.ndim == actual.ndim and (expected.ndim == 1 or expected.shape[-1] == actual.shape[-1])


VALUES = ("values", "values where scores fire", BROKEN)


def _capped(output: OutputFidelity) -> OutputFidelity:
    """The output with values that are degraded at worst. Beside outputs that answer a question (scores, classes, boxes)
    values are often states or features that nobody reads."""
    parts = tuple(
        replace(part, severity=min(part.severity, 2.0)) if part.kind == "values" else part for part in output.parts
    )
    return replace(output, parts=parts)


class OutputsMeter:
    """Gathers the outputs of a float and a quantized network, and says how close each output is.

    The first samples are kept until there are enough of them to tell what each output is; after that memory stays the
    same. Arrays must not be changed by the caller before `result`.

    >>> meter = OutputsMeter()
    >>> meter.add({"y": np.array([[0.5, 2.0, -1.0]])}, {"y": np.array([[0.6, 2.0, -1.0]])})
    >>> [(output.name, output.kind, output.verdict.value) for output in meter.result()]
    [('y', 'classes', 'ok')]
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Mapping[str, Array], Mapping[str, Array]]] = []
        self._kept_bytes = 0
        self._meters: list[PartMeter] | None = None
        self._whole: dict[str, FidelityMeter] = {}
        self._broken: dict[str, list[int]] = {}
        self._misshapen: set[str] = set()
        self._count = 0

    def add(self, expected: Mapping[str, Array], actual: Mapping[str, Array], count: int = 1) -> None:
        """Add one sample, or a batch of `count` samples that lie along the first axis of every output.

        Outputs that the other network lacks and outputs that are not numbers are left out.
        """
        names = [name for name in expected if name in actual and np.asarray(expected[name]).dtype.kind in "fiub"]
        is_batch = count > 1 and all(
            x[name].ndim and x[name].shape[0] == count for x in (expected, actual) for name in names
        )
        for index in range(count if is_batch else 1):
            pick = slice(index, index + 1) if is_batch else slice(None)
            self._add_sample(*({name: np.atleast_1d(x[name])[pick] for name in names} for x in (expected, actual)))

    def result(self) -> tuple[OutputFidelity, ...]:
        """Every output in the order of the float network; empty if there was no sample."""
        if self._meters is None:
            self._decide()
        outputs = tuple(self._output(name) for name in self._whole)
        answers = [output.name for output in outputs if any(part.kind not in VALUES for part in output.parts)]
        return tuple(_capped(output) if set(answers) - {output.name} else output for output in outputs)

    def _add_sample(self, expected: Mapping[str, Array], actual: Mapping[str, Array]) -> None:
        index = self._count
        self._count += 1
        y, z = dict(expected), dict(actual)
        for name in expected:
            whole = self._whole.setdefault(name, FidelityMeter(name))
            if y[name].dtype.kind == "f":
                if y[name].dtype.itemsize < 4:  # whose squares would overflow
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
            self._measure(y, z)

    def _decide(self) -> None:
        self._meters = find_parts([y for y, _ in self._kept], [z for _, z in self._kept]) if self._kept else []
        for y, z in self._kept:
            self._measure(y, z)
        self._kept.clear()

    def _measure(self, expected: Mapping[str, Array], actual: Mapping[str, Array]) -> None:
        for meter in self._meters or ():
            meter.add(expected, actual)

    def _output(self, name: str) -> OutputFidelity:
        found = self._whole[name].result()
        meters = [meter for meter in self._meters or () if name in meter.outputs]
        parts = [meter.result() for meter in meters]
        distance = sum(part.distance / len(meter.outputs) for part, meter in zip(parts, meters, strict=True))
        if any(meter.are_sets for meter in meters) or name in self._misshapen:
            # Positions mean nothing here: the share of what both have takes the place of the cosine.
            figure = min((part.figure for part in parts), default=0.0)
            sqnr_db = math.inf if distance == 0 else -10 * math.log10(distance)
            found = OutputFidelity(name, figure, sqnr_db, max_error=found.max_error)
        broken = self._broken.get(name, [])
        if broken:
            share = 1 - len(broken) / self._count
            part = PartFidelity("", BROKEN, "share of samples without NaN or Inf", share, broken[0], 0.0, 3.0)
            parts.insert(0, part)
            found = replace(found, cosine=0.0, sqnr_db=-math.inf, max_error=math.inf)
        worst = max(parts, key=lambda part: part.severity, default=None)
        return replace(
            found,
            kind=", ".join(dict.fromkeys(part.kind for part in parts)),
            parts=tuple(parts),
            worst_sample=None if worst is None else worst.worst_sample,
            distance=math.inf if broken else distance,
        )
