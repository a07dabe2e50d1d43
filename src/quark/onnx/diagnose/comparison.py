"""All samples through both networks: the error of every layer, its own and with that of all before it, and what the
tensors look like that layers read.

Of those, a few values of every sample are kept, at places that are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.onnx.data import Sample
from quark.onnx.data.store import SampleStore
from quark.onnx.diagnose.networks import BY_LAYERS, Networks
from quark.onnx.diagnose.running import each_in_order
from quark.onnx.diagnose.sums import Sums, pair_sums

Array = NDArray[Any]
Looked: TypeAlias = tuple[float, float, Array]  # lowest, highest, and some values
KEPT_VALUES = 1024  # of a tensor of a sample


@dataclass
class SeenValues:
    """A tensor that layers read, as the quantized network has it before it is quantized there."""

    lowest: float = 0.0
    highest: float = 0.0
    kept: list[Array] = field(default_factory=list)

    @property
    def values(self) -> Array:
        return np.concatenate(self.kept) if self.kept else np.empty(0, np.float32)

    def add(self, part: Looked) -> None:
        self.lowest, self.highest = min(self.lowest, part[0]), max(self.highest, part[1])
        self.kept.append(part[2])


@dataclass
class Compared:
    """By tensor; `outputs` are those of the float network, sample by sample."""

    outputs: SampleStore
    samples: int = 0
    accumulated: dict[str, Sums] = field(default_factory=dict)
    local: dict[str, Sums] = field(default_factory=dict)
    seen: dict[str, SeenValues] = field(default_factory=dict)


def compare_networks(networks: Networks, samples: Callable[[], Iterable[Sample]]) -> Compared:
    """Two passes over the samples, so that two sessions are there at a time: layers by themselves, then all of them. A
    float network whose outputs are NaN is an error: there is nothing to compare with."""
    ends = [site.tensor for site in networks.sites.sites]
    result = Compared(SampleStore())
    _compare_layers(networks, samples(), ends, result)
    networks.close(BY_LAYERS)
    _compare_whole(networks, samples(), ends, result)
    networks.close()
    return result


def _compare_layers(networks: Networks, samples: Iterable[Sample], ends: list[str], result: Compared) -> None:
    """The local errors, and the float network's outputs and the values that layers read."""
    read = {str(each.source.name) for site in networks.sites.sites for each in site.inputs}
    wanted = list(dict.fromkeys([*ends, *networks.read_by_layers, *networks.outputs]))
    turn = Lock()  # one runs the layers while the other runs the float network: as fast, with less memory

    def one(index: int, sample: Sample) -> tuple[dict[str, Array], dict[str, Sums], dict[str, Looked]]:
        exact = networks.exact(sample, wanted)
        outputs = {name: exact[name].copy() for name in networks.outputs}
        _check_finite(outputs, index)
        seen = {
            name: _look_at(networks, name, array, index) for name, array in (sample | exact).items() if name in read
        }
        with turn:
            layers = networks.by_layers(sample, exact, ends)
            return outputs, {name: pair_sums(exact[name], layers[name]) for name in ends}, seen

    def see(found: tuple[dict[str, Array], dict[str, Sums], dict[str, Looked]]) -> None:
        result.samples += 1
        result.outputs.append(found[0])
        for name in ends:
            result.local[name] = result.local.get(name, Sums()) + found[1][name]
        for name, each in found[2].items():
            result.seen.setdefault(name, SeenValues()).add(each)

    each_in_order(one, samples, see)


def _compare_whole(networks: Networks, samples: Iterable[Sample], ends: list[str], result: Compared) -> None:
    """The accumulated errors."""

    def one(_: int, sample: Sample) -> dict[str, Sums]:
        exact, whole = networks.exact(sample, ends), networks.whole(sample, ends)
        return {name: pair_sums(exact[name], whole[name]) for name in ends}

    def see(found: dict[str, Sums]) -> None:
        for name in ends:
            result.accumulated[name] = result.accumulated.get(name, Sums()) + found[name]

    each_in_order(one, samples, see)


def _look_at(networks: Networks, name: str, array: Array, index: int) -> Looked:
    """Extremes, and some values, in the quantized network's scale."""
    if array.dtype.kind != "f" or not array.size:
        return 0.0, 0.0, np.empty(0, np.float32)
    places = kept_places(array.size, index)
    values = array.reshape(-1)[places].astype(np.float32)
    factors = networks.factors.get(name)
    if factors is None:
        return float(array.min()), float(array.max()), values
    axis = networks.axis(name, array)
    inner = int(np.prod(array.shape[axis + 1 :]))
    others = tuple(each for each in range(array.ndim) if each != axis)
    lowest, highest = array.min(axis=others) * factors, array.max(axis=others) * factors
    values = (values * factors[places // inner % array.shape[axis]]).astype(np.float32)
    return float(lowest.min()), float(highest.max()), values


def kept_places(size: int, index: int) -> NDArray[np.int64]:
    """Where values are looked at in sample number `index`; all of a small tensor."""
    if size <= KEPT_VALUES:
        return np.arange(size)
    return np.sort(np.random.default_rng([index, size]).integers(0, size, KEPT_VALUES))


def _check_finite(outputs: dict[str, Array], index: int) -> None:
    for name, array in outputs.items():
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise InvalidValueError(
                f"the float model's output '{name}' has NaN for sample {index}: there is nothing to compare with. "
                "Check the data and how it is prepared (--preprocess)"
            )
