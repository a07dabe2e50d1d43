"""The two networks, run side by side: as they are, and the quantized one layer by layer.

    exact       the float network, with all shared tensors
    whole       the quantized network, with the same: errors add up
    by_layers   the quantized network cut at every shared tensor: each layer reads what the float network computes, so
                its result has its own error alone. One run covers all layers

Quantizers are computed as they stand. With integer kernels the runtime's rounding differs a little, and there would be
no float tensors in between to look at. `compare_networks` runs all samples through both networks. It measures the error
of every layer, both its own and accumulated, and keeps a few values of the tensors that layers read, at places that are
the same in every run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.compare.measures import ChannelSums, PairSums, channel_sums, fast_pair_sums
from quark.errors import InvalidValueError
from quark.inspect.diagnose.equalized import Factors, find_factors, times
from quark.inspect.diagnose.running import Run
from quark.inspect.diagnose.sites import Sites
from quark.onnx.calibrate.runner import each_in_order
from quark.onnx.data import Sample
from quark.onnx.data.samples import SampleStore
from quark.onnx.graph import COMPUTED, piece
from quark.onnx.session import release_memory

Array = NDArray[Any]
FACTOR_SAMPLES = 4
KEPT_VALUES = 1024  # values kept of a tensor of one sample
EXACT, WHOLE, BY_LAYERS = "exact", "whole", "by_layers"
Looked: TypeAlias = tuple[float, float, Array]  # lowest, highest, and some values


class Networks:
    """Sessions are opened when first needed, and freed by `close`: two at a time are enough. `factors` are those of
    `equalized`, by tensor."""

    def __init__(self, exact: ir.Model, quantized: ir.Model, sites: Sites) -> None:
        self.sites = sites
        self.factors: Factors = {}
        self.outputs = [str(value.name) for value in exact.graph.outputs]
        self._models = exact, quantized
        self._runs: dict[str, Run] = {}
        self._opening = threading.Lock()

    @property
    def read_by_layers(self) -> list[str]:
        """The shared tensors that layers read."""
        return [name for name in self._run(BY_LAYERS).inputs if name in self.sites.makers]

    @property
    def quantized_inside(self) -> list[str]:
        """Tensors that quantizers of layers read and the float network does not have, such as a centered input."""
        given = {str(value.name) for value in self._models[1].graph.inputs}
        read = dict.fromkeys(str(operand.source.name) for site in self.sites.sites for operand in site.inputs)
        return [name for name in read if name not in given and name not in self.sites.makers]

    def exact(self, sample: Sample, names: Sequence[str]) -> dict[str, Array]:
        return self._run(EXACT)(sample, names)

    def whole(self, sample: Sample, names: Sequence[str]) -> dict[str, Array]:
        """Tensors of the quantized network, in the float network's scale."""
        return {name: self.unscaled(name, array) for name, array in self._run(WHOLE)(sample, names).items()}

    def by_layers(
        self, sample: Sample, exact: Mapping[str, Array], names: Sequence[str], factors: Factors | None = None
    ) -> dict[str, Array]:
        """Compute these tensors by running each layer on the float network's tensors. The results are in the layers'
        own scale if `factors` are given, else in the float network's."""
        run = self._run(BY_LAYERS)
        known = self.factors if factors is None else factors
        feeds: dict[str, Any] = {**sample}
        for name in run.inputs:
            if name in exact:
                feeds[name] = times(exact[name], known.get(name), self.axis(name, exact[name]))
        computed = {name: f"{name}{COMPUTED}" if name in self.sites.makers else name for name in names}
        arrays = run(feeds, list(computed.values()))
        given = {name: arrays[output] for name, output in computed.items()}
        return given if factors is not None else {name: self.unscaled(name, array) for name, array in given.items()}

    def unscaled(self, name: str, array: Array) -> Array:
        factors = self.factors.get(name)
        return times(array, None if factors is None else 1 / factors, self.axis(name, array))

    def axis(self, name: str, array: Array) -> int:
        return self.sites.channel_axis(name, array.ndim)

    def find_factors(self, samples: Sequence[Sample]) -> None:
        """Find the factors of equalization from a few samples."""
        shared = list(self.sites.shared)
        waiting = threading.Lock()  # one sample at a time: few are looked at, and all tensors of one take much memory

        def turn(factors: Factors) -> dict[str, ChannelSums]:
            total: dict[str, ChannelSums] = {}
            varying: set[str] = set()  # as many channels as a sample is long, so there is nothing to equalize

            def run_sample(_: int, sample: Sample) -> dict[str, ChannelSums]:
                with waiting:
                    exact = self.exact(sample, shared)
                    actual = self.by_layers(sample, exact, shared, factors)
                    return {
                        name: channel_sums(array, actual[name], self.axis(name, array))
                        for name, array in exact.items()
                        if array.ndim > 1
                    }

            def see(sums: dict[str, ChannelSums]) -> None:
                for name, added in sums.items():
                    if name in total and total[name].exact.size != added.exact.size:
                        varying.add(name)
                    else:
                        total[name] = total[name] + added if name in total else added

            each_in_order(run_sample, samples[:FACTOR_SAMPLES], see)
            return {name: sums for name, sums in total.items() if name not in varying}

        self.factors = find_factors(*self._models, self.sites, turn)

    def close(self, which: str | None = None) -> None:
        """Free one session, or all."""
        for name in [which] if which else list(self._runs):
            self._runs.pop(name, None)
        release_memory()

    def _run(self, which: str) -> Run:
        exact, quantized = self._models
        shared = list(self.sites.shared)
        with self._opening:
            if which not in self._runs and which == BY_LAYERS:
                cut = piece(quantized, shared, [*shared, *self.quantized_inside])
                give_types(cut, exact)
                self._runs[which] = Run(cut, "the layers of the quantized model")
            elif which not in self._runs:
                model, what = (exact, "the float model") if which == EXACT else (quantized, "the quantized model")
                self._runs[which] = Run(model, what, extra=shared)
            return self._runs[which]


