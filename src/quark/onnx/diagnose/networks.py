"""The two networks, run side by side: as they are, and the quantized one layer by layer.

    exact       the float network, with all shared tensors
    whole       the quantized network, with the same: errors add up
    by_layers   the quantized network cut at every shared tensor: each layer reads what the float network computes, so
                that what it gives has its own error alone. One run gives that of all layers

Quantizers are computed as they stand. With integer kernels the runtime's rounding differs by a little, and there would
be no float tensors in between to look at.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from quark.onnx.data import Sample
from quark.onnx.diagnose.equalized import find_factors
from quark.onnx.diagnose.rescaling import Factors, times
from quark.onnx.diagnose.running import Array, Run, each_in_order
from quark.onnx.diagnose.sites import Sites
from quark.onnx.diagnose.sums import ChannelSums, channel_sums
from quark.onnx.piece import COMPUTED, piece
from quark.onnx.session import release_memory

FACTOR_SAMPLES = 4
EXACT, WHOLE, BY_LAYERS = "exact", "whole", "by_layers"


class Networks:
    """A session is made when it is first needed, and freed by `close`: two of them at a time are enough. `factors` are
    by tensor, see `rescaling`."""

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

    def exact(self, sample: Sample, names: Sequence[str]) -> dict[str, Array]:
        return self._run(EXACT)(sample, names)

    def whole(self, sample: Sample, names: Sequence[str]) -> dict[str, Array]:
        """Tensors of the quantized network, in the float network's scale."""
        return {name: self.unscaled(name, array) for name, array in self._run(WHOLE)(sample, names).items()}

    def by_layers(
        self, sample: Sample, exact: Mapping[str, Array], names: Sequence[str], factors: Factors | None = None
    ) -> dict[str, Array]:
        """What the layers that end in these tensors make of the float network's: in their own scale where `factors` are
        given, else in the float network's."""
        run = self._run(BY_LAYERS)
        known = self.factors if factors is None else factors
        feeds: dict[str, Any] = {**sample}
        for name in run.inputs:
            if name in exact:
                feeds[name] = times(exact[name], known.get(name), self.axis(name, exact[name]))
        found = run(feeds, [f"{name}{COMPUTED}" for name in names])
        given = {name: found[f"{name}{COMPUTED}"] for name in names}
        return given if factors is not None else {name: self.unscaled(name, array) for name, array in given.items()}

    def unscaled(self, name: str, array: Array) -> Array:
        factors = self.factors.get(name)
        return times(array, None if factors is None else 1 / factors, self.axis(name, array))

    def axis(self, name: str, array: Array) -> int:
        return self.sites.channel_axis(name, array.ndim)

    def find_factors(self, samples: Sequence[Sample]) -> None:
        """Find what equalization did, by a few samples."""
        shared = list(self.sites.shared)
        waiting = threading.Lock()  # a sample at a time: few are looked at, and all tensors of one take much memory

        def turn(factors: Factors) -> dict[str, ChannelSums]:
            total: dict[str, ChannelSums] = {}
            varying: set[str] = set()  # as many channels as a sample is long: nothing to equalize

            def one(_: int, sample: Sample) -> dict[str, ChannelSums]:
                with waiting:
                    exact = self.exact(sample, shared)
                    actual = self.by_layers(sample, exact, shared, factors)
                    return {
                        name: channel_sums(array, actual[name], self.axis(name, array))
                        for name, array in exact.items()
                        if array.ndim > 1
                    }

            def see(sums: dict[str, ChannelSums]) -> None:
                for name, each in sums.items():
                    if name in total and total[name].exact.size != each.exact.size:
                        varying.add(name)
                    else:
                        total[name] = total[name] + each if name in total else each

            each_in_order(one, samples[:FACTOR_SAMPLES], see)
            return {name: each for name, each in total.items() if name not in varying}

        self.factors = find_factors(*self._models, self.sites, turn)

    def close(self, which: str | None = None) -> None:
        """Free one session, or all."""
        for name in [which] if which else list(self._runs):
            self._runs.pop(name, None)
        release_memory()

    def _run(self, which: str) -> Run:
        with self._opening:
            if which not in self._runs:
                self._runs[which] = self._open(which)
            return self._runs[which]

    def _open(self, which: str) -> Run:
        exact, quantized = self._models
        shared = list(self.sites.shared)
        if which == EXACT:
            return Run(exact, "the float model", extra=shared)
        if which == WHOLE:
            return Run(quantized, "the quantized model", extra=shared)
        cut = piece(quantized, shared, shared)
        give_types(cut, exact)
        return Run(cut, "the layers of the quantized model")


def differing_shapes(exact: ir.Model, quantized: ir.Model, shared: Iterable[str], sample: Sample) -> list[str]:
    """The shared tensors that turn out to be no match: another shape, or no floats."""
    names = list(shared)
    first = Run(exact, "the float model", extra=names)(sample, names)
    second = Run(quantized, "the quantized model", extra=names)(sample, names)
    return [
        name
        for name in names
        if first[name].shape != second[name].shape or first[name].dtype.kind != "f" or second[name].dtype.kind != "f"
    ]


def give_types(cut: ir.Model, exact: ir.Model) -> None:
    """What is given has the type that it has in the float network."""
    known = {str(value.name): value.type for node in exact.graph for value in node.outputs}
    for value in cut.graph.inputs:
        if value.type is None:
            value.type = known.get(str(value.name))
