"""The bodies of If, Loop and Scan, quantized like the main graph: each is a graph of its own (EnableSubgraph).

A body is placed, its ranges are measured inside the running float model, and its plan is chosen and inserted, as in the
main graph. What it reads from outside is an input to it. A body that no sample reaches stays in float.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from quark.decide import Placement, RangeKey, choose, limit_positions, place, tensors_to_measure
from quark.onnx.calibrate import FloatRunner
from quark.onnx.calibrate.bodies import with_lifted_tensors
from quark.onnx.data import Samples
from quark.onnx.deciding import measure
from quark.onnx.graph import as_model, bodies, fresh_name
from quark.onnx.insert import insert
from quark.onnx.settings import Settings
from quark.onnx.simulate import simulate
from quark.onnx.view import view_of
from quark.plan import QuantizationPlan, Reader, SkippedNode, TensorChoice
from quark.ranges import TensorRange

Ranges = Mapping[RangeKey, TensorRange]


@dataclass(frozen=True, eq=False)
class Body:
    """`model` has the body as its graph; `holder` is the If, Loop or Scan."""

    model: ir.Model
    holder: ir.Node
    placement: Placement

    def reported(self, tensor: TensorChoice) -> TensorChoice:
        """Return the choice as the report lists it: an output of a body is not an output of the main graph."""
        name = f"{self.holder.name}/{self.model.graph.name}"
        readers = [Reader(name, reader.index) if reader.is_graph_output else reader for reader in tensor.readers]
        return replace(tensor, readers=tuple(readers))


def place_bodies(model: ir.Model, settings: Settings, names: Iterable[str]) -> list[Body]:
    """Decide where quantizers go in every body, innermost first; returns none unless EnableSubgraph is set.

    Values get names that are unique across all graphs, since two branches may use the same ones. `names` are the other
    nodes that options may refer to.
    """
    if not settings.choose.selection.has_bodies:
        return []
    _make_names_unique(model)
    known = [*names, *(str(node.name) for node in model.graph.all_nodes())]
    inner = []
    for body, holder in bodies(model.graph):
        part = as_model(model, body)
        inner.append(Body(part, holder, place(view_of(part), settings.choose, vanished=known)))
    return inner


def measure_bodies(
    model: ir.Model, inner: Sequence[Body], samples: Samples, settings: Settings, known: Ranges
) -> dict[RangeKey, TensorRange]:
    """Return the known ranges together with those that the bodies need."""
    wanted = dict.fromkeys(key for body in inner for key in tensors_to_measure(body.placement) if key not in known)
    if not wanted:
        return dict(known)
    lifted, names = with_lifted_tensors(model, dict.fromkeys(name for name, _ in wanted))
    with FloatRunner(lifted, names.values(), providers=settings.calibrate.providers) as runner:
        ranges = measure(runner, [(names[name], spec) for name, spec in wanted], samples, settings)
    return {**known, **{(name, spec): ranges[names[name], spec] for name, spec in wanted}}


def insert_bodies(model: ir.Model, inner: Sequence[Body], ranges: Ranges, settings: Settings) -> QuantizationPlan:
    """Choose and insert quantizers in every body, before the main graph; returns the plans as one."""
    tensors: list[TensorChoice] = []
    skipped: list[SkippedNode] = []
    for body in inner:
        plan = _plan(body, ranges, settings)
        tensors += [body.reported(tensor) for tensor in plan]
        skipped += plan.skipped
        if plan.tensors:
            insert(body.model, plan, settings.insert)
            model.opset_imports.update(body.model.opset_imports)
    return QuantizationPlan(tuple(tensors), tuple(skipped))


def _plan(body: Body, ranges: Ranges, settings: Settings) -> QuantizationPlan:
    options = settings.choose
    own = {str(value.name) for node in body.model.graph for value in node.outputs}
    seen = [ranges[key] for key in tensors_to_measure(body.placement) if key[0] in own]
    if seen and all(range_.lowest == range_.highest == 0 for range_ in seen):
        reason = f"no calibration sample reaches this part of {body.holder.op_type} '{body.holder.name}'"
        nodes = [SkippedNode(str(node.name), node.op_type, reason) for node in body.model.graph]
        return QuantizationPlan((), tuple(nodes))
    simulate(body.model, settings.simulate, [skipped.node for skipped in body.placement.skipped])
    view = view_of(body.model)
    plan = choose(view, body.placement, ranges, options)
    if options.positions is not None:
        plan, _ = limit_positions(view, plan, options.positions)
    return plan


def joined(plan: QuantizationPlan, inner: QuantizationPlan) -> QuantizationPlan:
    """The plans of the main graph and of the bodies as one, for the report."""
    return replace(plan, tensors=(*plan.tensors, *inner.tensors), skipped=(*plan.skipped, *inner.skipped))


def _make_names_unique(model: ir.Model) -> None:
    seen: set[str] = set()
    for graph in model.graphs():
        for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)):
            if value.name in seen and not (value.is_graph_input() and value.is_initializer()):
                value.name = fresh_name(model, str(value.name))
            seen.add(str(value.name))
