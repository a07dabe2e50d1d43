"""What the error of a layer costs: how far the network's output moves when that layer alone is quantized.

The error of a layer, given the float network's tensors, is added to its result in the float network, and the rest of
that is run. Layers go in groups; a group has three pieces, each begun at tensors that are remembered for the samples:

    before   the float network from the start of the group to its end: what its layers read and give
    layers   the quantized layers of the group
    rest     the float network from the start of the group to the output, with an Add behind each layer's result, whose
             other operand is 0 but for the layer in question

so that the network is run a little more than half for a layer. The measure for outputs [n, classes] is the divergence
of the predictions, sum p log(p / q), the mean over rows; outputs that are no probabilities become so by softmax. For
others it is the squared error as a share of the power.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.data import Sample
from quark.onnx.data.store import SampleStore
from quark.onnx.diagnose.networks import give_types
from quark.onnx.diagnose.rescaling import Factors, times
from quark.onnx.diagnose.running import Run, each_in_order
from quark.onnx.diagnose.sites import Sites
from quark.onnx.diagnose.sums import pair_sums
from quark.onnx.graph import is_float
from quark.onnx.piece import COMPUTED, frontier, piece

Array = NDArray[Any]
GROUPS = 8
KL, SQUARED = "kl", "squared_error"


@dataclass(frozen=True)
class Sensitivities:
    """By tensor of the layer; `measure` is one of kl and squared_error, `output` is what was looked at."""

    values: dict[str, float]
    measure: str
    output: str
    samples: int


def find_sensitivities(
    exact: ir.Model, quantized: ir.Model, sites: Sites, factors: Factors, samples: Sequence[Sample]
) -> Sensitivities:
    """Of all layers, by the first output of the network that holds floats. Layers behind it, which other outputs come
    from, do not move it: they cost 0."""
    output = next(
        (str(value.name) for value in exact.graph.outputs if is_float(value)), str(exact.graph.outputs[0].name)
    )
    places = {str(value.name): index for index, node in enumerate(exact.graph) for value in node.outputs}
    tensors = [site.tensor for site in sites.sites]
    ends = sorted((name for name in tensors if places[name] <= places.get(output, -1)), key=places.__getitem__)
    groups = [
        [str(each) for each in group] for group in np.array_split(ends, min(GROUPS, len(ends) or 1)) if len(group)
    ]
    networks = _Networks(exact, quantized, sites, factors, places, output)
    totals: dict[str, float] = dict.fromkeys(tensors, 0.0)
    measure = ""
    remembered: Any = samples
    for number, group in enumerate(groups):
        to_come = [name for later in groups[number + 1 :] for name in later]
        read = _read_by_layers(quantized, sites, to_come)
        pieces = _Pieces(networks, group, remembered[0], read)
        following = SampleStore()

        def see(found: tuple[dict[str, float], str, dict[str, Array]], store: SampleStore = following) -> None:
            nonlocal measure
            measure = found[1]
            store.append(found[2])
            for name, value in found[0].items():
                totals[name] += value / len(samples)

        each_in_order(pieces.measure, (remembered[index] for index in range(len(samples))), see)
        if isinstance(remembered, SampleStore):
            remembered.close()
        remembered = following
    if isinstance(remembered, SampleStore):
        remembered.close()
    return Sensitivities(totals, measure, output, len(samples))


@dataclass(frozen=True)
class _Networks:
    """The two networks, what they have in common, where the nodes of the exact one stand, and the output looked at."""

    exact: ir.Model
    quantized: ir.Model
    sites: Sites
    factors: Factors
    places: dict[str, int]
    output: str


class _Pieces:
    """The three pieces of a group of layers, which begins with the tensors that `start` is an example of."""

    def __init__(self, networks: _Networks, group: Sequence[str], start: Sample, read_later: Collection[str]) -> None:
        exact, places, output = networks.exact, networks.places, networks.output
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
        self._rest = Run(_typed(_with_additions(piece(exact, list(start), [output]), group), types), "the float model")

    def measure(self, _: int, sample: Sample) -> tuple[dict[str, float], str, dict[str, Array]]:
        """Of one sample: what each layer costs, the measure, and what to remember for the groups to come."""
        values = {**sample}
        if self._before is not None:
            values |= self._before(sample, self._wanted)
        feeds = {name: self._scaled(name, values[name]) for name in self._layers.inputs}
        found = self._layers(feeds)
        additions = {addition(name): np.zeros(1, values[name].dtype) for name in self._group}
        reference = self._run_rest(sample, additions)
        costs: dict[str, float] = {}
        measure = measure_for(reference)
        for name in self._group:
            with np.errstate(invalid="ignore"):  # Inf less Inf is no number, and the output then none either
                error = self._unscaled(name, found[f"{name}{COMPUTED}"]) - values[name]
            moved = self._run_rest(sample, additions | {addition(name): error.astype(values[name].dtype)})
            costs[name] = distance(reference, moved)
        return costs, measure, {name: np.array(values[name]) for name in self._following}

    def _run_rest(self, sample: Sample, additions: dict[str, Array]) -> Array:
        return next(iter(self._rest({**sample, **additions}).values()))

    def _scaled(self, name: str, array: Array) -> Array:
        return times(array, self._factors.get(name), self._sites.channel_axis(name, array.ndim))

    def _unscaled(self, name: str, array: Array) -> Array:
        factors = self._factors.get(name)
        return times(array, None if factors is None else 1 / factors, self._sites.channel_axis(name, array.ndim))


def _read_by_layers(quantized: ir.Model, sites: Sites, tensors: Sequence[str]) -> list[str]:
    """What the layers that end in these tensors read."""
    return [str(value.name) for value in piece(quantized, sites.shared, tensors).graph.inputs] if tensors else []


def addition(name: str) -> str:
    return f"{name}/addition"


def measure_for(output: Array) -> str:
    return KL if output.ndim == 2 and output.shape[1] > 1 else SQUARED


def distance(exact: Array, moved: Array) -> float:
    """Of an output from the float network's; infinite where it is not finite.

    >>> distance(np.array([[0.0, 0.0]]), np.array([[0.0, 0.0]]))
    0.0
    """
    if not np.isfinite(moved).all():
        return float("inf")
    if measure_for(exact) == SQUARED:
        return pair_sums(exact, moved).relative_error
    p, q = log_probabilities(exact), log_probabilities(moved)
    return float(np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0.0).mean())


def log_probabilities(rows: Array) -> Array:
    """Of rows of probabilities as they are, of others by softmax."""
    wide = rows.astype(np.float64)
    if (wide >= 0).all() and np.allclose(wide.sum(axis=1), 1.0, atol=1e-3):
        return np.asarray(np.log(np.maximum(wide, 1e-12)))
    wide = wide - wide.max(axis=1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=1, keepdims=True)))


def _typed(part: ir.Model, types: dict[str, Any]) -> ir.Model:
    for value in part.graph.inputs:
        if value.type is None and value.name in types:
            value.type = ir.TensorType(ir.DataType.from_numpy(types[str(value.name)]))
    return part


def _with_additions(part: ir.Model, tensors: Sequence[str]) -> ir.Model:
    """An input for each of these tensors that is added to it, for all that read it."""
    values = {str(value.name): (node, value) for node in part.graph for value in node.outputs}
    for name in tensors:
        if name not in values:
            continue  # nothing that counts depends on it
        node, value = values[name]
        given = ir.Value(name=addition(name), type=value.type or ir.TensorType(ir.DataType.FLOAT))
        added = ir.Node("", "Add", [value, given], name=f"{name}/add")
        added.outputs[0].name, added.outputs[0].type = f"{name}/added", value.type
        value.replace_all_uses_with(added.outputs[0], replace_graph_outputs=True)
        added.replace_input_with(0, value)
        node.append(added)
        part.graph.inputs.append(given)
    return part
