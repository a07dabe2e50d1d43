"""What is the matter with a layer, in words: the likeliest cause first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from quark.onnx.diagnose.layer_facts import LayerFacts
from quark.onnx.diagnose.operands import Kind

MUCH_CLIPPED = 0.005
LONG_TAIL = 16.0
WIDE_SPREAD = 32.0
FEW_PRODUCTS = 32
FEW_BITS = 6
FINE_DB = 35.0  # a layer that is this exact needs no explanation
CLOSE_DB = 4.0  # what is within this of the layer's error makes up most of it
LARGE_SHARE = 0.05


def is_clipped(facts: LayerFacts) -> bool:
    return facts.clipped is not None and facts.clipped >= MUCH_CLIPPED


def has_long_tail(facts: LayerFacts) -> bool:
    """Outliers that take the levels from everything else; blocks have scales of their own."""
    data = facts.site.inputs[0] if facts.site.inputs else None
    is_coarse = data is not None and data.kind is Kind.AFFINE and data.element_bits <= 8
    return is_coarse and not is_clipped(facts) and facts.tail is not None and facts.tail >= LONG_TAIL


def has_uneven_channels(facts: LayerFacts) -> bool:
    weight = facts.site.weight
    has_one_scale = weight is not None and weight.kind is Kind.AFFINE and weight.has_one_scale
    return has_one_scale and (facts.dead > 0 or (facts.spread is not None and facts.spread >= WIDE_SPREAD))


def is_rounded_weight(facts: LayerFacts) -> bool:
    """That the weight by itself accounts for the error."""
    return facts.weight_db is not None and facts.weight_db <= facts.local.sqnr_db + CLOSE_DB


def is_rounded_input(facts: LayerFacts) -> bool:
    return facts.input_db is not None and facts.input_db <= facts.local.sqnr_db + CLOSE_DB


def is_rounded_bias(facts: LayerFacts) -> bool:
    """That a bias of few bits is what remains to account for the error."""
    is_other = not (
        is_rounded_weight(facts) or is_rounded_input(facts) or is_clipped(facts) or has_uneven_channels(facts)
    )
    return is_other and facts.weight_db is not None and facts.input_db is not None and _bias_bits(facts) <= 8


def _bias_bits(facts: LayerFacts) -> float:
    site = facts.site
    return min((each.element_bits for each in site.operands if each.is_constant and site.is_bias(each)), default=32.0)


def find_causes(facts: LayerFacts, share: float | None) -> tuple[str, ...]:
    """Nothing for a layer that is exact enough."""
    is_costly = share is not None and share >= LARGE_SHARE
    if facts.local.sqnr_db >= FINE_DB and not is_costly:
        return ()
    found = [*_about_scales(facts), *_about_rounding(facts)]
    if facts.local.sqnr_db == -math.inf:
        found.insert(0, "what it computes is not finite, or nothing like the float network's")
    elif not found:
        found += _about_the_rest(facts)
    if share is not None and is_costly and facts.local.sqnr_db >= 20:
        found.append(
            f"the network takes its error badly: {facts.local.sqnr_db:.0f} dB are {100 * share:.0f} % of the damage"
        )
    return tuple(found)


def _about_scales(facts: LayerFacts) -> Iterator[str]:
    if has_uneven_channels(facts):
        if facts.dead:
            yield f"{facts.dead} of {facts.channels} channels of the weight became zero: they share one scale"
        if facts.spread is not None and facts.spread >= WIDE_SPREAD:
            yield f"channels of the weight differ {facts.spread:.0f}-fold under one scale"
    if facts.clipped is not None and is_clipped(facts):
        yield f"{100 * facts.clipped:.1f} % of the inputs are clipped"
    if facts.tail is not None and has_long_tail(facts):
        yield f"the largest input is {facts.tail:.0f} times the 99.9th percentile: few levels for the rest"


def _about_rounding(facts: LayerFacts) -> Iterator[str]:
    weight = facts.site.weight
    if weight is not None and 0 < facts.products <= FEW_PRODUCTS and weight.element_bits <= FEW_BITS:
        yield f"a sum has {facts.products} products only: {weight.element_bits:.0f}-bit rounding does not average out"
    if weight is not None and facts.weight_db is not None and is_rounded_weight(facts):
        yield f"rounding the weight to {weight.format} alone leaves {facts.weight_db:.1f} dB"
    if facts.input_db is not None and is_rounded_input(facts):
        yield f"rounding its input to {facts.site.inputs[0].format} alone leaves {facts.input_db:.1f} dB"


def _about_the_rest(facts: LayerFacts) -> Iterator[str]:
    if facts.site.is_result_rounded:
        yield "its result is quantized too, and may be clipped"
    elif is_rounded_bias(facts):
        yield f"neither its weight nor its input accounts for it, and its bias has {_bias_bits(facts):.0f} bits"
