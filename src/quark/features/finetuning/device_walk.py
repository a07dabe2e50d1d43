"""A walk whose tensors stay on the GPU that trains, computed by torch for many samples at once.

ONNX Runtime would have to open a session for every part of the network, and prepare its kernels again in each, which
takes longer than computing the parts. torch computes the same nodes (network.py) without any preparation, and no tensor
leaves the GPU. Samples are joined along their first axis. `why_not` says which networks and samples do not allow that;
they are walked through one by one, in ONNX Runtime (walk.py). Tensors that would take too much of the GPU's memory are
kept in main memory or in files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import onnx_ir as ir
import torch

from quark.errors import ModelError
from quark.features.finetuning.network import OnnxNetwork, Place, stacked, tensor_float32
from quark.features.finetuning.walk import See, Walk, numbers_of, with_rounded_constants
from quark.onnx.graph import add_node, input_value, piece, replace_input
from quark.plan import Choice, DynamicChoice, QuantizationPlan, Role

Roundings = Mapping[Place, Sequence[Choice]]
TOGETHER = 64  # samples of a run at most
FEWEST_TOGETHER = 32  # rather than this few, the last run has fewer samples than the others
MOST_MEMORY = 0.3  # share of the device's free memory that one walk may use
MOST_ERROR = 1e-3  # of the squares: rounding to another code now and then, not another function


def network_with_roundings(model: ir.Model, plan: QuantizationPlan) -> tuple[ir.Model, Roundings]:
    """What the quantized network computes, as torch computes it: a copy in which rounded activations are outputs of
    Identity nodes, with how the input of each is rounded. Constants are rounded, and can still change."""
    copy = with_rounded_constants(model.clone(), plan)
    nodes = {str(node.name): node for node in copy.graph}
    roundings: dict[Place, Sequence[Choice]] = {}
    for entry in plan:
        choices = [choice for choice in (entry.first, entry.choice) if choice is not None]
        places = [reader for reader in entry.readers if reader.node in nodes]
        if (
            entry.role is not Role.ACTIVATION
            or not places
            or any(isinstance(choice, DynamicChoice) for choice in choices)
        ):
            continue
        source = input_value(nodes[places[0].node], places[0].index)
        assert source is not None, entry.tensor
        first = next(node for node in copy.graph if any(node is nodes[place.node] for place in places))
        identity = add_node(copy, "Identity", [source], before=first, name=f"{entry.tensor}_rounded")
        identity.outputs[0].shape = source.shape
        roundings[str(identity.name), 0] = tuple(choices)
        for place in places:
            replace_input(nodes[place.node], place.index, identity.outputs[0])
    return copy, roundings


@torch.no_grad()
def why_not(model: ir.Model, roundings: Roundings, samples: Any, device: str) -> str | None:
    """Why torch cannot walk through a network with joined samples; None if it can."""
    every = (samples[index] for index in range(len(samples)))
    kinds = {tuple((name, array.dtype.kind, array.shape) for name, array in sample.items()) for sample in every}
    if len(samples) < 2:
        return "there are fewer than two"
    if len(kinds) > 1:
        return "they differ in shape"
    for name, kind, shape in kinds.pop():
        if kind not in "fiub" or not shape:
            return f"input '{name}' has no first axis, or its numbers are of a type that torch does not have"
    where, first_two = torch.device(device), [samples[0], samples[1]]
    try:
        network = OnnxNetwork(model, roundings).to(where)
        tensors = [str(value.name) for node in model.graph for value in node.outputs]
        with tensor_float32(is_on=False):
            alone, both = (network.tensors(stacked(batch, where), tensors) for batch in (first_two[1:], first_two))
    except ModelError as error:
        return str(error)
    for name, own in alone.items():
        if not own.is_floating_point():  # shapes, which belong to the samples that are computed together
            continue
        joined = both[name]
        if joined.dim() == 0 or joined.shape != (2 * own.shape[0], *own.shape[1:]):
            return f"'{name}' does not have the samples along its first axis"
        difference = (joined[len(own) :] - own).double().square().sum()
        if not difference <= MOST_ERROR * own.double().square().sum():  # NaN is no agreement
            return f"'{name}' has other values if samples are computed together"
    return None


class DeviceWalk(Walk):
    """A walk on the device that trains. `roundings` are those of `network_with_roundings`."""

    def __init__(
        self,
        model: ir.Model,
        samples: Any,
        make_store: Callable[[], Any],
        *,
        device: str,
        roundings: Roundings = MappingProxyType({}),
    ) -> None:
        self._roundings, self._device = roundings, torch.device(device)
        super().__init__(model, samples, make_store, little=int(MOST_MEMORY * free_memory(self._device)))
        count = len(samples)
        size = together(count)
        self._groups = [range(start, min(start + size, count)) for start in range(0, count, size)]
        if count and count * sum(array.nbytes for array in samples[0].values()) <= self._little:
            self._samples, self._is_own = _Remembered(self._groups), True
            for group in self._groups:
                self._samples.keep(group, stacked([samples[index] for index in group], self._device))

    def visit(self, tensors: Sequence[str], see: See) -> None:
        known = [name for name in tensors if name in self._names]
        computed = [name for name in tensors if name not in self._names]
        network, read = None, known
        if computed:
            part = piece(self.model, self._names, computed)
            network = OnnxNetwork(part, self._roundings).to(self._device)
            inputs = {str(value.name) for node in part.graph for value in node.inputs if value is not None}
            read = list(dict.fromkeys([*known, *(name for name in network.input_names if name in inputs)]))
        with torch.no_grad(), tensor_float32(is_on=False):
            for number, group in enumerate(self._groups):
                held = self._held(number, read)
                values = {name: held[name] for name in known}
                see(group, values if network is None else {**values, **network.tensors(held, computed)})

    def _held(self, number: int, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """The tensors that are kept for a group of samples, on the device."""
        if isinstance(self._samples, _Remembered):
            return self._samples.groups[number]
        samples = [self._samples[index] for index in self._groups[number]]
        return stacked([{name: sample[name] for name in names} for sample in samples], self._device)

    def _remembered(self, tensors: Sequence[str], others: Sequence[str] = (), see: See | None = None) -> Any:
        values = [self.value(name) for name in tensors]
        needed = 4 * len(self._samples) * sum(map(numbers_of, values))
        are_shapes = any(value is not None and value.dtype not in (None, ir.DataType.FLOAT) for value in values)
        # shapes belong to a group of samples, so they cannot be kept sample by sample
        if needed > MOST_MEMORY * free_memory(self._device) and not are_shapes:
            return super()._remembered(tensors, others, see)
        store = _Remembered(self._groups)

        def keep(samples: range, values: Mapping[str, Any]) -> None:
            store.keep(samples, {name: values[name] for name in tensors})
            if see is not None:
                see(samples, values)

        self.visit(list(dict.fromkeys([*tensors, *others])), keep)
        return store

    def empty(self, count: int) -> Any:
        return torch.empty(count, device=self._device)


class _Remembered:
    """Tensors of all samples on the device, by group; as a store, the samples one by one as arrays."""

    def __init__(self, groups: Sequence[range]) -> None:
        self._ranges = list(groups)
        self.groups: list[dict[str, torch.Tensor]] = [{} for _ in groups]

    def keep(self, samples: range, values: Mapping[str, Any]) -> None:
        """Keep the values of a group."""
        self.groups[self._ranges.index(samples)] = dict(values)

    def __len__(self) -> int:
        return sum(map(len, self._ranges))

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = next(number for number, range_ in enumerate(self._ranges) if index in range_)
        place, count = index - self._ranges[number][0], len(self._ranges[number])
        group = self.groups[number].items()
        return {name: value.tensor_split(count)[place].cpu().numpy() for name, value in group}

    def close(self) -> None:
        self.groups.clear()


def together(count: int) -> int:
    """The number of samples in a run, so that every run has as many if possible: a GPU prepares its kernels again for
    each batch size.

    >>> together(1000), together(128), together(61), together(67)
    (50, 64, 61, 64)
    """
    sizes = range(min(TOGETHER, count), min(FEWEST_TOGETHER, count) - 1, -1)
    return next((size for size in sizes if size and count % size == 0), TOGETHER)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device; the processor's memory is not limited here."""
    return sys.maxsize if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0])
