"""Decisions for a torch network (`quark.decide`), with facts that a plan does not contain: which places share a
quantizer, and which quantizers change nothing because the value went through the same one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from quark.decide import AffineSpec, Decision, Placement, Request, TensorSpec, is_derived_bias
from quark.decide.npu_positions import npu_operations
from quark.decide.scales import own_bias
from quark.decide.view import Graph, Node, Value
from quark.npu import Operation
from quark.plan import BlockChoice, Choice, QuantizationPlan, Reader, Role, TensorChoice
from quark.rounded import rounded


@dataclass(frozen=True)
class Chosen:
    """One decision: the quantizer of that name stands there. `is_repeated`: the operator before it only moved values
    that went through the same quantizer, so that nothing changes, and training does without."""

    request: Request
    choice: Choice
    reason: str
    quantizer: str
    is_repeated: bool = False


@dataclass(frozen=True)
class Decisions:
    """All of them, in the order of the graph."""

    chosen: tuple[Chosen, ...]
    placement: Placement

    @property
    def plan(self) -> QuantizationPlan:
        """One entry for all readers that see a tensor the same way."""
        merged: dict[tuple[str, Role, Choice], TensorChoice] = {}
        for entry in self.chosen:
            key = (entry.request.tensor, entry.request.role, entry.choice)
            first = merged.get(key) or TensorChoice(*key, (), entry.reason)
            merged[key] = replace(first, readers=(*first.readers, entry.request.reader))
        return QuantizationPlan(tuple(merged.values()), self.placement.skipped)


def with_quantizers(graph: Graph, placement: Placement, decided: Iterable[Decision]) -> Decisions:
    """The decisions with a name for every quantizer: that of the first tensor of its group, or of the parameter."""
    names: dict[object, str] = {}
    chosen = []
    for decision in decided:
        request = decision.request
        spec: TensorSpec = request.spec
        is_shared = isinstance(spec, AffineSpec)
        first = placement.groups.members((request.tensor, spec))[0][0] if is_shared else request.tensor
        block = decision.choice if isinstance(decision.choice, BlockChoice) else None
        key = (first, spec, block, None if request.role is Role.ACTIVATION else request.consumer)
        if key not in names:
            plain = first.replace(".", "_")
            taken = set(names.values())
            numbered = (f"{plain}_{number}" for number in range(2, len(taken) + 3))
            # a node may be called `to`, like a method of modules
            is_free = plain not in taken and not hasattr(nn.Module, plain)
            names[key] = (
                plain if is_free else next(numbered_name for numbered_name in numbered if numbered_name not in taken)
            )
        chosen.append(Chosen(request, decision.choice, decision.reason, names[key]))
    read = {entry.request.reader: entry.quantizer for entry in chosen}
    marked = []
    for entry in chosen:
        tensor = entry.request.tensor
        writer = graph.by_name.get(tensor)
        places = [] if writer is None else [i for i, value in enumerate(writer.inputs) if value is not None]
        before = [read.get(Reader(tensor, index)) for index in places]
        is_moved = tensor in placement.derived and bool(before)
        marked.append(
            replace(
                entry,
                is_repeated=is_moved and all(quantizer == entry.quantizer for quantizer in before),
            )
        )
    return Decisions(tuple(marked), placement)


def operations_of(graph: Graph, decisions: Decisions) -> tuple[Operation, ...]:
    """The operators that the rules of `quark.npu` apply to, by the names of quantizers. They depend on where quantizers
    are and not on their numbers; `train/networks.py` uses them when the network is quantized, and again after training
    has moved the numbers."""
    read = {entry.request.consumer: entry.quantizer for entry in decisions.chosen}
    written = {entry.request.tensor: entry.quantizer for entry in decisions.chosen}
    return tuple(npu_operations(graph, _Names(read, written)))


@dataclass(frozen=True)
class _Names:
    """See `quark.decide.npu_positions.Quantizers`."""

    reads: Mapping[Reader, str]
    writes: Mapping[str, str]

    def read(self, node: Node, index: int) -> str | None:
        return self.reads.get(Reader(node.name, index))

    def written(self, value: Value) -> str | None:
        return self.writes.get(value.name)

    def source(self, value: Value) -> Value:
        return value


def bias_roundings(placement: Placement) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """For every layer whose bias is an integer with a scale of its own: what becomes of a bias of such values."""

    def rounding(spec: AffineSpec) -> Callable[[torch.Tensor], torch.Tensor]:
        def kept(values: torch.Tensor) -> torch.Tensor:
            array = values.detach().float().cpu().numpy()
            return torch.from_numpy(rounded(array, own_bias(spec, array))).to(values)

        return kept

    return {
        request.consumer.node: rounding(request.spec)
        for request in placement.requests
        if request.role is Role.BIAS and isinstance(request.spec, AffineSpec) and not is_derived_bias(request)
    }
