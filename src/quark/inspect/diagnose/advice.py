"""Why a layer is inexact and what to do about it, and what a reader should know about the figures."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from quark.diagnosis import Action, LayerDiagnosis, Remedy, Step
from quark.inspect.diagnose.equalized import Factors
from quark.inspect.diagnose.files import Restored
from quark.inspect.diagnose.layer_facts import LayerFacts
from quark.inspect.diagnose.sensitivity import Sensitivities
from quark.inspect.diagnose.sites import Kind, Operand, Sites
from quark.report.quantities import count_of, listed
from quark.text import setting, shell_command

MUCH_CLIPPED = 0.005
LONG_TAIL = 16.0
WIDE_SPREAD = 32.0
FEW_PRODUCTS = 32
FEW_BITS = 6
FINE_DB = 35.0  # a layer this exact needs no explanation
CLOSE_DB = 4.0  # causes within this of the layer's error make up most of it
LARGE_SHARE = 0.05
WORST = 3
WORTH_IT = 0.25  # share of the output error that the worst layers cause
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
PRODUCTS = frozenset({"MatMul", "Gemm"})
# the next wider element of OCP's formats, as the option has it
WIDER_ELEMENTS = {"mxfp4_e2m1": "fp6_e2m3", "mxfp6_e2m3": "int8", "mxfp6_e3m2": "fp8_e4m3", "mxfp8_e5m2": "fp8_e4m3"}
WIDER_MICROEXPONENTS = {"mx4": 13, "mx6": 16}
LONGEST_KEY = 1000  # YAML, which --set reads, takes keys of up to 1024 characters


# --- conditions that causes and remedies share ------------------------------------------------------------------------


def is_clipped(facts: LayerFacts) -> bool:
    """True if many of the inputs saturate."""
    return facts.clipped is not None and facts.clipped >= MUCH_CLIPPED


def has_long_tail(facts: LayerFacts) -> bool:
    """True if outliers leave few levels to all other inputs. Blocks have scales of their own."""
    data = facts.site.inputs[0] if facts.site.inputs else None
    is_coarse = data is not None and data.kind is Kind.AFFINE and data.element_bits <= 8
    return is_coarse and not is_clipped(facts) and facts.tail is not None and facts.tail >= LONG_TAIL


def has_uneven_channels(facts: LayerFacts) -> bool:
    """True if channels of very different sizes share one scale."""
    weight = facts.site.weight
    has_one_scale = weight is not None and weight.kind is Kind.AFFINE and weight.has_one_scale
    return has_one_scale and (facts.dead > 0 or (facts.spread is not None and facts.spread >= WIDE_SPREAD))


def is_rounded_weight(facts: LayerFacts) -> bool:
    """True if the weight by itself accounts for the error."""
    return facts.weight_db is not None and facts.weight_db <= facts.local.sqnr_db + CLOSE_DB


def is_rounded_input(facts: LayerFacts) -> bool:
    """True if the input by itself accounts for the error."""
    return facts.input_db is not None and facts.input_db <= facts.local.sqnr_db + CLOSE_DB


def is_rounded_bias(facts: LayerFacts) -> bool:
    """True if only a bias of few bits is left to account for the error."""
    is_other = not (
        is_rounded_weight(facts) or is_rounded_input(facts) or is_clipped(facts) or has_uneven_channels(facts)
    )
    return is_other and facts.weight_db is not None and facts.input_db is not None and _bias_bits(facts) <= 8


def _bias_bits(facts: LayerFacts) -> float:
    site = facts.site
    return min(
        (operand.element_bits for operand in site.operands if operand.is_constant and site.is_bias(operand)),
        default=32.0,
    )


# --- causes -----------------------------------------------------------------------------------------------------------


def find_causes(facts: LayerFacts, share: float | None) -> tuple[str, ...]:
    """Return the causes of a layer's error, likeliest first. Empty if the error is negligible."""
    is_costly = share is not None and share >= LARGE_SHARE
    if facts.local.sqnr_db >= FINE_DB and not is_costly:
        return ()
    causes = list(_causes(facts))
    if facts.local.sqnr_db == -math.inf:
        causes.insert(0, "its result is not finite, or unrelated to the float network's")
    elif not causes and facts.site.is_result_rounded:
        causes.append("its result is quantized too, and may be clipped")
    elif not causes and is_rounded_bias(facts):
        causes.append(
            f"neither its weight nor its input accounts for it, and its bias has {_bias_bits(facts):.0f} bits"
        )
    if share is not None and is_costly and facts.local.sqnr_db >= 20:
        figures = f"{facts.local.sqnr_db:.0f} dB, {100 * share:.0f} % of the output error"
        causes.append(f"the output is sensitive to this layer: {figures}")
    return tuple(causes)