def differing_shapes(exact: ir.Model, quantized: ir.Model, shared: Iterable[str], sample: Sample) -> list[str]:
    """The shared tensors that turn out not to match: they have another shape, or are not floats."""
    names = list(shared)
    first = Run(exact, "the float model", extra=names)(sample, names)
    second = Run(quantized, "the quantized model", extra=names)(sample, names)
    return [
        name
        for name in names
        if first[name].shape != second[name].shape or first[name].dtype.kind != "f" or second[name].dtype.kind != "f"
    ]


def give_types(cut: ir.Model, exact: ir.Model) -> None:
    """Give inputs of a cut network the types that they have in the float network."""
    known = {str(value.name): value.type for node in exact.graph for value in node.outputs}
    for value in cut.graph.inputs:
        if value.type is None:
            value.type = known.get(str(value.name))


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
    """Errors and values by tensor; `outputs` are those of the float network, sample by sample."""

    outputs: SampleStore
    samples: int = 0
    accumulated: dict[str, PairSums] = field(default_factory=dict)
    local: dict[str, PairSums] = field(default_factory=dict)
    seen: dict[str, SeenValues] = field(default_factory=dict)


def compare_networks(networks: Networks, samples: Callable[[], Iterable[Sample]]) -> Compared:
    """Compare in two passes over the samples, so that two sessions are open at a time: layers by themselves, then the
    whole network. Raises an error if outputs of the float network are NaN: there is nothing to compare with."""
    ends = [site.tensor for site in networks.sites.sites]
    result = Compared(SampleStore())
    _compare_layers(networks, samples(), ends, result)
    networks.close(BY_LAYERS)

    def run_sample(_: int, sample: Sample) -> dict[str, PairSums]:
        exact, whole = networks.exact(sample, ends), networks.whole(sample, ends)
        return {name: fast_pair_sums(exact[name], whole[name]) for name in ends}

    def see(sums_of_sample: dict[str, PairSums]) -> None:
        for name in ends:
            result.accumulated[name] = result.accumulated.get(name, PairSums()) + sums_of_sample[name]

    each_in_order(run_sample, samples(), see)
    networks.close()
    return result


def _compare_layers(networks: Networks, samples: Iterable[Sample], ends: list[str], result: Compared) -> None:
    """Measure the local errors; keep the float network's outputs and the values that layers read."""
    read = {str(operand.source.name) for site in networks.sites.sites for operand in site.inputs}
    wanted = list(dict.fromkeys([*ends, *networks.read_by_layers, *networks.outputs]))
    inside = networks.quantized_inside
    turn = threading.Lock()  # one runs the layers while the other runs the float network: as fast, with less memory

    def run_sample(index: int, sample: Sample) -> tuple[dict[str, Array], dict[str, PairSums], dict[str, Looked]]:
        exact = networks.exact(sample, wanted)
        outputs = {name: exact[name].copy() for name in networks.outputs}
        for name, array in outputs.items():
            if array.dtype.kind == "f" and np.isnan(array).any():
                raise InvalidValueError(
                    f"the float model's output '{name}' has NaN for sample {index}: there is nothing to compare with. "
                    "Check the data and how it is prepared (--preprocess)"
                )
        seen = {
            name: _look_at(networks, name, array, index) for name, array in (sample | exact).items() if name in read
        }
        with turn:
            layers = networks.by_layers(sample, exact, [*ends, *inside])
            seen.update({name: _look_at(networks, name, layers[name], index) for name in inside})
            return outputs, {name: fast_pair_sums(exact[name], layers[name]) for name in ends}, seen

    def see(results: tuple[dict[str, Array], dict[str, PairSums], dict[str, Looked]]) -> None:
        result.samples += 1
        result.outputs.append(results[0])
        for name in ends:
            result.local[name] = result.local.get(name, PairSums()) + results[1][name]
        for name, look in results[2].items():
            result.seen.setdefault(name, SeenValues()).add(look)

    each_in_order(run_sample, samples, see)


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
    others = tuple(other for other in range(array.ndim) if other != axis)
    lowest, highest = array.min(axis=others) * factors, array.max(axis=others) * factors
    values = (values * factors[places // inner % array.shape[axis]]).astype(np.float32)
    return float(lowest.min()), float(highest.max()), values


def kept_places(size: int, index: int) -> NDArray[np.int64]:
    """The places whose values are kept in sample number `index`: all places of a small tensor."""
    if size <= KEPT_VALUES:
        return np.arange(size)
    return np.sort(np.random.default_rng([index, size]).integers(0, size, KEPT_VALUES))
