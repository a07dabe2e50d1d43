"""What the error of a layer costs: how far the network's output moves when that layer alone is quantized.

The error of a layer that reads the float network's tensors is added to its result in the float network, and the rest
of that network is run. Layers go in groups. A group has three pieces, each starting at tensors that are kept for all
samples:

    before   the float network from the start of the group to its end: what its layers read and compute
    layers   the quantized layers of the group
    rest     the float network from the start of the group to the output, with an Add behind each layer's result, whose
             other operand is 0 except for the layer in question

So a layer costs a little more than half a run of the network. All outputs count: those that are computed before a group
do not depend on it, and are the float network's. The distance is that of `DistanceMeter`: the divergence of the
predictions of a classifier, else the sum of the distances of all parts of the outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.compare import batch_size_of
from quark.compare.outputs import DISTANCE, DistanceMeter
from quark.inspect.diagnose.equalized import Factors, times
from quark.inspect.diagnose.networks import give_types
from quark.inspect.diagnose.running import Run
from quark.inspect.diagnose.sites import Sites
from quark.onnx.calibrate.runner import each_in_order
from quark.onnx.data import Sample
from quark.onnx.data.samples import SampleStore
from quark.onnx.graph import COMPUTED, frontier, piece

Array = NDArray[Any]
GROUPS = 8
FEWEST_LAYERS = 4  # per group: opening its sessions takes as long as running the network a few times


@dataclass(frozen=True)
class Sensitivities:
    """The cost of each layer by its tensor. `measure` is `kl` or `distance`, see `DistanceMeter`."""

    values: dict[str, float]
    measure: str
    samples: int


def find_sensitivities(
    exact: ir.Model,
    quantized: ir.Model,
    sites: Sites,
    factors: Factors,
    samples: Sequence[Sample],
    tensors: Collection[str] | None = None,
) -> Sensitivities:
    """Measure what each layer costs, by all outputs of the network.

    `tensors` names the layers to measure, by `Site.tensor`; all if it is None. Layers that no output depends on cost 0.
    """
    places = {str(value.name): index for index, node in enumerate(exact.graph) for value in node.outputs}
    wanted = [site.tensor for site in sites.sites if tensors is None or site.tensor in tensors]
    if not wanted or not samples:
        return Sensitivities(dict.fromkeys(wanted, 0.0), DISTANCE, len(samples))
    ends = sorted(wanted, key=places.__getitem__)
    count = min(GROUPS, -(-len(ends) // FEWEST_LAYERS))
    groups = [[str(name) for name in group] for group in np.array_split(ends, count)]
    networks = _Networks(exact, quantized, sites, factors, places)
    references = SampleStore()
    remembered: Any = samples
    previous = -1
    measured: dict[str, list[DistanceMeter]] = {name: [] for name in ends}
    empty: DistanceMeter | None = None
    for number, group in enumerate(groups):
        to_come = [name for later in groups[number + 1 :] for name in later]
        read = [str(value.name) for value in piece(quantized, sites.shared, to_come).graph.inputs] if to_come else []
        pieces = _Pieces(networks, group, remembered[0], read, previous)
        if empty is None:  # the first group: its rest is the whole network
            each_in_order(pieces.reference, samples, references.append)
            counts = [batch_size_of(sample) for sample in samples]
            empty = DistanceMeter([references[index] for index in range(len(samples))], counts)
        following = SampleStore()

        def see(result: tuple[dict[str, DistanceMeter], dict[str, Array]], store: SampleStore = following) -> None:
            store.append(result[1])
            for name, meter in result[0].items():
                measured[name].append(meter)

        def compute(
            index: int, sample: Sample, pieces: _Pieces = pieces, empty: DistanceMeter = empty
        ) -> tuple[dict[str, DistanceMeter], dict[str, Array]]:
            return pieces.measure(sample, references[index], empty, batch_size_of(samples[index]))

        each_in_order(compute, (remembered[index] for index in range(len(samples))), see)
        if isinstance(remembered, SampleStore):
            remembered.close()
        remembered = following
        previous = max(places[name] for name in group)
    remembered.close()
    references.close()
    assert empty is not None
    values = {}
    for name in wanted:
        total = empty.fresh()
        for meter in measured[name]:
            total.merge(meter)
        values[name] = total.distance
    return Sensitivities(values, empty.measure, len(samples))


@dataclass(frozen=True)
class _Networks:
    """The two networks, what they have in common, and where the nodes of the exact one stand."""

    exact: ir.Model
    quantized: ir.Model
    sites: Sites
    factors: Factors
    places: dict[str, int]


class _Pieces:
    """The three pieces of a group of layers. It starts behind node `previous` of the float network; `start` is an
    example of the tensors there."""

    def __init__(
        self, networks: _Networks, group: Sequence[str], start: Sample, read_later: Collection[str], previous: int
    ) -> None:
        exact, places = networks.exact, networks.places
        self._sites, self._factors, self._group = networks.sites, networks.factors, group
        types = {name: array.dtype for name, array in start.items()}
        cut = piece(networks.quantized, self._sites.shared, group)
        give_types(cut, exact)
        self._layers = Run(cut, "the layers of the quantized model")
        last = max(places[name] for name in group)
        # a layer may begin before the frontier and end behind it
        earlier = [name for name in read_later if name in start or places.get(name, last + 1) <= last]
        self._following = list(dict.fromkeys([*frontier(exact, last), *earlier]))
        wanted = [*self._layers.inputs, *group, *self._following]
        self._wanted = [name for name in dict.fromkeys(wanted) if name in places and name not in start]
        before = piece(exact, list(start), self._wanted)
        self._before = Run(_typed(before, types), "the float model") if self._wanted else None
        names = [str(value.name) for value in exact.graph.outputs]
        self._outputs = [name for name in names if places.get(name, -1) > previous]
        rest = _with_additions(piece(exact, list(start), self._outputs), group)
        self._rest = Run(_typed(rest, types), "the float model") if self._outputs else None
        added = {addition(name) for name in group}
        self._zeros = {
            str(value.name): np.zeros((), value.dtype.numpy())  # without axes: the result has those of the layer
            for value in rest.graph.inputs
            if value.name in added and value.dtype is not None
        }

    def measure(
        self, sample: Sample, reference: Sample, empty: DistanceMeter, count: int
    ) -> tuple[dict[str, DistanceMeter], dict[str, Array]]:
        """Measure each layer on one sample; also return what to keep for the next groups."""
        values = {**sample}
        if self._before is not None:
            values |= self._before(sample, self._wanted)
        feeds = {name: self._scaled(name, values[name]) for name in self._layers.inputs}
        computed = self._layers(feeds)
        expected = {**reference, **self._run_rest(sample, {})}
        meters: dict[str, DistanceMeter] = {}
        for name in self._group:
            if addition(name) not in self._zeros:
                continue  # no output depends on it
            array, factors = computed[f"{name}{COMPUTED}"], self._factors.get(name)
            inverse, axis = None if factors is None else 1 / factors, self._sites.channel_axis(name, array.ndim)
            with np.errstate(invalid="ignore"):  # Inf - Inf is NaN, and then the output is NaN too
                error = times(array, inverse, axis) - values[name]
            moved = self._run_rest(sample, {addition(name): error.astype(values[name].dtype)})
            meters[name] = empty.fresh()
            meters[name].add(expected, {**expected, **moved}, count)
        return meters, {name: np.array(values[name]) for name in self._following}

    def reference(self, _: int, sample: Sample) -> dict[str, Array]:
        """The outputs of the float network that this group can affect; for the first group, all that nodes compute."""
        return {name: array.copy() for name, array in self._run_rest(sample, {}).items()}

    def _run_rest(self, sample: Sample, errors: dict[str, Array]) -> dict[str, Array]:
        """The outputs that are computed behind the start of the group, with these errors added to its layers."""
        if self._rest is None:
            return {}
        return dict(zip(self._outputs, self._rest({**sample, **self._zeros, **errors}).values(), strict=True))

    def _scaled(self, name: str, array: Array) -> Array:
        return times(array, self._factors.get(name), self._sites.channel_axis(name, array.ndim))


def addition(name: str) -> str:
    """The name of the input that is added to a tensor."""
    return f"{name}/addition"


def _typed(part: ir.Model, types: dict[str, Any]) -> ir.Model:
    for value in part.graph.inputs:
        if value.type is None and value.name in types:
            value.type = ir.TensorType(ir.DataType.from_numpy(types[str(value.name)]))
    return part


def _with_additions(part: ir.Model, tensors: Sequence[str]) -> ir.Model:
    """Add an input to each of these tensors, for all their readers."""
    values = {str(value.name): (node, value) for node in part.graph for value in node.outputs}
    for name in tensors:
        if name not in values:
            continue  # no output depends on it
        node, value = values[name]
        given = ir.Value(name=addition(name), type=value.type or ir.TensorType(ir.DataType.FLOAT))
        added = ir.Node("", "Add", [value, given], name=f"{name}/add")
        added.outputs[0].name, added.outputs[0].type = f"{name}/added", value.type
        value.replace_all_uses_with(added.outputs[0], replace_graph_outputs=True)
        added.replace_input_with(0, value)
        node.append(added)
        part.graph.inputs.append(given)
    return part