def _causes(facts: LayerFacts) -> Iterator[str]:
    weight = facts.site.weight
    if has_uneven_channels(facts):
        if facts.dead:
            yield f"{facts.dead} of {facts.channels} channels of the weight became zero: they share one scale"
        if facts.spread is not None and facts.spread >= WIDE_SPREAD:
            yield f"channels of the weight differ {facts.spread:.0f}-fold under one scale"
    if facts.clipped is not None and is_clipped(facts):
        yield f"{100 * facts.clipped:.1f} % of the inputs are clipped"
    if facts.tail is not None and has_long_tail(facts):
        yield f"the largest input is {facts.tail:.0f} times the 99.9th percentile: few levels for the rest"
    if weight is not None and 0 < facts.products <= FEW_PRODUCTS and weight.element_bits <= FEW_BITS:
        yield f"a sum has {facts.products} products only: {weight.element_bits:.0f}-bit rounding does not average out"
    if weight is not None and facts.weight_db is not None and is_rounded_weight(facts):
        yield f"rounding the weight to {weight.format} alone leaves {facts.weight_db:.1f} dB"
    if facts.input_db is not None and is_rounded_input(facts):
        yield f"rounding its input to {facts.site.inputs[0].format} alone leaves {facts.input_db:.1f} dB"


# --- remedies ---------------------------------------------------------------------------------------------------------


def find_remedies(
    facts: LayerFacts, config: Mapping[str, Any], share: float | None, in_float: Collection[str] = ()
) -> tuple[Remedy, ...]:
    """Return options that apply to a layer's operator and format and are not in use yet, likeliest to help first.

    `config` is what the file was made with, empty if it does not say. `in_float` names the nodes that stayed in float:
    a layer can be among them if what it reads is quantized.
    """
    return (
        *_scale_remedies(facts, config),
        *_input_remedies(facts, config),
        *_rounding_remedies(facts, config),
        *([] if facts.site.name in in_float else [_exclude(facts, share)]),
    )


def _scale_remedies(facts: LayerFacts, config: Mapping[str, Any]) -> Iterator[Remedy]:
    weight = facts.site.weight
    if weight is None or not has_uneven_channels(facts):
        return
    if not weight.has_power_of_two and not config.get("per_channel"):
        yield Remedy(Action.PER_CHANNEL, "give each channel of the weights its own scale", "per_channel=true")
    if facts.site.node.op_type in CONVOLUTIONS and not config.get("include_cle"):
        yield Remedy(Action.EQUALIZE, "even out channels between neighbouring layers", "include_cle=true")


def _input_remedies(facts: LayerFacts, config: Mapping[str, Any]) -> Iterator[Remedy]:
    data = facts.site.inputs[0] if facts.site.inputs else None
    if data is None or data.kind is not Kind.AFFINE:
        return
    used = str(config.get("calibrate_method", ""))
    if is_clipped(facts):
        method = "PowerOfTwoMethod.NonOverflow" if data.has_power_of_two else "CalibrationMethod.MinMax"
        if method.split(".")[-1] not in used:
            yield Remedy(Action.CALIBRATE, "take a range that holds all inputs", f"calibrate_method={method}")
        else:
            yield Remedy(Action.CALIBRATE, "calibrate on more samples: these inputs were not among them")
    if has_long_tail(facts):
        method = "PowerOfTwoMethod.MinMSE" if data.has_power_of_two else "CalibrationMethod.Percentile"
        if method.split(".")[-1] not in used:
            yield Remedy(Action.CALIBRATE, "take a range that leaves outliers out", f"calibrate_method={method}")
        if facts.site.node.op_type in PRODUCTS and not config.get("include_sq"):
            yield Remedy(Action.SMOOTH, "move the outliers of the input into the weights", "include_sq=true")


def _rounding_remedies(facts: LayerFacts, config: Mapping[str, Any]) -> Iterator[Remedy]:
    weight, data = facts.site.weight, facts.site.inputs[0] if facts.site.inputs else None
    if weight is not None and is_rounded_weight(facts) and not config.get("include_fast_ft"):
        if weight.kind is Kind.AFFINE:
            yield Remedy(Action.ADAROUND, "learn which way each weight is rounded (AdaRound)", "include_fast_ft=true")
        elif weight.kind is Kind.BLOCK:
            text = "learn the rounded weights (AdaQuant); also --set FastFinetune.OptimAlgorithm=adaquant"
            yield Remedy(Action.ADAROUND, text, "include_fast_ft=true")
    if is_rounded_bias(facts) and not config.get("extra_options", {}).get("Int32Bias"):
        yield Remedy(Action.MORE_BITS, "32 bits for biases; an NPU that reads 8 will not take them", "Int32Bias=true")
    wider = None if data is None else _more_bits(data, facts)
    if wider is not None:
        yield wider


