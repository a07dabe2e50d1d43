"""From ranges to the final choices, and the state of a run that features receive (features/order.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from quark.account import AlgorithmFacts
from quark.decide import Placement, decide
from quark.npu import Operation
from quark.plan import Reader
from quark.ranges import TensorRange
from quark.torch.capture import Batches
from quark.torch.decisions import Chosen, Decisions, operations_of, with_quantizers
from quark.torch.graph import Network
from quark.torch.observe import RangeKey
from quark.torch.specs import Settings
from quark.torch.train.networks import settle_positions
from quark.torch.view import view_of


@dataclass(eq=False)
class Work:
    """A float network that is being quantized. `batches` is None if no calibration data was given."""

    network: Network
    batches: Batches | None
    settings: Settings


@dataclass(eq=False)
class Decision(Work):
    """A float network with the choices that were made from its ranges, within an NPU's limits if it is for one. With
    `starts_late`, activations have no ranges yet, so `freeze` is the first to look at the limits."""

    placement: Placement
    ranges: Mapping[RangeKey, TensorRange]
    starts_late: bool = False
    decisions: Decisions = field(init=False)
    exact: Network | None = None  # the float network, if a feature has rounded weights in the other one
    kept: Mapping[Reader, Chosen] = field(default_factory=dict)  # for weights that were rounded, by their consumer
    operations: tuple[Operation, ...] = field(init=False, default=())
    positions: tuple[AlgorithmFacts, ...] = field(init=False, default=())  # changes made for an NPU's limits

    def __post_init__(self) -> None:
        self.choose()

    def choose(self) -> None:
        """Choose; once more after a feature has changed constants whose scales should follow."""
        graph = view_of(self.network)
        kept = {reader: (entry.choice, entry.reason) for reader, entry in self.kept.items()}
        decided = decide(graph, self.placement, self.ranges, self.settings.choose, kept)
        self.decisions = with_quantizers(graph, self.placement, decided)
        if not self.settings.applies_npu_rules:
            return
        self.operations = operations_of(graph, self.decisions)
        if self.starts_late:
            return
        choices = {entry.quantizer: entry.choice for entry in self.decisions.chosen}
        moved, facts = settle_positions(self.operations, choices)
        chosen = (replace(entry, choice=moved.get(entry.quantizer, entry.choice)) for entry in self.decisions.chosen)
        self.decisions, self.positions = replace(self.decisions, chosen=tuple(chosen)), (facts,)
