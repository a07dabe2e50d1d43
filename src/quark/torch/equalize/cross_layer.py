"""Cross-layer equalization of a network: channels between layers are rescaled so that weights quantize better.

Regions (regions.py) say what has to be scaled together, quark.equalization which scales are wanted. The function of the
float network stays. A batch norm that belongs to a layer takes the division, so that training goes on from there:

    y / s = (gamma / s) * (conv(x) - mean) / deviation + beta / s

An activation that clips to 0..c stays as it is: channels that reach c on the data are held, others are rescaled as far
as they keep below it (quark.equalization.clip_limits).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from quark.account import AlgorithmFacts
from quark.equalization.clip_limits import MAX_AT_WORK, share_at_work
from quark.equalization.cross_layer import MAX_SWEEPS
from quark.equalization.rescaling import chains_of, sweep
from quark.plan import SkippedNode
from quark.torch.equalize.options import CrossLayerOptions
from quark.torch.equalize.passages import name_of
from quark.torch.equalize.regions import Region, find_regions
from quark.torch.equalize.rescaling import Extremes, Rescaling, Weights, apply_scales, following_sets
from quark.torch.graph import layer_name

NAME = "cross-layer equalization"
WEIGHT_THRESHOLD = 0.5  # channels whose ranges add up to less are no trouble to anyone
SETTLED_AT = 1.9e-7  # mean change of the scales


def clip_tensors(network: fx.GraphModule, options: CrossLayerOptions) -> dict[str, int]:
    """The tensors whose extremes equalization wants to know, each with the axis of its channels: what goes into an
    activation that clips."""
    regions = [each for each in find_regions(network) if each.obstacle is None and each.sinks]
    inputs = [(clip.all_input_nodes[0], region) for region in regions for clip in region.clips]
    return {str(value.name): region.members[value].axis for value, region in inputs}


def equalize_cross_layer(network: fx.GraphModule, options: CrossLayerOptions, extremes: Extremes) -> AlgorithmFacts:
    """Equalize in place; `extremes` are the lowest and highest values by channel of what `clip_tensors` asked for."""
    possible: list[Region] = []
    left: list[SkippedNode] = []
    for region in find_regions(network):
        reason = _reason_against(region, extremes)
        if reason is None:
            possible.append(region)
        else:
            left.append(_left(network, region, reason))
    weights = Weights()
    rescalings = [Rescaling(region, weights, extremes) for region in possible]
    chains = chains_of(rescalings, following_sets(rescalings))
    for _ in range(MAX_SWEEPS if options.steps < 0 else options.steps):
        if sweep(chains, WEIGHT_THRESHOLD) < SETTLED_AT:
            break
    apply_scales(rescalings, weights)
    even = [each.region for each in rescalings if not each.is_changed]
    left += [_left(network, region, "its channels are as even as they can be") for region in even]
    return AlgorithmFacts(NAME, tuple(_phrase(each) for each in rescalings if each.is_changed), tuple(left))


def _reason_against(region: Region, extremes: Extremes) -> str | None:
    if region.obstacle is not None:
        return region.obstacle
    if not region.sources or not region.sinks:
        return "no layer reads its channels"
    for clip, bound in region.clips.items():
        known = extremes.get(clip.all_input_nodes[0].name)
        if known is None:
            return f"'{layer_name(clip)}': the values that it clips were not measured"
        share = share_at_work(known[1], bound)
        if share > MAX_AT_WORK:
            return f"'{layer_name(clip)}': it clips in {share:.0%} of the channels"
    return None


def _left(network: fx.GraphModule, region: Region, reason: str) -> SkippedNode:
    node = next(iter(region.sources or region.members))
    return SkippedNode(layer_name(node), name_of(network, node), reason)


def _phrase(each: Rescaling) -> str:
    low, high = each.scales.min(), each.scales.max()
    ends = " -> ".join(_listed(side) for side in (each.region.sources, each.region.sinks))
    return f"{ends}: {each.region.count} channels, scales {low:.2g}..{high:.2g}"


def _listed(nodes: Iterable[fx.Node]) -> str:
    names = [layer_name(node) for node in nodes]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
