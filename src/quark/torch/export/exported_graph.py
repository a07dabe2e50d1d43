"""A network as an onnx_ir graph with the plan in its names: translated, cleaned, named, the taps read and removed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch
from torch import fx

from quark.onnx.load import load
from quark.onnx.optimize import REWRITES, OptimizeOptions, optimize
from quark.plan import QuantizationPlan, TensorChoice
from quark.torch.export.added_biases import add_biases_apart
from quark.torch.export.integer_kernels import kernel_choices
from quark.torch.export.names import give_names
from quark.torch.export.narrow_codes import clip_narrow_codes
from quark.torch.export.opset import choose_opset
from quark.torch.export.plan_of_taps import remove_taps
from quark.torch.export.pooled_values import choices_of_pools
from quark.torch.export.taps import with_taps
from quark.torch.export.translate import translate

# Exact rewrites that leave quantizers where they are, for the sake of integer kernels and NPUs.
_REWRITES = frozenset(
    {
        *("remove_identity", "fold_constants", "fuse_gelu", "fuse_pad_into_conv", "relu_forms", "clip_to_relu"),
        "reduce_mean_to_global_average_pool",
    }
)


@dataclass(frozen=True, eq=False)
class ExportedGraph:
    """The float graph, not yet quantized, the plan for it, and its computed values by the names that torch has;
    not those that are rounded for an integer kernel's sake."""

    model: ir.Model
    plan: QuantizationPlan
    values: Mapping[str, ir.Value]


def exported_graph(
    network: fx.GraphModule, example: Sequence[torch.Tensor], *, opset: int | None, has_dynamic_batch: bool
) -> ExportedGraph:
    """What the network computes without its quantizers, and the plan that says where they were."""
    tapped, taps = with_taps(network)
    choices = [tap.choice for tap in taps if tap.choice is not None]
    is_half = any(each.dtype is torch.float16 for each in (*example, *network.parameters()))
    version = choose_opset(choices, is_half=is_half, wanted=opset)
    proto = translate(tapped, example, opset=version, has_dynamic_batch=has_dynamic_batch)
    model = load(proto).model
    if choices:
        optimize(model, OptimizeOptions(disabled=frozenset(each.name for each in REWRITES) - _REWRITES))
    reasons = {each.tensor: each.reason for each in _plan_of(network)}
    places = remove_taps(model, taps)
    give_names(model)
    planned = places.plan(reasons)
    moved = add_biases_apart(model, planned)
    plan = clip_narrow_codes(model, planned)
    pooled = choices_of_pools(model, plan, places.values.values())
    added = {**kernel_choices(model, plan), **pooled}
    computed = {tensor: moved.get(value, value) for tensor, value in places.values.items()}
    others = {tensor: value for tensor, value in computed.items() if value.name not in added}
    values = {tensor: value for tensor, value in others.items() if not _is_moved_from(value, pooled)}
    return ExportedGraph(model, replace(plan, tensors=(*plan.tensors, *added.values())), values)


def _is_moved_from(value: ir.Value, tensors: Collection[str]) -> bool:
    """That the value is one of these, in another shape."""
    producer = value.producer()
    source = producer.inputs[0] if producer is not None and producer.inputs else None
    return source is not None and source.name in tensors


def _plan_of(network: fx.GraphModule) -> Iterable[TensorChoice]:
    """The plan that a frozen network carries; a float one has none."""
    plan = getattr(network, "plan", None)
    return plan if isinstance(plan, QuantizationPlan) else ()
