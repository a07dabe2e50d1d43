"""Cross-layer equalization of a graph: channels between layers are rescaled so that weights quantize better.

Regions (regions.py) say what has to be scaled together, quark.equalization.cross_layer which scales are wanted. The
function of the float network stays; only a Clip needs care (ClipTreatment).
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from quark.account import AlgorithmFacts
from quark.equalization.cross_layer import MAX_SWEEPS
from quark.equalization.rescaling import sweep
from quark.onnx.equalize.apply_scales import apply_scales
from quark.onnx.equalize.bias_absorption import absorb, absorbed_tensor, reason_against_absorbing
from quark.onnx.equalize.clip_limits import Extremes, limits_of_clips, reason_against_clips
from quark.onnx.equalize.options import ClipTreatment, CrossLayerOptions
from quark.onnx.equalize.regions import Region, find_regions
from quark.onnx.equalize.rescaling import Rescaling, Weights, chains_of
from quark.plan import SkippedNode

NAME = "cross-layer equalization"


def clip_tensors(model: ir.Model, options: CrossLayerOptions) -> dict[str, int]:
    """The tensors whose extremes equalization wants to know, each with the axis of its channels: what goes into a Clip
    that stays as it is, and what biases may be absorbed from."""
    wanted: dict[ir.Value, int] = {}
    for region in find_regions(model):
        if region.obstacle is not None or not region.sinks:
            continue
        tensors: list[ir.Value | None] = []
        if options.clip is ClipTreatment.CALIBRATED:
            tensors += [clip.inputs[0] for clip in region.clips]
        if options.has_bias_absorption and reason_against_absorbing(region) is None:
            tensors.append(absorbed_tensor(region))
        wanted |= {value: region.members[value].axis for value in tensors if value is not None}
    return {str(value.name): axis for value, axis in wanted.items()}


def equalize_cross_layer(model: ir.Model, options: CrossLayerOptions, extremes: Extremes) -> AlgorithmFacts:
    """Equalize in place; `extremes` are the lowest and highest values by channel of what `clip_tensors` asked for."""
    regions, left = _possible(find_regions(model), options, extremes)
    weights = Weights()
    rescalings = [Rescaling(region, weights, options) for region in regions]
    if options.clip is ClipTreatment.CALIBRATED:
        for each in rescalings:
            each.limit(*limits_of_clips(each.region, extremes))
    chains = chains_of(rescalings)
    for _ in range(MAX_SWEEPS if options.steps < 0 else options.steps):
        if sweep(chains, options.weight_threshold) < options.settled_at:
            break
    apply_scales(model, rescalings, weights)
    changed = [_phrase(each) for each in rescalings if each.is_changed]
    why = "its channels are as even as they can be" if options.steps else "CLESteps is 0: nothing may be rescaled"
    left += [_left(each.region, why) for each in rescalings if not each.is_changed]
    if options.has_bias_absorption:
        absorbed, not_absorbed = _absorb(model, rescalings, extremes)
        changed, left = changed + absorbed, left + not_absorbed
    return AlgorithmFacts(NAME, tuple(changed), tuple(left))


def _absorb(
    model: ir.Model, rescalings: Sequence[Rescaling], extremes: Extremes
) -> tuple[list[str], list[SkippedNode]]:
    changed, left = [], []
    for each in rescalings:
        reason = reason_against_absorbing(each.region)
        known = extremes.get(str(absorbed_tensor(each.region).name)) if reason is None else None
        if known is None:
            left.append(_left(each.region, f"bias not absorbed: {reason or 'its values were not measured'}"))
            continue
        count = absorb(model, each.region, known[0] / each.scales)
        if count:
            changed.append(f"{_ends(each.region)}: biases of {count} channels absorbed")
    return changed, left


def _possible(
    regions: Sequence[Region], options: CrossLayerOptions, extremes: Extremes
) -> tuple[list[Region], list[SkippedNode]]:
    possible, left = [], []
    for region in regions:
        reason = _reason_against(region, options, extremes)
        if reason is None:
            possible.append(region)
        else:
            left.append(_left(region, reason))
    return possible, left


def _reason_against(region: Region, options: CrossLayerOptions, extremes: Extremes) -> str | None:
    if region.obstacle is not None:
        where = f"'{region.obstacle.node}': " if region.obstacle.node else ""
        return f"{where}{region.obstacle.reason}"
    if not region.sources or not region.sinks:
        return "no layer reads its channels"
    if region.clips and options.clip is ClipTreatment.SKIP:
        return f"'{next(iter(region.clips)).name}': a Clip that is left as it is"
    return reason_against_clips(region, extremes) if options.clip is ClipTreatment.CALIBRATED else None


def _left(region: Region, reason: str) -> SkippedNode:
    node = next(iter(region.sources), None) or next(iter(region.members)).producer()
    assert node is not None
    return SkippedNode(str(node.name), node.op_type, reason)


def _phrase(each: Rescaling) -> str:
    low, high = each.scales.min(), each.scales.max()
    return f"{_ends(each.region)}: {each.region.count} channels, scales {low:.2g}..{high:.2g}"


def _ends(region: Region) -> str:
    return " -> ".join(_listed([str(node.name) for node in side]) for side in (region.sources, region.sinks))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