def _more_bits(data: Operand, facts: LayerFacts) -> Remedy | None:
    """A wider format for the input."""
    if data.format in WIDER_ELEMENTS and data.kind is Kind.BLOCK:
        element = WIDER_ELEMENTS[data.format]
        return Remedy(Action.MORE_BITS, "wider elements, for all layers", f"MXAttributes.element_dtype={element}")
    if data.format in WIDER_MICROEXPONENTS and data.kind is Kind.BLOCK:
        bits = WIDER_MICROEXPONENTS[data.format]
        return Remedy(Action.MORE_BITS, "wider elements, for all layers", f"BFPAttributes.bit_width={bits}")
    is_needed = is_rounded_input(facts) or has_long_tail(facts)
    if data.kind is not Kind.AFFINE or data.element_bits > 8 or not is_needed:
        return None
    if len(setting("", [data.source.name])) > LONGEST_KEY:
        return None
    override = {str(data.source.name): [{"quant_type": "QuantType.QInt16"}]}
    text = "16 bits for its input" + ("; an NPU that takes 8 bits will not run it" if data.has_power_of_two else "")
    return Remedy(Action.MORE_BITS, text, setting("TensorQuantOverrides", override))


def _exclude(facts: LayerFacts, share: float | None) -> Remedy:
    figures = []
    if share is not None:
        figures.append(f"{100 * share:.0f} % of the output error" if share >= 0.01 else "under 1 % of the output error")
    if facts.parameters:
        figures.append(f"{facts.parameters:,} parameters")
    text = "leave it in float" + (f" ({', '.join(figures)})" if figures else "")
    return Remedy(Action.EXCLUDE, text, setting("nodes_to_exclude", list(facts.site.nodes)))


def first_steps(layers: Sequence[LayerDiagnosis]) -> tuple[Step, ...]:
    """Suggest to leave the worst layers in float, if they account for much of the error."""
    costly = [layer for layer in layers if layer.share and layer.weights]
    worst = sorted(costly, key=lambda layer: -(layer.share or 0))[:WORST]
    share = sum(layer.share or 0 for layer in worst)
    if not worst or share < WORTH_IT:
        return ()
    parameters = sum(layer.parameters for layer in layers) or 1
    cost = 100 * sum(layer.parameters for layer in worst) / parameters
    names = [node for layer in worst for node in layer.nodes]
    which = "most sensitive layer" if len(worst) == 1 else f"{len(worst)} most sensitive layers"
    text = (
        f"leave the {which} in float ({100 * share:.0f} % of the output error, {cost:.1f} % of the parameters; not "
        "tried)"
    )
    return (Step(text, shell_command(["--set", setting("nodes_to_exclude", names)])),)


# --- remarks ----------------------------------------------------------------------------------------------------------


def find_remarks(
    sites: Sites,
    factors: Factors,
    sensitivities: Sensitivities | None,
    wanted_samples: int,
    unusable: Sequence[str],
    restored: Restored,
) -> Iterator[str]:
    """Say how the figures came about. `unusable` are tensors whose shapes differ."""
    yield (
        "layers are compared with quantizers computed as they stand; outputs as the runtime deploys the file, with "
        "integer kernels"
    )
    if factors:
        yield (
            f"the network was equalized: {count_of(len(factors), 'tensor')} of it are the float ones times a factor "
            "for each channel, which was found from the weights and taken out before comparing"
        )
    if sites.lost:
        yield (
            f"{count_of(len(sites.lost), 'quantized node')} without a result that the float network has too count with "
            f"the next layer: {listed(sites.lost, 3)}"
        )
    if unusable:
        yield f"not compared, because shapes differ: {listed(unusable, 3)}"
    if sensitivities is not None and sensitivities.samples < wanted_samples:
        count = count_of(sensitivities.samples, "sample")
        yield f"sensitivities are of {count}, because more would have taken too long"
    if restored.activations:
        what = count_of(restored.activations, "Relu or Clip node")
        yield f"{what} that the file leaves to the quantizers behind were put back to compare"
    if restored.codes:
        what = count_of(restored.codes, "operator")
        yield f"{what} on codes: their results are compared after they are rounded to codes"
